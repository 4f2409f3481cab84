#!/usr/bin/env python3
"""Several application threads at once, each with transfers of its own, beside one thread.

    python benchmarks/threads.py [--transport tcp] [--rounds 3] [--seconds 0.5] [--json]
    python benchmarks/threads.py --transport shm --case 4KiBx1 --profile

One initiator and one target for each transport. Every thread has blocks of its own, and N threads are set
against one that makes the same calls in turn: with eight times the blocks the caches alone make one thread
four times as slow (1,000 x 4 KiB copied by numpy: 136 and 525 microseconds a call). Rates are calls per
second of all threads together; both are measured in each round, and bytes are checked before and after. The
exit status is 1 if two or more threads are below 0.8 of one thread's rate with single blocks up to 64 KiB, or
below 1.3 times it with larger ones and with batches, by the medians of the rounds' ratios.

Beside them is what as many processes gain over one by bare means (`processes.py`): the most that the machine
gives. --profile shows where one of the threads spends its time while it is alone, and among the most.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import os
import pstats
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from figures import Figure, conclude
from processes import MEANS, movers

from tent_core.bench.cases import SEED, Case, Memory, Work, parse_case, works
from tent_core.bench.measure import Bench, timed_together
from tent_core.bench.run import BenchOptions, ends
from tent_core.errors import UsageError
from tent_core.types import Opcode

THREADS = (2, 4, 8)
CASES = ("4KiBx1", "64KiBx1", "1MiBx1", "4KiBx1000", "16KiBx1000")
SMALL = 64 << 10
LEAST_SMALL, LEAST_LARGE = 0.8, 1.3
"""Of one thread's rate: single blocks up to SMALL wait for the interpreter lock; the rest can use cores."""

KINDS = (("shm", Memory.ALLOCATED), ("shm", Memory.REGISTERED), ("tcp", Memory.ALLOCATED))
LINES = 12

Shares = Sequence[Sequence[int]]
"""Of each thread, or process: the numbers of the calls that it makes in turn."""

Rates = dict[int, list[tuple[float, float]]]


class Row(NamedTuple):
    """One case over one transport. `rates` are calls per second by number of threads, for each round a pair:
    of one thread, and of that many, with the same calls; `machine` is the same of processes."""

    name: str
    case: Case
    rates: Rates
    machine: Rates

    def figures(self) -> list[Figure]:
        """The ratios beside their floors."""
        small = self.case.batch == 1 and self.case.block <= SMALL
        floor = LEAST_SMALL if small else LEAST_LARGE
        return [
            Figure(f"{self.name}, {n} threads, of one's rate", ratio, floor, at_least=True)
            for n, ratio in ratios(self.rates).items()
        ]


def ratios(rates: Rates) -> dict[int, float]:
    """Median of the rounds' ratios to one thread, by number of threads."""
    return {n: statistics.median(many / one for one, many in pairs) for n, pairs in rates.items()}


def options(transport: str, memory: Memory, seconds: float) -> BenchOptions:
    """What `tent bench` would take for that transport alone."""
    config = {
        "transports": {transport: {"enable": True}},
        "policy": [{"name": "only", "transports": [transport]}],
        "log": {"level": "error"},
    }
    return BenchOptions(config=config, memory=memory, seconds=seconds)


def plan(opcode: Opcode, cases: tuple[Case, ...], span: int) -> list[tuple[Work, ...]]:
    """For each case, what each of the most threads does: offsets of its own."""
    each = [works((opcode,), cases, span, SEED + i) for i in range(max(THREADS))]
    return list(zip(*each, strict=True))


def measure(bench: Bench, rounds: int, name: str, works_: tuple[Work, ...]) -> Row:
    """Rates of one case over one transport, with bytes checked before and after, and those of the machine."""
    work = works_[0]
    calls = [bench.call(each) for each in works_]
    bench.check(work, calls[0], 1)
    timed_together(calls, 0)  # the first calls make what is kept

    def threads(shares: Shares) -> float:
        return timed_together([_in_turn([calls[i] for i in s]) for s in shares], bench.seconds)[1]

    cpus = len(os.sched_getaffinity(0))
    rates = alternated(threads, rounds)
    bench.check(work, calls[0], 3)
    with movers(MEANS[name], works_) as processes:
        machine = alternated(lambda shares: processes.rate(shares, bench.seconds), rounds, cpus)
    row = Row(f"{name} {_name(work)}", work.case, rates, machine)
    shown = [{n: round(x, 2) for n, x in ratios(r).items()} for r in (rates, machine)]
    print(row.name, *shown, file=sys.stderr)
    return row


