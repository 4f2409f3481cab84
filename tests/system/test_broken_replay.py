"""A replay of KV-cache traffic while transports break under it: no request fails, every byte is right."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import tent_core as tent
from tent_core.errors import TransportError
from tent_core.replay.geometry import MODELS
from tent_core.replay.prefill import Prefill
from tent_core.replay.report import Report, Tally
from tent_core.replay.trace import TraceRequest
from tent_core.work import Work
from tent_shm.endpoint import ShmEndpoint
from tent_tcp.endpoint import TcpEndpoint

from .conftest import Make, Start
from .support import FULL, often, only

GEOMETRY = MODELS["Qwen2.5-0.5B"]  # 6 MiB a block
REQUESTS = often(30, 100)
CUT_EVERY_S = often(0.1, 1.0)
PAUSED_S = often(0.6, 2.0)
POOL = 128 << 20
TIMEOUT_S = 60.0

DECODE = """
from tent_core.replay.decode import Decode
buffer = engine.allocate(pool, name="kv-pool")
decode = Decode(engine, buffer, seed=0, timeout=bound)
"""
SERVE = """
received = decode.serve()
(received.pieces, received.mismatches)
"""
RECEIVER = 'engine._transports.get("tcp").transport._receiver.pid'

_ENDPOINTS = {"shm": ShmEndpoint, "tcp": TcpEndpoint}


def requests() -> tuple[TraceRequest, ...]:
    """Prompts of 1 to 4 blocks of which some begin as an earlier one did."""
    rng = np.random.default_rng(11)
    made: list[TraceRequest] = []
    for i in range(REQUESTS):
        count = int(rng.integers(1, 5))
        own = tuple(range(1000 * i + 1, 1000 * i + 1 + count))
        shared = made[i - 1].hashes[:1] if made and rng.random() < 0.3 else ()
        hashes = (*shared, *own)
        made.append(TraceRequest(0, 512 * len(hashes), 1, hashes))
    return tuple(made)


class Saboteur:
    """Breaks transports of `engine`, and stops the receiver of the other side."""

    def __init__(self, engine: tent.Engine, monkeypatch: pytest.MonkeyPatch, receiver: int) -> None:
        self._engine, self._receiver = engine, receiver
        self.refused: set[str] = set()
        self.refusals = self.cuts = 0
        self._over = threading.Event()
        self._resumed: threading.Timer | None = None
        for name, kind in _ENDPOINTS.items():
            monkeypatch.setattr(kind, "submit", self._guarded(name, kind.submit))

    def _guarded(self, name: str, submit: Callable[[Any, Work], None]) -> Any:
        def guarded(endpoint: Any, work: Work) -> None:
            if name in self.refused:
                self.refusals += 1
                raise TransportError(f"{name} is refused by the test")
            submit(endpoint, work)

        return guarded

    @contextmanager
    def cutting(self) -> Iterator[None]:
        """Cut every tcp stream again and again."""
        thread = threading.Thread(target=self._cut)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            if self._resumed is not None:
                self._resumed.join()

    def pause(self, seconds: float) -> None:
        """Stop the receiver, and have it go on after so many seconds."""
        os.kill(self._receiver, signal.SIGSTOP)
        self._resumed = threading.Timer(seconds, os.kill, (self._receiver, signal.SIGCONT))
        self._resumed.start()

    def _cut(self) -> None:
        transport = self._engine._transports.get("tcp").transport
        while not self._over.wait(CUT_EVERY_S):
            for endpoint in list(transport._endpoints):
                with endpoint.pool._changed:
                    streams = [*endpoint.pool._busy, *endpoint.pool._idle]
                for stream in streams:
                    stream.interrupt()
                self.cuts += len(streams)


def _replay(
    start: Start,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    order: tuple[str, str],
    script: Callable[[Saboteur, int], None],
) -> tuple[Report, dict[str, Any], Saboteur]:
    config = only(*order)
    config["policy"][0]["stall_s"] = 0.3
    owner = start(only(*order))
    owner.run(DECODE, pool=POOL, bound=TIMEOUT_S)
    engine = make(config)
    buffer = engine.allocate(POOL, name="kv-pool")
    saboteur = Saboteur(engine, monkeypatch, owner.run(RECEIVER))
    prefill = Prefill(engine, buffer, GEOMETRY, seed=0, timeout=TIMEOUT_S)
    owner.begin(SERVE)

    def progress(tally: Tally) -> None:
        script(saboteur, tally.requests)

    with saboteur.cutting():
        report = prefill.run(owner.segment_name, requests(), progress)
    assert owner.answer(TIMEOUT_S) == (report.pieces, 0)
    stats = engine.stats()
    if FULL:
        print(order, report.as_json(), "failovers", stats["failovers"], "cuts", saboteur.cuts)
    return report, stats, saboteur


def _check(report: Report) -> None:
    assert report.requests == REQUESTS
    assert report.verified
    assert report.mismatches == 0


def test_shm_that_refuses_while_tcp_streams_are_cut_fails_no_request(
    start: Start, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(saboteur: Saboteur, done: int) -> None:
        saboteur.refused = {"shm"} if REQUESTS // 5 <= done < 4 * REQUESTS // 5 else set()

    report, stats, saboteur = _replay(start, make, monkeypatch, ("shm", "tcp"), script)
    _check(report)
    assert report.transports["shm"] > 0
    assert report.transports["tcp"] > 0
    assert saboteur.cuts > 0
    assert saboteur.refusals > 0
    assert stats["failovers"] > 0


def test_tcp_whose_streams_are_cut_whose_receiver_pauses_and_that_then_refuses_fails_no_request(
    start: Start, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(saboteur: Saboteur, done: int) -> None:
        if done == REQUESTS // 3:
            saboteur.pause(PAUSED_S)
        saboteur.refused = {"tcp"} if done >= 2 * REQUESTS // 3 else set()

    began = time.monotonic()
    report, stats, saboteur = _replay(start, make, monkeypatch, ("tcp", "shm"), script)
    assert time.monotonic() - began > PAUSED_S
    _check(report)
    assert report.transports["shm"] > 0
    assert report.transports["tcp"] > 0
    assert saboteur.cuts > 0
    assert stats["failovers"] > 0
