"""Peers that come and go around one engine, and what of them stays behind: for any transport."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import tent_core as tent
from tent_core.testing.leaks import Held, family
from tent_core.testing.peers import Nursery, PeerProcess
from tent_core.testing.waiting import wait_until
from tent_core.transport import Endpoint

POOL = 1 << 16
"""Bytes of the buffer `pool` that each side offers."""

VISIT = """
from tent_core.testing.churn import POOL, exchange
pool = engine.allocate(POOL, name="pool")
exchange(engine, owner)
"""
WRITE_ON = """
while True:
    exchange(engine, owner)
"""


def exchange(engine: tent.Engine, name: str) -> None:
    """Open that segment, move data both ways from both kinds of memory, notify, and let go of it all."""
    ours = [engine.allocate(POOL), engine.register(np.zeros(POOL, np.uint8))]
    with engine.open_segment(name) as segment:
        pool = segment.buffer("pool")
        for buffer in ours:
            segment.write(buffer, pool)
            segment.read(buffer, pool)
        segment.notify("exchanged")
    for buffer in ours:
        buffer.unregister()


@dataclass(frozen=True)
class Kept:
    """What an engine and its process hold at one moment, as far as it must not grow with peers.

    `held` is that of the process and its children, `holdings` what the transport counts itself, `peers` are
    those that the engine knows, and `endpoints` how many endpoints of any engine here are alive, by class.
    """

    held: Held
    holdings: Counter[str]
    peers: tuple[str, ...]
    endpoints: Counter[str]

    def beyond(self, before: Kept, retained: int = 0) -> list[str]:
        """What is held now and was not before, in words; empty when nothing is.

        As many descriptors as `retained` says are left out: a transport may declare that it keeps some.
        """
        things = Counter(self.held.beyond(before.held))
        for what in [what for what in things if what.startswith("descriptors: ")]:
            left_out = min(retained, things[what])
            things[what] -= left_out
            retained -= left_out
        things = +things
        things.update({f"peers: {name}": 1 for name in self.peers})
        things.update({f"holdings(): {k}": n for k, n in (self.holdings - before.holdings).items()})
        more = self.endpoints - before.endpoints
        things.update(
            {f"closed endpoints that are still referred to: {k}": n for k, n in more.items()}
        )
        return [f"{what} ({n} times)" if n > 1 else what for what, n in sorted(things.items())]


class Churn:
    """Peers of `lasting` that come and go, each opening it and opened by it; `transport` carries the data."""

    def __init__(self, lasting: tent.Engine, transport: str) -> None:
        self._lasting = lasting
        self._transport = transport
        lasting.allocate(POOL, name="pool")

    def engines(self, count: int, make: Callable[[], tent.Engine]) -> None:
        """Let `count` engines of this process come and go."""
        for _ in range(count):
            with make() as peer:
                peer.allocate(POOL, name="pool")
                exchange(peer, self._lasting.segment_name)
                exchange(self._lasting, peer.segment_name)

    def processes(self, count: int, config: dict[str, Any]) -> None:
        """Let `count` processes come and go: two of three close, the third is killed while data moves."""
        with Nursery() as nursery:
            for number in range(count):
                with PeerProcess(config, nursery=nursery) as peer:
                    self._process(peer, number % 3 == 2)

    def _process(self, peer: PeerProcess, killed: bool) -> None:
        owner = self._lasting.segment_name
        peer.run(VISIT, owner=owner)
        exchange(self._lasting, peer.segment_name)
        if killed:
            peer.begin(WRITE_ON)
            received = self._received()
            wait_until(lambda: self._received() > received, what="the peer to write on")
            peer.kill()

    def _received(self) -> int:
        notifications: dict[str, int] = self._lasting.stats()["notifications"]
        return notifications["received"]

    @contextmanager
    def leaves_nothing(self, timeout: float, retained: int = 0) -> Iterator[None]:
        """AssertionError, naming each thing, if `timeout` s after the block more is held than before it.

        `retained` descriptors more are no fault."""
        wait_until(lambda: not self._lasting.peers(), timeout, "the peers to depart")
        self._lasting.poll_notifications()
        before = self._kept()
        yield
        left: list[str] = []

        def nothing_left() -> bool:
            left[:] = self._kept().beyond(before, retained)
            return not left

        try:
            wait_until(nothing_left, timeout, interval=0.05)
        except AssertionError:
            raise AssertionError(
                f"peers came and went, and {timeout:g} s later this is still held: {'; '.join(left)}"
            ) from None

    def _kept(self) -> Kept:
        gc.collect()
        alive = Counter(
            f"{type(o).__module__}.{type(o).__qualname__}"
            for o in gc.get_objects()
            if isinstance(o, Endpoint)
        )
        holdings = self._lasting.stats()["transports"][self._transport]["holdings"]
        names = tuple(peer.name for peer in self._lasting.peers())
        return Kept(family(), Counter(holdings), names, alive)
