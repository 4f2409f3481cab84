"""Notifications over links that are cut and healed again and again: a short round of the benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tent_core.testing.namespaces import why_not

from .support import often

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "notifications.py"


@pytest.mark.namespaces
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_notification_arrives_once_in_order_and_after_its_data_over_links_that_are_cut() -> (
    None
):
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    senders, notes = often(2, 8), often(3000, 100_000)
    command = [sys.executable, str(BENCHMARK), "--json", "--resets"]
    options = ["--senders", str(senders), "--notes", str(notes), "--longest-cut", "4"]
    ran = subprocess.run([*command, *options], capture_output=True, text=True, timeout=850)
    found = json.loads(ran.stdout or "{}")
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    assert found["delivered"] - found["failures_told"] == notes
    assert found["cuts"] > 0
