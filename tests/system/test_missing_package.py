"""The package of a transport is not installed: `enable: auto` runs on the others, `true` is a clear error.

Here its entry point is hidden from an otherwise complete installation.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tent_core.testing.peers import PeerError

from .conftest import Make, Start

YAML = """
transports:
  shm: {enable: ENABLE}
  tcp: {enable: auto}
policy:
  - {name: anything, transports: [shm, tcp]}
log: {level: error}
"""
HIDE_SHM = """
import importlib.metadata, functools
whole = importlib.metadata.entry_points
def entry_points(**wanted):
    return importlib.metadata.EntryPoints(e for e in whole(**wanted) if e.name != "shm")
importlib.metadata.entry_points = entry_points
"""


def configuration(folder: Path, enable: str) -> str:
    file = folder / f"{enable}.yaml"
    file.write_text(YAML.replace("ENABLE", enable))
    return str(file)


def test_with_enable_auto_the_same_configuration_runs_on_tcp(
    make: Make, start: Start, tmp_path: Path
) -> None:
    config = configuration(tmp_path, "auto")
    here = make(config)
    there, whole = start(config, before=HIDE_SHM), start(config)
    local = here.register(np.full(1 << 20, 3, np.uint8))
    for peer, transport in ((there, "tcp"), (whole, "shm")):
        peer.run("target = engine.allocate(1 << 20, name='target')")
        with here.open_segment(peer.segment_name) as segment:
            batch = segment.write_many(local, [0], segment.buffer("target"), [0], 1 << 20)
        assert batch.transports() == {transport: 1 << 20}
        assert peer.run("int((target.array == 3).sum())") == 1 << 20
    assert "install tent-shm" in there.run(
        "next(p.reason for p in engine.explain().passed_over if p.name == 'shm')"
    )


def test_with_enable_true_it_is_an_error_that_says_what_to_install(
    start: Start, tmp_path: Path
) -> None:
    config = configuration(tmp_path, "true")
    with pytest.raises(PeerError, match="tent-shm") as raised:
        start(config, before=HIDE_SHM)
    assert raised.value.kind == "ConfigError"
    assert "line 3" in raised.value.message
    start(config)  # which has the package, and runs


def test_the_command_line_shows_what_is_missing_and_why(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE_SHM)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tent_core.cli", *arguments],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=50,
        )

    auto, true = (configuration(tmp_path, enable) for enable in ("auto", "true"))
    assert run("check", auto).returncode == 0
    refused = run("check", true)
    assert refused.returncode == 1
    assert "tent-shm" in refused.stderr
    explained = run("explain", "1MiB", "--config", auto)
    assert explained.returncode == 0
    assert "1. tcp" in explained.stdout
    assert "install tent-shm" in explained.stdout
