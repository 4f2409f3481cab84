"""The table at the end of a run: what was proven, what was seen to be refused, what could not be tried."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SUITE = """
import tent_mock
from tent_core.plugins import Registry
from tent_core.testing.conformance import TransportConformance

class TestIt(TransportConformance):
    transport = "it"

    @classmethod
    def registry(cls):
        return Registry.of(tent_mock.declare("it", 1001))

    def test_more_than_the_suite_asks_for(self):
        assert not "really"
"""


def test_the_table_says_what_was_proven_refused_not_applicable_and_failed(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tent_core.testing.report"]
    command += ["-p", "no:cacheprovider", "-k", "random_batch or claimed or more_than or come_back"]
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50
    )
    lines = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    for line in (
        "proven batches: 1 test",
        "refused qp_pools: an entry that asks for it passes it over",
        "not applicable cancellation, processes: it does not claim to reach other processes (2 tests)",
        "FAILED its own: more than the suite asks for",
    ):
        assert line in lines, ran.stdout
    assert any("= conformance of it (TestIt) =" in line for line in lines)
    assert "PytestUnknownMarkWarning" not in ran.stdout
