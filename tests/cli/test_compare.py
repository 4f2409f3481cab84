"""`benchmarks/compare.py`: kinds of processes, floors, the page, and what cannot be measured says why."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("figures", "results", "floors", "tables", "page", "surroundings", "compare")
CASE = "write 4096x1000"


def result(modules: dict[str, ModuleType], times: dict[str, list[float]], **more: Any) -> Any:
    """A result with one process for each time of CASE, or of the case given, by contender or (it, state)."""
    made = modules["results"].Result({"cores": "2"}, 1.0, 3)
    for who, found in times.items():
        contender, _, state = who.partition(", ")
        for number, us in enumerate(found):
            run = modules["results"].Run(
                contender, state or "idle", number, {more.get("case", CASE): us}
            )
            made.runs.append(run)
    return made


def figures(modules: dict[str, ModuleType], found: Any) -> dict[str, Any]:
    return {figure.what: figure for figure in modules["floors"].judge(found)}


def test_processes_of_nixl_come_in_two_kinds_and_the_fast_one_counts(
    modules: dict[str, ModuleType],
) -> None:
    found = result(
        modules,
        {"nixl": [2100, 6000, 2000, 5900], "cma": [500, 900], "tent shm allocated": [800.0]},
    )
    assert {kind: len(runs) for kind, runs in found.kinds("nixl").items()} == {
        "fast kind": 2,
        "slow kind": 2,
    }
    assert found.kinds("cma") == {}
    assert result(modules, {"nixl": [2100, 2200]}).kinds("nixl") == {}
    assert result(modules, {"nixl": [2100]}).kinds("nixl") == {}
    what = "shm, allocated memory to nixl, write 1,000 x 4 KiB"
    assert figures(modules, found)[what].found == pytest.approx(2050 / 800)
    printed = "\n".join(modules["tables"].document(found, modules["floors"].judge(found)))
    assert "nixl, fast kind" in printed
    assert "nixl, slow kind" in printed


def test_a_ratio_below_its_floor_and_a_batch_beyond_its_limit_are_missed(
    modules: dict[str, ModuleType],
) -> None:
    found = result(
        modules,
        {
            "tent tcp allocated": [1000, 1100, 900],
            "mooncake": [9000],
            "nixl-tcp": [6500],
            "tcp": [700],
        },
    )
    by = figures(modules, found)
    assert not by["tcp to mooncake, write 1,000 x 4 KiB"].met
    assert by["tcp to nixl-tcp, write 1,000 x 4 KiB"].met
    assert by["tcp over tcp, write 1,000 x 4 KiB"].met
    assert "9.00 * (floor 10)" in modules["tables"].ratios(found, "idle")
    assert modules["figures"].conclude(list(by.values())) == 1


def test_a_busy_target_has_rules_of_its_own(modules: dict[str, ModuleType]) -> None:
    found = result(
        modules,
        {
            "tent tcp allocated": [1000],
            "tent tcp allocated, target": [2600],
            "mooncake, target": [2700],
            "nixl-tcp, target": [2500],
        },
    )
    by = figures(modules, found)
    where = "tcp, busy target, write 1,000 x 4 KiB"
    assert not by[f"{where}, faster peer"].met
    assert by[f"{where}, when idle"].found == pytest.approx(2.6)
    assert not by[f"{where}, when idle"].met
    printed = "\n".join(modules["tables"].document(found, list(by.values())))
    assert "0.96 (2,600)" in printed
    small = result(
        modules,
        {"tent tcp allocated, target": [120], "mooncake, target": [36]},
        case="read 4096x1",
    )
    assert figures(modules, small)["tcp, busy target, read 1 x 4 KiB, faster peer"].met


def test_a_saved_result_is_read_again_and_makes_the_page(modules: dict[str, ModuleType]) -> None:
    found = result(modules, {"tent tcp allocated": [1000], "mooncake": [20000], "tcp": [700]})
    again = modules["results"].of_json(json.loads(json.dumps(found.as_json())))
    assert again == found
    document = {"figures": [modules["figures"].Figure("time of x", 3.0, 2.0).as_json()]}
    others = {"waiting": modules["figures"].of_json(document)}
    text = modules["page"].speed(again, modules["floors"].judge(again), others)
    assert "20.00 (floor 10)" in text
    assert "`benchmarks/waiting.py`:\n\n- MISSED  time of x: 3, at most 2" in text
    assert "cores 2" in text
    (row,) = modules["page"].picture(again)["pairs"][2]["rows"]
    assert (row["ratio"], row["floor"], row["what"]) == (20.0, 10, "1,000 x 4 KiB")


def test_a_contender_that_fails_or_hangs_is_reported(modules: dict[str, ModuleType]) -> None:
    run, python = modules["compare"].run, sys.executable
    fails = (python, "-c", "print('{\"op\": 1}'); raise SystemExit('no library')")
    assert run(fails, 30) == ([{"op": 1}], "no library")
    hangs = (python, "-c", "import time; time.sleep(60)")
    assert run(hangs, 0.2) == ([], "it took more than 0 s")


def test_the_limits_of_the_machine_are_measured() -> None:
    script = (sys.executable, str(BENCHMARKS / "peerbench.py"), "--seconds=0", "--case=4096x1030")
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


@pytest.mark.parametrize("option", ["--render", "--others"])
@pytest.mark.parametrize("content", [None, "no document"])
def test_what_is_no_saved_result_is_named_before_anything_is_measured(
    tmp_path: Path, option: str, content: str | None
) -> None:
    saved = tmp_path / "speed.json"
    if content is not None:
        saved.write_text(content)
    command = (sys.executable, str(BENCHMARKS / "compare.py"), option, str(saved))
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert f"argument {option}: {saved} is no result that was saved" in ran.stderr
    assert "Traceback" not in ran.stderr
