"""The examples run as they are printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("config", [None, "tent.yaml", "mixed.yaml"])
def test_two_processes_exchange_blocks(config: str | None) -> None:
    args = [] if config is None else [str(EXAMPLES / config)]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "two_processes.py"), *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1000 blocks, all right" in done.stdout
