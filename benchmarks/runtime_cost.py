"""What failover, deadlines and priorities cost while nothing goes wrong.

    python benchmarks/runtime_cost.py [--rounds 60] [--json]

One process, and in it blocks of 1,000 calls by turns: as the engine is; then with its dispatcher replaced by
the least that could stand there, which gives each batch to its first candidate, once, with no deadline, no
priority, no room to wait for and nothing to move on a failure; then again as it is. What the second differs
from the first is the cost, what the third differs from the first is how far the measurement is to be trusted.
A bound call (one of 4 KiB over shm) asks of all that only whether its transport is in trouble. Everything
before and after (checks, the plan, marks, the batch, counters) is the same code in both.

Exits with status 1 if the cost is above 3 % or 0.3 microseconds a call, whichever is larger, by the medians
of the differences between neighbouring blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import tent_core as tent
import tent_mock
from tent_core.batch import Batch, Options
from tent_core.bound import Bound, Outcome
from tent_core.dispatch import Dispatcher
from tent_core.peers import LivePeer
from tent_core.planning import Group
from tent_core.plugins import Registry
from tent_core.testing.peers import PeerProcess
from tent_core.transport import Endpoint
from tent_core.types import Reach
from tent_core.work import Work

CALLS = 1000
SIZE, BLOCKS = 4096, 1000
MOST_SHARE, MOST_US = 0.03, 0.3
_MERGED = "the benchmark's requests must not be neighbours"


class Cancel:
    """Interrupts a work, by its endpoint."""

    __slots__ = ("_endpoint", "_work")

    def __init__(self, work: Work, endpoint: Endpoint) -> None:
        self._work: Work | None = work
        self._endpoint = endpoint

    def cancel(self) -> None:
        """Nobody wants it any more."""
        if self._work is not None:
            self._endpoint.cancel(self._work)

    def ended(self) -> None:
        """There is nothing left to cancel."""
        self._work = None


class Plain:
    """The least that could carry a batch: one work, its first candidate, no matter what comes of it."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def start(
        self,
        batch: Batch,
        peer: LivePeer,
        groups: list[Group],
        options: Options,
        deadline: float,
        began: float,
        may_block: bool,
    ) -> None:
        """See Dispatcher.start."""
        for group in groups:
            assert group.merge is None, _MERGED
            name, rows = group.selection.candidates[0], group.rows

            def finished(work: Work, name: str = name, rows: Any = rows) -> None:
                n = batch.requests(rows)
                self._dispatcher.count(peer, name, work, n, len(work.causes), 0.0)
                batch.settle(rows, work.status, work.moved, name, work.requests.total)

            work = Work(group.requests, finished, may_block=may_block)
            if not may_block:  # that it can be cancelled is not what is measured
                batch.carried_by((Cancel(work, peer.endpoints.ready[name]),), None)
            peer.endpoints.ready[name].submit(work)


def _unguarded(bound: Bound) -> Outcome:
    """A bound call that does not ask whether its transport is in trouble."""
    if not bound.lease.begin():
        return False
    done = bound._call()
    assert done is True
    bound.lease.succeeded()
    return True


class Switch:
    """Replaces the dispatcher's `start`, and the deadline of each call, and puts them back."""

    def __init__(self, engine: tent.Engine) -> None:
        self._engine = engine
        self._plain = Plain(engine.dispatcher).start
        self._full = engine.dispatcher.start
        self._guarded = Bound.__call__

    def __call__(self, plain: bool) -> None:
        engine: Any = self._engine
        if plain:
            engine.dispatcher.start = self._plain
            Bound.__call__ = _unguarded  # type: ignore[assignment, method-assign]
            engine.deadline = lambda options, now: float("inf")
        else:
            engine.dispatcher.start = self._full
            Bound.__call__ = self._guarded  # type: ignore[method-assign]
            engine.__dict__.pop("deadline", None)


