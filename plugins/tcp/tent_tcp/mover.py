"""Carries the work that nobody waits for in a thread of theirs: all peers in one thread that never waits."""

from __future__ import annotations

import select
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from tent_core import gil
from tent_core.errors import TransportError
from tent_core.types import Priority, Status
from tent_core.work import Work
from tent_tcp.carriage import CANCELED, Carriage, Rest, status_of
from tent_tcp.dialing import Dialing
from tent_tcp.fences import Fences
from tent_tcp.patience import Canceled, DeadlinePassed, StreamFailed, spins
from tent_tcp.pool import AllInUse
from tent_tcp.reactor import Reactor
from tent_tcp.settings import Settings
from tent_tcp.streams import Stream

if TYPE_CHECKING:
    from tent_tcp.endpoint import TcpEndpoint


class Mover:
    """Works through what endpoints hand over, in the reactor's thread."""

    def __init__(self, reactor: Reactor, settings: Settings) -> None:
        self.reactor = reactor
        self.stall_s = settings.stall_timeout
        self.connect_s = settings.connect_timeout
        self.spin_s = spins(settings.spin / 1e6)
        self.fences = Fences(reactor, settings.fence_timeout)
        self._journeys: dict[Work, _Journey] = {}
        self._queues: dict[TcpEndpoint, deque[_Journey]] = {}
        self._ticking = False

    def submit(self, endpoint: TcpEndpoint, work: Work) -> None:
        """Carry `work`. Raises TransportError when the transport has stopped."""
        if not self.reactor.call(partial(self._accept, endpoint, work)):
            raise TransportError("the transport tcp has stopped")

    def carry_on(self, endpoint: TcpEndpoint, work: Work, rest: Rest) -> bool:
        """Carry what is left of `work`; False when the transport has stopped."""
        return self.reactor.call(partial(self._accept, endpoint, work, rest))

    def cancel(self, work: Work) -> None:
        """Nobody wants it any more: end it, soon."""
        self.reactor.call(partial(self._cancel, work))

    def resume(self, endpoint: TcpEndpoint) -> None:
        """A stream of `endpoint` is free again."""
        self.reactor.call(partial(self._resume, endpoint))

    def close(self, endpoint: TcpEndpoint, reason: str) -> None:
        """Fail all work of `endpoint`, soon."""
        self.reactor.call(partial(self._close, endpoint, reason))

    def close_all(self, reason: str) -> None:
        """Fail all work, soon."""
        self.reactor.call(partial(self._close, None, reason))

    # ---------------------------------------------------------------- in the reactor's thread

    def _accept(self, endpoint: TcpEndpoint, work: Work, rest: Rest | None = None) -> None:
        if work.cancelled:  # before it came here
            if rest is None:
                work.fail(Canceled(CANCELED), status=Status.CANCELED)
            else:
                rest.fail(work, Canceled(CANCELED))
            return
        journey = _Journey(self, endpoint, work, rest)
        self._journeys[work] = journey
        if not self._ticking:
            self._ticking = True
            self.reactor.every_tick(self._tick)
        self._begin(journey)

    def _begin(self, journey: _Journey) -> bool:
        """False: no stream is free, so it waits for one."""
        try:
            journey.begin()
        except AllInUse:
            self._queues.setdefault(journey.endpoint, deque()).append(journey)
            return False
        return True

    def _resume(self, endpoint: TcpEndpoint) -> None:
        waiting = self._queues.pop(endpoint, deque())
        queue = deque(sorted(waiting, key=lambda journey: journey.priority))
        while queue:
            journey = queue.popleft()
            if not journey.over and not self._begin(journey):
                self._queues[endpoint].extend(queue)
                return

    def _close(self, endpoint: TcpEndpoint | None, reason: str) -> None:
        for journey in list(self._journeys.values()):
            if endpoint is None or journey.endpoint is endpoint:
                journey.fail(StreamFailed(reason))
        self.fences.close(endpoint, reason)
        if endpoint is not None:
            self._queues.pop(endpoint, None)

    def _cancel(self, work: Work) -> None:
        journey = self._journeys.get(work)
        if journey is not None:
            journey.fail(Canceled(CANCELED))

    def ended(self, work: Work) -> None:
        """A journey is over, one way or the other."""
        self._journeys.pop(work, None)

    def _tick(self, now: float) -> bool:
        for journey in list(self._journeys.values()):
            cause = journey.overdue(now)
            if cause is not None:
                journey.fail(cause)
                journey.endpoint.suspect(cause)
        self._ticking = bool(self._journeys)
        return self._ticking


