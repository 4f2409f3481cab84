#!/usr/bin/env python3
"""What an engine takes of memory before it does anything: with one peer, and no buffers.

    python benchmarks/memory.py [--transport shm --transport tcp] [--json]

Resident memory of fresh processes, read from outside: of an interpreter that has imported numpy and grpc,
and of the two sides of a connection. The exit status is 1 if an engine takes more than 20 MiB above that
interpreter, or one of its helper processes more than 40 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

from figures import Figure, conclude
from footprint import children, footprint, private_kib

from tent_core.testing.peers import PeerProcess

MOST_ENGINE_MIB = 20.0
MOST_HELPER_MIB = 40.0
QUIET_S = 1.0
INTERPRETER = "import numpy, grpc, sys; print('ready', flush=True); sys.stdin.read()"


class Taken(NamedTuple):
    """MiB of a process: all that is resident, and of it what is private."""

    resident: float
    private: float


def config(transports: list[str]) -> dict[str, Any]:
    """Only these."""
    return {
        "transports": {name: {"enable": True} for name in transports},
        "policy": [{"name": "all", "transports": transports}],
        "log": {"level": "error"},
    }


def taken(pid: int) -> Taken:
    """By that process, now."""
    return Taken(footprint(pid).resident_kib / 1024, private_kib(pid) / 1024)


def interpreter() -> Taken:
    """By a fresh interpreter that has imported numpy and grpc."""
    command = (sys.executable, "-c", INTERPRETER)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = taken(process.pid)
        process.kill()
    return found


def measure(transports: list[str]) -> dict[str, Taken]:
    """Both sides of a connection; and the helpers of the one that was opened, once it was written to."""
    with ExitStack() as stack:
        opened, opener = (stack.enter_context(PeerProcess(config(transports))) for _ in range(2))
        opener.run("segment = engine.open_segment(name)", name=opened.segment_name)
        time.sleep(QUIET_S)
        found = {"opener": taken(opener.pid), "opened": taken(opened.pid)}
        opened.run("pool = engine.allocate(4096, name='pool')")
        opener.run("source = engine.allocate(4096); remote = segment.buffer('pool')")
        for name in transports:
            opener.run("segment.write(source, remote, transport=name)", name=name)
        for number, pid in enumerate(children(opened.pid), 1):
            found[f"helper {number}"] = taken(pid)
        return found


def judge(base: Taken, rounds: list[dict[str, Taken]]) -> list[Figure]:
    """The medians of all rounds, beside their bounds."""
    figures = []
    for who in rounds[0]:
        resident = statistics.median(each[who].resident for each in rounds)
        if who.startswith("helper"):
            figures.append(Figure(f"{who}, resident", resident, MOST_HELPER_MIB, "MiB"))
        else:
            above = resident - base.resident
            what = f"{who}, resident above the interpreter"
            figures.append(Figure(what, above, MOST_ENGINE_MIB, "MiB"))
    return figures


def show(base: Taken, rounds: list[dict[str, Taken]]) -> None:
    """The medians, as a table."""
    print(f"{'MiB':30}{'resident':>10}{'private':>10}")
    print(f"{'interpreter, numpy, grpc':30}{base.resident:>10.1f}{base.private:>10.1f}")
    for who in rounds[0]:
        resident = statistics.median(each[who].resident for each in rounds)
        private = statistics.median(each[who].private for each in rounds)
        print(f"{who:30}{resident:>10.1f}{private:>10.1f}")


def main() -> int:
    """Measure, and print a table or one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", action="append", help="that is enabled; default: shm, tcp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as what is installed has its bytecode
    transports = args.transport or ["shm", "tcp"]
    measure(transports)  # compiles what is not yet compiled
    bases = [interpreter() for _ in range(args.rounds)]
    base = sorted(bases)[len(bases) // 2]
    rounds = [measure(transports) for _ in range(args.rounds)]
    figures = judge(base, rounds)
    if args.json:
        documents = [{who: each._asdict() for who, each in one.items()} for one in rounds]
        found = {"interpreter": base._asdict(), "rounds": documents}
        print(json.dumps({**found, "figures": [figure.as_json() for figure in figures]}))
    else:
        show(base, rounds)
        print(*figures, sep="\n")
    return conclude(figures)


if __name__ == "__main__":
    raise SystemExit(main())
