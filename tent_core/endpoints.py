"""The endpoints of one peer, one per transport: made once, refreshed in order, closed together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any

from tent_core.descriptor import PeerKey, SegmentDescriptor
from tent_core.errors import ClosedError, PeerDeparted, TransportError, Unreachable
from tent_core.runner import Running, Transports
from tent_core.transport import Endpoint, Peer

CONNECT_TIMEOUT_S = 10.0


class Endpoints:
    """All that transports keep for one peer. Thread-safe; its lock is a leaf.

    Connects, refreshes and closes of one transport run in that transport's queue, in the order in which they
    were asked for. `changed()` is called when a transport turns out not to reach the peer.
    """

    def __init__(
        self,
        key: PeerKey,
        transports: Transports,
        view: Callable[[Running], Peer],
        changed: Callable[[], None],
        log: Any,
    ) -> None:
        self._key = key
        self._transports = transports
        self._view = view
        self._changed = changed
        self._log = log
        self._lock = threading.Lock()
        self._connecting: dict[str, Future[Endpoint]] = {}
        self._closings = 0
        self.closed = 0
        """How often everything that there was has been closed."""
        self._over: str | None = None
        self.ready: dict[str, Endpoint] = {}
        self.unreachable: dict[str, str] = {}
        """Transports that can never reach this peer, with the reason."""

    def get(self, name: str, timeout: float = CONNECT_TIMEOUT_S) -> Endpoint:
        """The endpoint of transport `name`, made now if there is none (single flight).

        Raises Unreachable, TransportError, or PeerDeparted after they were closed for good. Blocks up to
        `timeout` for the first use.
        """
        endpoint = self.ready.get(name)
        if endpoint is not None:
            return endpoint
        future = self.begin(name)
        running = self._transports.get(name)
        assert running is not None
        return running.result(future, timeout, f"connect to {self._key}")

    def begin(self, name: str) -> Future[Endpoint]:
        """The endpoint of transport `name`, made or being made. Raises as `get`; never waits."""
        running = self._transports.get(name)
        if running is None:
            raise TransportError(f"transport {name} is not running")
        with self._lock:
            if self._over is not None:
                raise PeerDeparted(f"peer {self._key} departed: {self._over}")
            if name in self.unreachable:
                raise Unreachable(self.unreachable[name])
            endpoint = self.ready.get(name)
            if endpoint is not None:
                made: Future[Endpoint] = Future()
                made.set_result(endpoint)
                return made
            promise = self._connecting.get(name)
            if promise is None:
                promise = Future()
                try:
                    running.calls.submit(partial(self._make, running, self._closings, promise))
                except ClosedError as error:
                    raise TransportError(str(error)) from None
                self._connecting[name] = promise
        return promise

    def _make(self, running: Running, closings: int, promise: Future[Endpoint]) -> None:
        """Connect, and keep the promise, unless `close_all` has broken it."""
        try:
            endpoint = self._connect(running, closings)
        except BaseException as error:
            self._made(running.name, promise)
            with suppress(InvalidStateError):
                promise.set_exception(error)
        else:
            with suppress(InvalidStateError):
                promise.set_result(endpoint)

    def _made(self, name: str, promise: Future[Endpoint]) -> None:
        with self._lock:
            if self._connecting.get(name) is promise:
                del self._connecting[name]

    def _connect(self, running: Running, closings: int) -> Endpoint:
        name = running.name
        try:
            endpoint = running.transport.connect(self._view(running))
        except Unreachable as error:
            with self._lock:
                self.unreachable[name] = str(error)
            self._changed()
            self._log.info(
                "peer_unreachable", transport=name, peer=str(self._key), reason=str(error)
            )
            raise
        with self._lock:
            if closings == self._closings:
                self._connecting.pop(name, None)
                self.ready[name] = endpoint
                return endpoint
        endpoint.close("it was released while it connected")
        raise PeerDeparted(f"peer {self._key} was released while {name} connected")

    def reconsider(self, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        """Forget that a transport cannot reach the peer when the peer says something new of it."""
        with self._lock:
            for name in list(self.unreachable):
                if old.attributes.get(name) != new.attributes.get(name):
                    del self.unreachable[name]

    def refresh(
        self, old: SegmentDescriptor, new: SegmentDescriptor, done: Callable[[], None]
    ) -> None:
        """Have every endpoint let go of what `new` took away; `done()` once all have, never if one fails."""

        def refresh(running: Running) -> None:
            endpoint = self.ready.get(running.name)
            if endpoint is not None:
                endpoint.refresh(old, new)

        self._on_all("refresh", refresh, done, despite_errors=False)

    def close_all(self, reason: str, done: Callable[[], None], *, for_good: bool) -> None:
        """Close every endpoint, also those that are being made; `done()` once all have returned.

        None is made afterwards if it is `for_good`: nobody would close it.
        """
        with self._lock:
            self._closings += 1
            self._over = reason if for_good else None
            closing, self.ready = self.ready, {}
            promises, self._connecting = self._connecting, {}
        for name, promise in promises.items():  # a plugin may never come back from its connect
            with suppress(InvalidStateError):
                promise.set_exception(
                    PeerDeparted(f"peer {self._key} was released while {name} connected: {reason}")
                )

        def close(running: Running) -> None:
            endpoint = closing.get(running.name)
            if endpoint is not None:
                endpoint.close(reason)

        def closed() -> None:
            with self._lock:
                self.closed += 1
            done()

        self._on_all("close", close, closed, despite_errors=True)

    def _on_all(
        self,
        doing: str,
        call: Callable[[Running], None],
        done: Callable[[], None],
        *,
        despite_errors: bool,
    ) -> None:
        """`call(running)` in the queue of each transport, then `done()` in the last one's."""
        running = list(self._transports)
        count = _CountDown(len(running), done)

        def one(r: Running) -> None:
            try:
                call(r)
            except Exception as error:
                r.log.error("transport_raised", doing=doing, peer=str(self._key), error=repr(error))
                if not despite_errors:
                    return
            count.down()

        for r in running:
            try:
                r.calls.submit(partial(one, r))
            except ClosedError:  # the engine stops: nothing of this transport is left
                count.down()
        if not running:
            done()

    def holdings(self) -> dict[str, dict[str, int]]:
        """What each transport holds for this peer."""
        return {name: dict(endpoint.holdings()) for name, endpoint in list(self.ready.items())}


class _CountDown:
    """Calls `done` when it was counted down `n` times. Thread-safe."""

    def __init__(self, n: int, done: Callable[[], None]) -> None:
        self._left = n
        self._done = done
        self._lock = threading.Lock()

    def down(self) -> None:
        with self._lock:
            self._left -= 1
            ended = self._left == 0
        if ended:
            self._done()
