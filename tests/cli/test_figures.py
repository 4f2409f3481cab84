"""Benchmarks with bounds: what is found is held against them, and one that is missed fails the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tent_core.bench.cases import Case

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("figures", "footprint", "peerbench", "surroundings", "growth", "memory", "threads")


def test_a_figure_at_its_bound_is_met_and_beyond_it_is_missed(
    modules: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    figure, conclude = modules["figures"].Figure, modules["figures"].conclude
    good = [figure("time", 2.0, 2.0), figure("rate", 2.0, 2.0, at_least=True)]
    assert conclude(good) == 0
    assert conclude([*good, figure("time", 2.1, 2.0)]) == 1
    assert conclude([*good, figure("rate", 1.9, 2.0, "GB/s", at_least=True)]) == 1
    assert "MISSED  rate: 1.9 GB/s, at least 2" in capsys.readouterr().err


def test_growth_is_judged_over_the_limit_by_the_block_and_by_the_submit(
    modules: dict[str, ModuleType],
) -> None:
    def rows(small: float, large: float) -> list[dict[str, float]]:
        blocks = ((100, small, 2.0), (1_000, 0.5, 1.0), (10_000, 0.6, large))
        return [{"blocks": n, "us_per_block": us, "over_limit": over} for n, us, over in blocks]

    submit = [{"blocks": 1, "us": 30.0}, {"blocks": 1_000, "us": 109.0}]
    submit.append({"blocks": 10_000, "us": 900.0})
    judge = modules["growth"].judge
    found = {"blocks": {"shm": rows(0.74, 1.09)}, "submit": {"mock": submit}}
    assert modules["figures"].missed(judge(found)) == [
        figure for figure in judge(found) if figure.what == "submit, a block of 10,000"
    ]
    assert len(modules["figures"].missed(judge({"blocks": {"shm": rows(0.76, 1.11)}}))) == 2


def test_threads_have_one_floor_for_small_blocks_and_another_for_the_rest(
    modules: dict[str, ModuleType],
) -> None:
    row = modules["threads"].Row
    rates = {2: [(100.0, 90.0), (200.0, 180.0)], 4: [(100.0, 140.0), (200.0, 280.0)]}
    machine = {2: [(100.0, 100.0)], 4: [(100.0, 100.0)]}
    for case, met in (
        (Case(65536, 1), [True, True]),
        (Case(1 << 20, 1), [False, True]),
        (Case(4096, 1000), [False, True]),
    ):
        assert [f.met for f in row("shm write", case, rates, machine).figures()] == met


def test_an_engine_is_held_against_an_interpreter_and_a_helper_against_its_own_bound(
    modules: dict[str, ModuleType],
) -> None:
    taken = modules["memory"].Taken
    rounds = [{"opened": taken(60.0, 40.0), "helper 1": taken(41.0, 20.0)}]
    engine, helper = modules["memory"].judge(taken(40.0, 20.0), rounds)
    assert (engine.found, engine.met) == (20.0, True)
    assert not helper.met


def test_waiting_costs_a_process_next_to_nothing() -> None:
    command = (sys.executable, str(BENCHMARKS / "waiting.py"), "--seconds", "0.2")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("met") == 3
