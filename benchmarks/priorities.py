"""What a small urgent get waits for behind bulk, and what bulk pays for it.

    python benchmarks/priorities.py [--transport tcp] [--gets 3000] [--rounds 5] [--json]

Two processes. A 4 KiB get of high priority every 10 ms, first with nothing else under way, then beside 64 MiB
writes of low priority that are always under way; and those writes alone. The three alternate in rounds, so
that a machine that is busy with something else is so for all of them. Every get is compared with what it
should have got, every write with its source, at the owner.

The 99th percentile beside bulk may be three times the one without, plus the time of one slice (what bulk is
cut into, `scheduling.slice`) at the rate at which bulk goes alone; bulk must keep 80 % of that rate. Exits
with status 1 if one of them does not hold, by the medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import tent_core as tent
from tent_core.testing.peers import PeerProcess

GET, BULK, EVERY_S = 4096, 64 << 20, 0.010
GETS = 1024
"""Different places to get from."""
UNDER_WAY = 2
"""Bulk writes under way at once."""
MOST_TIMES, LEAST_SHARE = 3.0, 0.8

OWNER = """
pool = engine.allocate(gets * get, name="pool")
pool.array[:] = np.random.default_rng(7).integers(0, 256, gets * get, dtype=np.uint8)
bulk = [engine.allocate(size, name=f"bulk{i}") for i in range(count)]
sources = [np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8) for seed in range(2)]
"""


@dataclass
class Figures:
    """What the rounds of one transport measured: seconds of every get, bytes a second of bulk."""

    idle: list[np.ndarray[Any, Any]] = field(default_factory=list)
    beside: list[np.ndarray[Any, Any]] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    shared: list[float] = field(default_factory=list)
    slice_bytes: int = 0


class Bulk:
    """Writes of low priority, always `UNDER_WAY` of them, from a thread; checked at the owner at the end."""

    def __init__(self, segment: tent.Segment, sources: list[Any], owner: PeerProcess) -> None:
        self._owner = owner
        self._targets = [segment.buffer(f"bulk{i}") for i in range(UNDER_WAY)]
        self._segment, self._sources = segment, sources
        self.done = 0
        self._last = [0] * UNDER_WAY
        self._stop = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Bulk:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()
        if self._error is not None:
            raise self._error
        wrong = self._owner.run(
            "[i for i, s in enumerate(last) if not np.array_equal(bulk[i].array, sources[s])]",
            last=self._last,
        )
        if wrong:
            raise SystemExit(f"bulk writes arrived wrong at the owner: {wrong}")

    def _run(self) -> None:
        try:
            turns = 0
            batches: list[Any] = [None] * UNDER_WAY
            while not self._stop:
                slot = turns % UNDER_WAY
                if batches[slot] is not None:
                    batches[slot].wait(60)
                    self.done += 1
                source = (turns // UNDER_WAY) % 2
                batches[slot] = self._segment.submit(
                    "write",
                    self._sources[source],
                    [0],
                    self._targets[slot],
                    [0],
                    BULK,
                    priority=tent.Priority.LOW,
                )
                self._last[slot] = source
                turns += 1
            for batch in batches:
                if batch is not None:
                    batch.wait(60)
        except BaseException as error:
            self._error = error


def gets(segment: tent.Segment, into: Any, expected: Any, count: int, at: int) -> Any:
    """Seconds of each of `count` gets, one every EVERY_S; each is compared."""
    pool = segment.buffer("pool")
    prepared = [
        segment.prepare(
            "read", into[0:GET], pool[i * GET : (i + 1) * GET], priority=tent.Priority.HIGH
        )
        for i in range(GETS)
    ]
    seconds = np.empty(count)
    here = into.array
    due = time.perf_counter()
    for i in range(count):
        due += EVERY_S
        left = due - time.perf_counter()
        if left > 0:
            time.sleep(left)
        else:
            due = time.perf_counter()
        which = (at + i) % GETS
        here[:] = 0
        began = time.perf_counter()
        prepared[which].run()
        seconds[i] = time.perf_counter() - began
        if not np.array_equal(here, expected[which * GET : (which + 1) * GET]):
            raise SystemExit(f"get {i} of block {which} arrived wrong")
    return seconds


def rate(bulk: Bulk, call: Any) -> tuple[Any, float]:
    """What `call` answers, and the bytes a second of bulk meanwhile."""
    time.sleep(0.2)
    before, began = bulk.done, time.perf_counter()
    answer = call()
    return answer, (bulk.done - before) * BULK / (time.perf_counter() - began)


def measure(name: str, count: int, rounds: int, config: dict[str, Any]) -> Figures:
    """All rounds over one transport."""
    config = {
        "transports": {name: {"enable": True}},
        "policy": [{"name": "only", "transports": [name]}],
        "log": {"level": "error"},
        **config,
    }
    figures = Figures()
    each = -(-count // rounds)
    with PeerProcess(config) as owner, tent.Engine(config) as engine:
        figures.slice_bytes = engine.dispatcher.slice
        owner.run(OWNER, gets=GETS, get=GET, size=BULK, count=UNDER_WAY)
        expected = np.random.default_rng(7).integers(0, 256, GETS * GET, dtype=np.uint8)
        into = engine.allocate(GET)
        sources = [engine.allocate(BULK) for _ in range(2)]
        for seed, source in enumerate(sources):
            source.array[:] = np.random.default_rng(seed).integers(0, 256, BULK, dtype=np.uint8)
        with engine.open_segment(owner.segment_name) as segment:
            gets(segment, into, expected, 50, 0)
            with Bulk(segment, sources, owner) as bulk:
                rate(bulk, lambda: time.sleep(0.5))
            for i in range(rounds):
                figures.idle.append(gets(segment, into, expected, each, i * each))
                with Bulk(segment, sources, owner) as bulk:
                    _, alone = rate(bulk, lambda: time.sleep(each * EVERY_S / 2))
                    found, shared = rate(
                        bulk, lambda at=i * each: gets(segment, into, expected, each, at)
                    )
                    _, after = rate(bulk, lambda: time.sleep(each * EVERY_S / 2))
                figures.alone.append((alone + after) / 2)
                figures.shared.append(shared)
                figures.beside.append(found)
    return figures


def summary(name: str, figures: Figures) -> dict[str, Any]:
    """Medians of the rounds, in microseconds and MB/s, and whether they are what they should be."""

    def quantiles(rounds: list[Any]) -> dict[str, float]:
        return {
            f"p{q:g}_us": round(float(np.median([np.percentile(r, q) for r in rounds])) * 1e6, 1)
            for q in (50, 99)
        } | {"max_us": round(max(float(r.max()) for r in rounds) * 1e6, 1)}

    idle, beside = quantiles(figures.idle), quantiles(figures.beside)
    alone = float(np.median(figures.alone))
    share = float(np.median([s / a for s, a in zip(figures.shared, figures.alone, strict=True)]))
    slice_us = figures.slice_bytes / alone * 1e6
    bound = MOST_TIMES * idle["p99_us"] + slice_us
    return {
        "transport": name,
        "gets": sum(len(r) for r in figures.beside),
        "idle": idle,
        "beside_bulk": beside,
        "bulk_alone_mb_s": round(alone / 1e6),
        "bulk_share": round(share, 3),
        "slice_bytes": figures.slice_bytes,
        "slice_us": round(slice_us, 1),
        "p99_bound_us": round(bound, 1),
        "rounds_p99_us": {
            kind: [round(float(np.percentile(r, 99)) * 1e6) for r in rounds]
            for kind, rounds in (("idle", figures.idle), ("beside_bulk", figures.beside))
        },
        "ok": beside["p99_us"] <= bound and share >= LEAST_SHARE,
    }


def main() -> int:
    """Measure, and print a table or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transport", action="append", choices=["shm", "tcp"])
    parser.add_argument("--gets", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--config", default="{}", help="JSON: sections to add to the configuration")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    config = json.loads(options.config)
    load = os.getloadavg()[0]
    found = [
        summary(name, measure(name, options.gets, options.rounds, config))
        for name in options.transport or ["shm", "tcp"]
    ]
    if options.json:
        print(json.dumps({"load": [load, os.getloadavg()[0]], "results": found}))
    else:
        print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after")
        print(
            f"{'':4} {'gets':>5} {'idle p50':>9} {'p99':>8} {'bulk p50':>9} {'p99':>8} {'bound':>8}"
            f" {'max':>9} {'alone MB/s':>10} {'share':>6} {'slice':>8}"
        )
        for each in found:
            idle, beside = each["idle"], each["beside_bulk"]
            print(
                f"{each['transport']:4} {each['gets']:5} {idle['p50_us']:9} {idle['p99_us']:8}"
                f" {beside['p50_us']:9} {beside['p99_us']:8} {each['p99_bound_us']:8} {beside['max_us']:9}"
                f" {each['bulk_alone_mb_s']:10} {each['bulk_share']:6} {each['slice_us']:8}"
                f"  {'ok' if each['ok'] else 'NOT OK'}"
            )
    return int(not all(each["ok"] for each in found))


if __name__ == "__main__":
    sys.exit(main())
