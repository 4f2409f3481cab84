#!/usr/bin/env python3
"""What waiting costs: processor time of a process whose transfer lasts seconds, by each way to wait for it.

    python benchmarks/waiting.py [--seconds 5] [--json]

The transfer is a mock's, which reports its end after so many seconds and moves nothing, so all that is
spent is spent on waiting. The exit status is 1 if a way to wait costs more than 50 ms of processor time, of
all threads of the process. A loop around `poll` costs what the loop costs, and is not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from figures import Figure, conclude

import tent_core as tent

SIZE = 4096
MOST_MS = 50.0


def config(seconds: float) -> dict[str, Any]:
    """A mock that takes so long for each request; it reaches the engines of its own process."""
    delay = {"on": "request", "do": "delay", "seconds": seconds}
    return {
        "transports": {"mock": {"enable": True, "script": [delay]}},
        "policy": [{"name": "only", "transports": ["mock"]}],
        "log": {"level": "error"},
    }


def ways(
    segment: tent.Segment, local: tent.Buffer, remote: tent.RemoteBuffer
) -> dict[str, Callable[[], object]]:
    """Each way to wait for a transfer."""

    def submit() -> tent.Batch:
        return segment.submit("write", local, [0], remote, [0], SIZE)

    async def awaited() -> None:
        await submit()

    return {
        "write": lambda: segment.write(local, remote),
        "wait": lambda: submit().wait(),
        "await": lambda: asyncio.run(awaited()),
    }


def measure(seconds: float) -> dict[str, tuple[float, float]]:
    """Seconds of time and of processor time for each way to wait."""
    found = {}
    settings = config(seconds)
    with tent.Engine(settings) as owner, tent.Engine(settings) as engine:
        owner.allocate(SIZE, name="pool")
        segment = engine.open_segment(owner.segment_name)
        local = engine.register(np.zeros(SIZE, np.uint8))
        for name, call in ways(segment, local, segment.buffer("pool")).items():
            began, spent = time.perf_counter(), time.process_time()
            call()
            found[name] = (time.perf_counter() - began, time.process_time() - spent)
    return found


def main() -> int:
    """Measure, and print a table or one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="that the transfer lasts (5)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    found = measure(args.seconds)
    figures = [
        Figure(f"processor time of {name}, {lasted:.1f} s", 1000 * spent, MOST_MS, "ms")
        for name, (lasted, spent) in found.items()
    ]
    if args.json:
        print(json.dumps({"figures": [figure.as_json() for figure in figures]}))
    else:
        print(*figures, sep="\n")
    return conclude(figures)


if __name__ == "__main__":
    raise SystemExit(main())
