"""`benchmarks/compare.py`: two kinds of processes are two rows, and what cannot be measured says why."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare", BENCHMARKS / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_processes_of_two_kinds_become_two_rows(compare: ModuleType) -> None:
    times = [2100.0, 6000.0, 2000.0, 5900.0, 6100.0]
    assert list(compare.kinds("nixl", times)) == [
        ("nixl, fast kind", [2000.0, 2100.0]),
        ("nixl, slow kind", [5900.0, 6000.0, 6100.0]),
    ]
    assert [label for label, _ in compare.kinds("nixl", times[:1])] == ["nixl"]
    assert [label for label, _ in compare.kinds("nixl", [2000.0, 2100.0])] == ["nixl"]
    assert [label for label, _ in compare.kinds("cma", times)] == ["cma"]


def test_ratios_are_how_many_times_longer_than_tent(
    compare: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    case = compare.Case("write", 4096, 1000)
    times = {
        case: {"tent shm allocated": [2.0, 1.0, 3.0], "cma": [1.0], "mooncake": [40.0, 50.0, 60.0]}
    }
    compare.show(times, {"nixl": "no such library"})
    printed = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split() for line in printed.splitlines() if line}
    assert rows["tent shm allocated"][-1] == "1.00"
    assert rows["mooncake"][-1] == "25.00"
    assert rows["limit: process_vm_*"][-1] == "0.50"
    assert "nixl could not be measured: no such library" in printed
    document = compare.document(times, {}, Namespace(rounds=3, busy=None, seconds=1.0))
    assert [row["median_us"] for row in json.loads(json.dumps(document))["results"]] == [
        2.0,
        1.0,
        50.0,
    ]


def test_a_contender_that_fails_or_hangs_is_reported(compare: ModuleType) -> None:
    python = sys.executable
    fails = compare.Contender(
        "x", (python, "-c", "print('{\"op\": 1}'); raise SystemExit('no library')")
    )
    assert compare.run(fails, 30) == ([{"op": 1}], "no library")
    hangs = compare.Contender("x", (python, "-c", "import time; time.sleep(60)"))
    assert compare.run(hangs, 0.2) == ([], "it took more than 0 s")


def test_the_limits_of_the_machine_are_measured() -> None:
    script = (sys.executable, str(BENCHMARKS / "peerbench.py"), "--seconds=0", "--case=4096x10")
    done = subprocess.run(
        (*script, "--peer=cma", "--peer=tcp"),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["peer"], row["op"]) for row in rows] == [
        ("cma", "write"), ("cma", "read"), ("tcp", "write"), ("tcp", "read"),
    ]  # fmt: skip
