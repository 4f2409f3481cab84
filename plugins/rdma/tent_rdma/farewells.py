"""What a peer has still to be told of connections that are gone here: it destroys its ends, and says so."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from tent_core.transport import Peer
from tent_rdma.wire import Close, Closed, decode

SWEEP_S = 5.0
"""Until a peer that did not answer is asked again."""

MOST = 1000
"""Connections that are named in one message."""


class Farewells:
    """Of one peer. Thread-safe; its lock is a leaf, and the peer is asked without it.

    `work(call)` runs it in a worker, for what waits; `at(owner, when, call)` on another thread at its time,
    and of each owner only the last counts.
    """

    def __init__(
        self,
        peer: Peer,
        timeout: float,
        work: Callable[[Callable[[], None]], bool],
        at: Callable[[object, float, Callable[[], None]], None],
        log: Any,
    ) -> None:
        self._peer = peer
        self._timeout = timeout
        self._work = work
        self._at = at
        self._log = log
        self._lock = threading.Lock()
        self._unconfirmed: set[int] = set()
        """Those of which the peer may keep an end, by their identifiers."""
        self._asked: set[int] = set()
        """Those of them that it is being asked for right now."""
        self._closed = False

    def owe(self, connection: int) -> None:
        """The peer may keep an end of it, and has to be told some time."""
        with self._lock:
            self._unconfirmed.add(connection)

    def confirm(self, connections: list[int]) -> None:
        """Have the peer destroy its ends now: nothing that was sent can be written there afterwards. Waits.

        Raises TransportError, or whatever the way to the peer raises, when that cannot be said.
        """
        with self._lock:
            self._unconfirmed.update(connections)
            self._asked.update(connections)
        try:
            answer = self._peer.bootstrap(Close(connections=connections).encode(), self._timeout)
            decode(Closed, answer)
            with self._lock:
                self._unconfirmed.difference_update(connections)
        finally:
            with self._lock:
                self._asked.difference_update(connections)

    def sweep(self) -> None:
        """Tell the peer all that it has to be told; again and again, where it cannot answer now. Waits."""
        with self._lock:
            ids = [] if self._closed else list(self._unconfirmed - self._asked)[:MOST]
        if ids:
            try:
                self.confirm(ids)
            except Exception as error:  # whatever the way to the peer raised, it is tried again
                self._log.debug("rdma_not_confirmed", error=repr(error), connections=len(ids))
                self.sweep_later()

    def sweep_soon(self) -> None:
        """The same, by a worker."""
        self._work(self.sweep)

    def sweep_later(self) -> None:
        """The same, after a while."""
        with self._lock:
            if not self._closed:
                self._at(self, time.monotonic() + SWEEP_S, self.sweep_soon)

    def close(self) -> None:
        """Tell it nothing more: it has gone, or releases everything by itself."""
        with self._lock:
            self._closed = True
        self._at(self, math.inf, self.sweep_soon)
