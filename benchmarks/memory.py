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
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from figures import Figure, conclude
from footprint import children, footprint

from tent_core.testing.peers import PeerProcess

MOST_ENGINE_MIB = 20.0
MOST_HELPER_MIB = 40.0
QUIET_S = 1.0
INTERPRETER = "import numpy, grpc, sys; print('ready', flush=True); sys.stdin.read()"


@dataclass(frozen=True, slots=True)
class Taken:
    """MiB that one side takes: its process, and each of its helpers."""

    process: float
    helpers: tuple[float, ...]


def config(transports: list[str]) -> dict[str, Any]:
    """Only these."""
    return {
        "transports": {name: {"enable": True} for name in transports},
        "policy": [{"name": "all", "transports": transports}],
        "log": {"level": "error"},
    }


def resident(pid: int) -> float:
    """MiB of that process that are in memory."""
    return footprint(pid).resident_kib / 1024


def taken(peer: PeerProcess) -> Taken:
    """By that process."""
    return Taken(resident(peer.pid), tuple(resident(pid) for pid in children(peer.pid)))


def interpreter() -> float:
    """MiB of a fresh interpreter that has imported numpy and grpc."""
    command = (sys.executable, "-c", INTERPRETER)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = resident(process.pid)
        process.kill()
    return found


def measure(transports: list[str]) -> dict[str, Taken]:
    """Both sides of a connection: the one that opened it, and the one that was opened."""
    with ExitStack() as stack:
        opened, opener = (stack.enter_context(PeerProcess(config(transports))) for _ in range(2))
        opener.run("segment = engine.open_segment(name)", name=opened.segment_name)
        time.sleep(QUIET_S)
        return {"opener": taken(opener), "opened": taken(opened)}


def judge(base: float, rounds: list[dict[str, Taken]]) -> list[Figure]:
    """The medians of all rounds, beside their bounds."""
    figures = []
    for side in rounds[0]:
        above = statistics.median(each[side].process for each in rounds) - base
        figures.append(
            Figure(f"{side}: engine above the interpreter", above, MOST_ENGINE_MIB, "MiB")
        )
        helpers = [max(each[side].helpers) for each in rounds if each[side].helpers]
        if helpers:
            figures.append(
                Figure(
                    f"{side}: its largest helper",
                    statistics.median(helpers),
                    MOST_HELPER_MIB,
                    "MiB",
                )
            )
    return figures


def main() -> int:
    """Measure, and print a table or one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", action="append", help="that is enabled; default: shm, tcp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    base = statistics.median(interpreter() for _ in range(args.rounds))
    rounds = [measure(args.transport or ["shm", "tcp"]) for _ in range(args.rounds)]
    figures = judge(base, rounds)
    if args.json:
        found = {"interpreter_mib": base, "figures": [figure.as_json() for figure in figures]}
        print(json.dumps(found))
    else:
        print(f"an interpreter with numpy and grpc takes {base:.1f} MiB")
        print(*figures, sep="\n")
    return conclude(figures)


if __name__ == "__main__":
    raise SystemExit(main())
