#!/usr/bin/env python3
"""Several application threads at once, each with transfers of its own, beside one thread.

    python benchmarks/threads.py [--transport tcp] [--rounds 3] [--seconds 0.5] [--json]
    python benchmarks/threads.py --transport shm --case 4KiBx1 --profile

One initiator and one target for each transport. In each round every case is done by one, two, four and
eight threads in turn, and rates are calls per second of all threads together, bytes checked before and
after. The exit status is 1 if two or more threads are below 0.8 of one thread's rate with single blocks up
to 64 KiB, or below 1.3 times it with larger ones and with batches, by the medians of the rounds' ratios.
What several threads gain with the system call alone is shown beside them. --profile shows where one of the
threads spends its time while it is alone, and while it is one of the most.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import multiprocessing
import pstats
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from figures import Figure, conclude
from peerbench import SPAN, cma, cma_target

from tent_core.bench.cases import SEED, Case, Memory, Work, parse_case, works
from tent_core.bench.measure import Bench, timed_together
from tent_core.bench.run import BenchOptions, ends
from tent_core.types import Opcode

THREADS = (2, 4, 8)
CASES = ("4KiBx1", "64KiBx1", "1MiBx1", "4KiBx1000", "16KiBx1000")
SMALL = 64 << 10
LEAST_SMALL, LEAST_LARGE = 0.8, 1.3
"""Of one thread's rate: single blocks up to SMALL wait for the interpreter lock; the rest can use cores."""

KINDS = (("shm", Memory.ALLOCATED), ("shm", Memory.REGISTERED), ("tcp", Memory.ALLOCATED))
LIMIT = "process_vm_*"
LINES = 12


class Row(NamedTuple):
    """One case over one transport: calls per second by number of threads, one for each round."""

    name: str
    case: Case
    rates: dict[int, list[float]]

    def figures(self) -> list[Figure]:
        """The ratios beside their floors; none for the limit."""
        if self.name.startswith(LIMIT):
            return []
        small = self.case.batch == 1 and self.case.block <= SMALL
        floor = LEAST_SMALL if small else LEAST_LARGE
        return [
            Figure(f"{self.name}, {n} threads, of one's rate", ratio, floor, at_least=True)
            for n, ratio in self.ratios().items()
        ]

    def ratios(self) -> dict[int, float]:
        """Median of the rounds' ratios to one thread, by number of threads."""
        alone = self.rates[1]
        return {
            n: statistics.median(many / one for many, one in zip(rates, alone, strict=True))
            for n, rates in self.rates.items()
            if n > 1
        }


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


def measure(bench: Bench, rounds: int, name: str, plans: list[tuple[Work, ...]]) -> list[Row]:
    """Rates of every case over one transport, with bytes checked before and after."""
    rows = []
    for each in plans:
        calls = [bench.call(work) for work in each]
        bench.check(each[0], calls[0], 1)
        rows.append(rates(f"{name} {_name(each[0])}", each[0].case, calls, bench.seconds, rounds))
        bench.check(each[0], calls[0], 3)
    return rows


def limit(plans: list[tuple[Work, ...]], seconds: float, rounds: int) -> list[Row]:
    """The same with `process_vm_writev` and `process_vm_readv` alone, which need no interpreter lock."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    other = spawn.Process(target=cma_target, args=(theirs,), daemon=True)
    other.start()
    pid, base = ours.recv()
    span = np.ones(SPAN, np.uint8)
    start = span.ctypes.data
    case = cma(pid, base, start)
    rows = []
    for each in plans:
        calls: list[Callable[[], object]] = []
        for work in each:
            here, there = (work.local + np.uint64(start)), (work.remote + np.uint64(base))
            op = work.opcode.name.lower()
            calls.append(case(op, here.tolist(), there.tolist(), work.case.block))
        rows.append(rates(f"{LIMIT} {_name(each[0])}", each[0].case, calls, seconds, rounds))
    other.kill()
    return rows


def rates(
    name: str, case: Case, calls: list[Callable[[], object]], seconds: float, rounds: int
) -> Row:
    """Rates by one and by several threads in turn, round by round, so that drift meets all alike."""
    row = Row(name, case, {})
    timed_together(calls, 0)  # the first calls make what is kept
    for _ in range(rounds):
        for n in (1, *THREADS):
            row.rates.setdefault(n, []).append(timed_together(calls[:n], seconds)[1])
    print(row.name, {n: round(x, 2) for n, x in row.ratios().items()}, file=sys.stderr)
    return row


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
    cases = tuple(map(parse_case, args.case or CASES))
    rows: list[Row] = []
    for transport, memory in KINDS:
        if transport not in (args.transport or ("shm", "tcp")):
            continue
        name = f"{transport} {memory}"
        with ends(options(transport, memory, args.seconds)) as bench:
            bench = replace(bench, threads=max(THREADS))
            for op in args.op or ("write", "read"):
                plans = plan(Opcode[op.upper()], cases, bench.span)
                if args.profile:
                    for each in plans:
                        profile(bench, name, each)
                else:
                    rows += measure(bench, args.rounds, name, plans)
    if not args.profile and "shm" in (args.transport or ("shm",)):
        for op in args.op or ("write", "read"):
            rows += limit(plan(Opcode[op.upper()], cases, SPAN), args.seconds, args.rounds)
    return rows


def show(rows: list[Row]) -> None:
    """The table for people."""
    print(f"{'':36}{'one, calls/s':>14}" + "".join(f"{f'x {n}':>8}" for n in THREADS))
    for row in rows:
        ratios = "".join(f"{ratio:>8.2f}" for ratio in row.ratios().values())
        print(f"{row.name:36}{statistics.median(row.rates[1]):>14,.0f}{ratios}")


def main() -> int:
    """Measure, and print a table or one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several: dict[str, Any] = {"action": "append"}
    parser.add_argument("--transport", **several, choices=["shm", "tcp"], help="default: both")
    parser.add_argument("--case", **several, metavar="BLOCKxBATCH", help=f"default: {CASES}")
    parser.add_argument("--op", **several, choices=["write", "read"], help="default: both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each number (0.5)")
    parser.add_argument("--profile", action="store_true", help="show where the time goes instead")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    rows = run(args)
    figures = [figure for row in rows for figure in row.figures()]
    if args.json:
        rates = [{"row": row.name, "calls_per_s": row.rates} for row in rows]
        print(json.dumps({"rows": rates, "figures": [f.as_json() for f in figures]}))
    elif rows:
        show(rows)
    return conclude(figures)


if __name__ == "__main__":
    raise SystemExit(main())
