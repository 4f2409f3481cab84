"""The main job, over real verbs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from engines import config
from kernel import sent

from tent_rdma.devices import ChosenDevice

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(900)]

TRACE = Path(__file__).parents[4] / "examples/traces/small.jsonl"
REQUESTS = 20 if os.environ.get("TENT_TEST_FULL") == "1" else 3


def test_a_trace_is_replayed_over_both_rails_and_every_byte_is_right(
    tmp_path: Path, rails: tuple[ChosenDevice, ChosenDevice]
) -> None:
    settings = tmp_path / "rdma.yaml"
    settings.write_text(yaml.safe_dump(config()))
    before = [sent(rail.name) for rail in rails]
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "tent_core.cli",
                "replay",
                os.environ.get("TENT_TRACE", str(TRACE)),
            ),
            *("--requests", str(REQUESTS), "--bytes-per-token", "256", "--pool-size", "64MiB"),
            *("-c", str(settings), "--timeout", "300s", "--json"),
        ],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    print(report)
    assert report["verified"]
    assert report["mismatches"] == 0
    assert set(report["transports"]) == {"rdma"}
    packets = [sent(rail.name) - old for rail, old in zip(rails, before, strict=True)]
    # One rail is enough for the few pieces of 64 bytes that are under way at once, and the one that seems a
    # little faster gets most of them; probes alone would be a sixtieth.
    print(f"packets by rail: {packets}")
    assert min(packets) > 0.05 * max(packets), packets
