"""The main job over the stand-in: a prefill and a decode process, every byte checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tent_mock.mpcomm import ON_THE_PATH

REQUESTS, SHARED = 50, 3


def test_a_replay_of_50_requests_between_two_processes_is_verified(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": 100 * n,
            "input_length": 512 * (SHARED + 1),
            "output_length": 8,
            "hash_ids": [*range(SHARED), SHARED + n],
        }
        for n in range(REQUESTS)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["replay", str(trace), "--transport", "mpcomm", "--json"]
    size = ["--bytes-per-token", "256", "--pool-size", "64MiB"]
    done = subprocess.run(
        [sys.executable, "-m", "tent_core.cli", *command, *size],
        env={**os.environ, "PYTHONPATH": str(ON_THE_PATH)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["requests"], report["verified"], report["mismatches"]) == (REQUESTS, True, 0)
    assert report["blocks_sent"] == REQUESTS + SHARED
    assert report["transports"] == {"mpcomm": report["bytes"]}