class _Journey:
    """One work on its way: waiting for a stream, making one, or carried by one."""

    def __init__(self, mover: Mover, endpoint: TcpEndpoint, work: Work, rest: Rest | None) -> None:
        self.endpoint = endpoint
        self.priority = work.priority
        self._mover = mover
        self._reactor = mover.reactor
        self._work = work
        self._rest = rest
        self._progress = time.monotonic()
        self._dialing: Dialing | None = None
        self._carriage: Carriage | None = None
        self._events = 0
        self.over = False

    def begin(self) -> None:
        """Take a stream, or make one. Raises AllInUse."""
        try:
            stream = self.endpoint.pool.take_now(self._work.priority is Priority.LOW)
            if stream is not None:
                self._carry(stream)
                return
            try:
                self._dialing = self.endpoint.dialing()
            except StreamFailed:
                self.endpoint.pool.not_made()
                raise
        except StreamFailed as cause:
            self.fail(cause)
            return
        self._progress = time.monotonic()
        self._reactor.watch(self._dialing.descriptor, self._dialing.events, self._go_on_dialing)

    def overdue(self, now: float) -> StreamFailed | None:
        """Why it has taken too long, or None."""
        if now >= self._work.deadline:
            return DeadlinePassed("the deadline of the transfer has passed")
        if self._dialing is not None and now >= self._progress + self._mover.connect_s:
            return StreamFailed(f"no connection within {self._mover.connect_s:g} s")
        if self._carriage is not None and now >= self._progress + self._mover.stall_s:
            return StreamFailed(f"not a byte moved for {self._mover.stall_s:g} s")
        return None

    def fail(self, cause: StreamFailed) -> None:
        """End it, in whatever stage it is."""
        self._end()
        dialing, self._dialing = self._dialing, None
        if dialing is not None:
            self._reactor.forget(dialing.descriptor)
            dialing.close()
            self.endpoint.pool.not_made()
        carriage, self._carriage = self._carriage, None
        if carriage is not None:
            self._reactor.forget(carriage.stream.descriptor)
            self.endpoint.abandon(carriage, cause)
        elif self._rest is not None:
            self._rest.fail(self._work, cause)
        else:
            self._work.fail(cause, status=status_of(cause))

    def _end(self) -> None:
        self.over = True
        self._mover.ended(self._work)

    def _go_on_dialing(self, _: int) -> None:
        dialing = self._dialing
        assert dialing is not None
        self._reactor.forget(dialing.descriptor)  # the next address has another socket
        try:
            stream = dialing.advance()
            if stream is None:
                self._reactor.watch(dialing.descriptor, dialing.events, self._go_on_dialing)
                return
            self._dialing = None
            self.endpoint.pool.made(stream)
        except StreamFailed as cause:
            if self._dialing is not None:
                self._dialing = None
                self.endpoint.pool.not_made()
            self.fail(cause)
            self.endpoint.suspect(cause)
            return
        self._carry(stream)

    def _carry(self, stream: Stream) -> None:
        self._carriage = self.endpoint.carriage(self._work, stream, self._rest)
        self._events = 0
        self._progress = time.monotonic()
        self._go_on(0)

    def _go_on(self, _: int) -> None:
        carriage = self._carriage
        assert carriage is not None
        try:
            crowded = gil.contended()
            if carriage.advance(self._mover.spin_s[crowded], crowded):
                self._progress = time.monotonic()
        except StreamFailed as cause:
            self.fail(cause)
            self.endpoint.suspect(cause)
            return
        stream = carriage.stream
        if carriage.finished:
            self._carriage = None
            self._reactor.forget(stream.descriptor)
            self._end()
            self.endpoint.pool.give(stream)
            return
        events = select.EPOLLIN if stream.pushed else select.EPOLLIN | select.EPOLLOUT
        if events != self._events:
            self._events = events
            self._reactor.watch(stream.descriptor, events, self._go_on)