def alternated(rate: Callable[[Shares], float], rounds: int, most: int = max(THREADS)) -> Rates:
    """Rates by one and by several (at most `most`) with the same calls, round by round, so that drift meets
    all alike."""
    rates: Rates = {n: [] for n in THREADS}
    for _ in range(rounds):
        for n, pairs in rates.items():
            several = min(n, most)
            pairs.append((rate([range(n)]), rate([range(i, n, several) for i in range(several)])))
    return rates


def _in_turn(calls: list[Callable[[], object]]) -> Callable[[], object]:
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def _name(work: Work) -> str:
    return f"{work.opcode.name.lower()} {work.case}"


def profile(bench: Bench, name: str, works_: tuple[Work, ...]) -> None:
    """Print where the first thread spends its time, alone and among the most."""
    calls = [bench.call(work) for work in works_]
    for n in (1, max(THREADS)):
        profiler = cProfile.Profile()
        timed_together([_profiled(calls[0], profiler), *calls[1:n]], bench.seconds)
        print(f"\n{name} {_name(works_[0])}, one of {n} threads")
        pstats.Stats(profiler, stream=sys.stdout).strip_dirs().sort_stats("tottime").print_stats(
            LINES
        )


def _profiled(call: Callable[[], object], profiler: cProfile.Profile) -> Callable[[], object]:
    return lambda: profiler.runcall(call)


def run(args: argparse.Namespace) -> list[Row]:
    """All transports; or print the profiles, and no rows."""
    cases = tuple(args.case or map(parse_case, CASES))
    rows: list[Row] = []
    for transport, memory in KINDS:
        if transport not in (args.transport or ("shm", "tcp")):
            continue
        name = f"{transport} {memory}"
        with ends(options(transport, memory, args.seconds)) as bench:
            bench = replace(bench, threads=max(THREADS))
            for op in args.op or ("write", "read"):
                plans = plan(Opcode[op.upper()], cases, bench.span)
                for each in plans:
                    if args.profile:
                        profile(bench, name, each)
                    else:
                        rows.append(measure(bench, args.rounds, name, each))
    return rows


def show(rows: list[Row]) -> None:
    """The table for people: microseconds a call, by one thread and by several; then what processes gain."""
    heads = "".join(f"{f'{n}: one, all':>15}{'x':>6}{'(max)':>7}" for n in THREADS)
    print(f"{'':34}{heads}")
    for row in rows:
        cells = []
        machine = ratios(row.machine)
        for n, ratio in ratios(row.rates).items():
            one, many = (
                1e6 / statistics.median(rates) for rates in zip(*row.rates[n], strict=True)
            )
            cells.append(f"{f'{one:,.4g}, {many:,.4g}':>15}{ratio:>6.2f}{f'({machine[n]:.2f})':>7}")
        print(f"{row.name:34}" + "".join(cells))


def _case(text: str) -> Case:
    try:
        return parse_case(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> int:
    """Measure, and print a table or one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several: dict[str, Any] = {"action": "append"}
    parser.add_argument("--transport", **several, choices=["shm", "tcp"], help="default: both")
    parser.add_argument(
        "--case", **several, type=_case, metavar="BLOCKxBATCH", help=f"default: {CASES}"
    )
    parser.add_argument("--op", **several, choices=["write", "read"], help="default: both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each number (0.5)")
    parser.add_argument("--profile", action="store_true", help="show where the time goes instead")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    rows = run(args)
    figures = [figure for row in rows for figure in row.figures()]
    if args.json:
        rates = [
            {"row": row.name, "calls_per_s": row.rates, "processes_per_s": row.machine}
            for row in rows
        ]
        print(json.dumps({"rows": rates, "figures": [f.as_json() for f in figures]}))
    elif rows:
        show(rows)
    return conclude(figures)


if __name__ == "__main__":
    raise SystemExit(main())