def compare(
    engine: tent.Engine, call: Callable[[], object], calls: int, rounds: int
) -> dict[str, float]:
    """Microseconds a call: as it is, without, and the differences; medians of all rounds."""
    switch = Switch(engine)
    rows = []
    for _ in range(rounds + 3):
        row = []
        for plain in (False, True, False):
            switch(plain)
            began = time.perf_counter()
            for _ in range(calls):
                call()
            row.append((time.perf_counter() - began) / calls * 1e6)
        rows.append(row)
    switch(False)
    full, plain, again = np.array(rows[3:]).T
    cost = float(np.median((full + again) / 2 - plain))
    return {
        "us": round(float(np.median(full)), 3),
        "without_us": round(float(np.median(plain)), 3),
        "cost_us": round(cost, 3),
        "cost_percent": round(100 * cost / float(np.median(plain)), 2),
        "itself_us": round(float(np.median(again - full)), 3),
        "least_us": round(float(full.min()), 3),
        "least_without_us": round(float(plain.min()), 3),
    }


def cases(
    engine: tent.Engine, owner: str, name: str
) -> dict[str, tuple[Callable[[], object], int]]:
    """What is called, and how often in a block."""
    segment = engine.open_segment(owner)
    remote = segment.buffer("pool")
    local = engine.allocate(2 * BLOCKS * SIZE)
    one = segment.prepare("write", local[0:SIZE], remote[0:SIZE])
    rng = np.random.default_rng(1)
    here, there = (2 * SIZE * rng.permutation(BLOCKS) for _ in range(2))
    many = segment.prepare_many("write", local, here, remote, there, SIZE)
    one.run()
    many.run()
    return {
        f"{name}, one of 4 KiB": (one.run, CALLS),
        f"{name}, 1,000 of 4 KiB": (many.run, CALLS // 10),
        f"{name}, one, not waiting": (lambda: one.post().wait(10), CALLS),
    }


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """All cases, over a transport that moves nothing and over shm."""
    found: dict[str, dict[str, float]] = {}
    registry = Registry.of(tent_mock.declare("mock", 1000, reach=Reach.NETWORK))
    config: dict[str, Any] = {
        "transports": {"mock": {"enable": True, "move": False}},
        "policy": [{"name": "only", "transports": ["mock"]}],
        "log": {"level": "error"},
    }
    with (
        tent.Engine(config, plugins=registry) as there,
        tent.Engine(config, plugins=registry) as here,
    ):
        there.allocate(2 * BLOCKS * SIZE, name="pool")
        for what, (call, calls) in cases(here, there.segment_name, "mock").items():
            found[what] = compare(here, call, calls, rounds)
    config["transports"] = {"shm": {"enable": True}}
    config["policy"] = [{"name": "only", "transports": ["shm"]}]
    with PeerProcess(config) as owner, tent.Engine(config) as engine:
        owner.run("pool = engine.allocate(size, name='pool')", size=2 * BLOCKS * SIZE)
        for what, (call, calls) in cases(engine, owner.segment_name, "shm").items():
            found[what] = compare(engine, call, calls, rounds)
    return found


def main() -> int:
    """Measure, and print a table or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.rounds)
    dear = {
        what: each["cost_us"] > max(MOST_US, MOST_SHARE * each["without_us"])
        for what, each in found.items()
    }
    if options.json:
        print(
            json.dumps({"load": os.getloadavg()[0], "results": found, "ok": not any(dear.values())})
        )
    else:
        print(f"load average {os.getloadavg()[0]:.1f}; microseconds a call")
        for what, each in found.items():
            print(
                f"{what:24} {each['us']:9.2f}, without {each['without_us']:9.2f}: costs"
                f" {each['cost_us']:6.2f} ({each['cost_percent']:5.1f} %); beside itself"
                f" {each['itself_us']:6.2f}  {'NOT OK' if dear[what] else 'ok'}"
            )
    return int(any(dear.values()))


if __name__ == "__main__":
    sys.exit(main())
