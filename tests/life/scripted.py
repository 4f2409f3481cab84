"""A peer's outside under a scheduler: its control plane, a transport, an engine; each notes what it sees."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from types import MappingProxyType
from typing import Any, TypeVar

import pytest
from pydantic import BaseModel

from tent_core import endpoints, inflight, peers
from tent_core.admission import Rules
from tent_core.alarm import Alarm
from tent_core.descriptor import Attribute, BufferDescriptor, HostIdentity, SegmentDescriptor
from tent_core.errors import TransportError, UnknownSegment
from tent_core.health import HealthRules
from tent_core.log import Logger
from tent_core.peers import Listener, LivePeer
from tent_core.runner import Running, Transports
from tent_core.traffic import Traffic
from tent_core.transport import Endpoint, Peer, Transport, TransportContext, TransportDeclaration
from tent_core.types import Capabilities, Permission
from tent_core.work import Work

from .interleaving import Queue, Scheduler

T = TypeVar("T")
HOST = HostIdentity("boot", 1, 2, 3)
NAME = "127.0.0.1:1"
FAKE, NUMBER = "fake", 1001
DRIVEN = (peers, endpoints, inflight)


def drive(monkeypatch: pytest.MonkeyPatch, scheduler: Scheduler, *more: Any) -> None:
    """Give the code of peers the scheduler's threads and clock."""
    for module in (*DRIVEN, *more):
        if hasattr(module, "threading"):
            monkeypatch.setattr(module, "threading", scheduler.threading)
        if hasattr(module, "time"):
            monkeypatch.setattr(module, "time", scheduler.time)


def buffer(number: int, generation: int) -> BufferDescriptor:
    """A live buffer that the transport offers."""
    attributes = MappingProxyType({FAKE: Attribute(NUMBER, FAKE, b"")})
    return BufferDescriptor(
        number, generation, f"b{number}", 4096 * (number + 1), 4096, "cpu:0",
        Permission.GLOBAL_READ_WRITE, attributes=attributes,
    )  # fmt: skip


class Remote:
    """The engine at the other end: what it offers now, and who it is."""

    def __init__(self, scheduler: Scheduler, name: str = NAME) -> None:
        self._scheduler = scheduler
        self._generations = itertools.count(2)
        self.name = name
        self.incarnation = b"i" * 16
        self.reachable = True
        self.connections: list[Connection] = []
        self.snapshot = self._made(1, {0: 1, 1: 1})

    def _made(self, version: int, generations: dict[int, int]) -> SegmentDescriptor:
        table = MappingProxyType({i: buffer(i, g) for i, g in generations.items()})
        return SegmentDescriptor(self.name, self.incarnation, version, HOST, buffers=table)

    def change(self) -> None:
        """Register one of its buffers anew."""
        old = {b.id: b.generation for b in self.snapshot.buffers.values()}
        old[self._scheduler.random.choice(sorted(old))] = next(self._generations)
        self.snapshot = self._made(self.snapshot.version + 1, old)

    def restart(self) -> None:
        """Come back as another incarnation."""
        self.incarnation = bytes([self.incarnation[0] + 1]) * 16
        self.snapshot = self._made(1, {0: 1, 1: 1})

    def publish(self) -> None:
        """Tell who is connected, one after the other, as the one control thread does."""
        for connection in list(self.connections):
            connection.update()


class Connection:
    """Stands for `control.plane.Connection`."""

    def __init__(self, scheduler: Scheduler, remote: Remote, listener: Listener) -> None:
        self._scheduler = scheduler
        self._remote = remote
        self.listener = listener
        self.descriptor = remote.snapshot
        self.key = remote.snapshot.key
        self.acknowledged: list[int] = []
        self.closed: list[str] = []
        remote.connections.append(self)

    def update(self) -> None:
        """The snapshot arrives."""
        new = self._remote.snapshot
        if not self.closed and self.key == new.key and new.version > self.descriptor.version:
            old, self.descriptor = self.descriptor, new
            self.listener.updated(old, new)

    def lose(self, reason: str) -> None:
        """The control plane finds that the peer has departed."""
        if self in self._remote.connections:
            self._remote.connections.remove(self)
            self.listener.departed(reason)

    def acknowledge(self, version: int) -> None:
        self._scheduler.pause()
        self.acknowledged.append(version)

    def give_up(self, reason: str) -> None:
        self._scheduler.pause()

    def close(self, reason: str = "", *, retired: bool = False) -> None:
        self._scheduler.pause()
        self.closed.append(reason)
        if self in self._remote.connections:
            self._remote.connections.remove(self)


class Plane:
    """Stands for connecting: one live connection for each remote, as `ControlClient` has it."""

    def __init__(self, scheduler: Scheduler, *remotes: Remote) -> None:
        self._scheduler = scheduler
        self._remotes = {remote.name: remote for remote in remotes}
        self._opening: dict[str, Listener] = {}
        self.made: list[Connection] = []

    def dial(self, name: str, timeout: float, listener: Listener) -> Any:
        """Connect to `name`, or to the engine of which it is an alias: "alias of NAME"."""
        known = name.removeprefix("alias of ")
        remote = self._remotes[known]
        self._scheduler.pause()
        if known in self._opening:
            self._scheduler.wait(lambda: known not in self._opening)
        live = [c for c in remote.connections if c.key == remote.snapshot.key]
        if live:
            return live[0]
        self._opening[known] = listener
        try:
            self._scheduler.pause()
            if not remote.reachable or self._scheduler.random.random() < 0.1:
                raise UnknownSegment(f"nobody answers at {name}")
            connection = Connection(self._scheduler, remote, listener)
            self.made.append(connection)
            return connection
        finally:
            del self._opening[known]


class FakeEndpoint(Endpoint):
    def __init__(self, transport: FakeTransport) -> None:
        self._transport = transport
        self.open = True

    def submit(self, work: Work) -> None:
        work.complete()

    def refresh(self, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        self._transport.scheduler.pause()
        assert self.open, "a closed endpoint was refreshed"

    def close(self, reason: str) -> None:
        self._transport.scheduler.pause()
        self.open = False


class FakeTransport(Transport):
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.endpoints: list[FakeEndpoint] = []
        self.released: list[Any] = []

    def start(self, context: TransportContext) -> None: ...

    def connect(self, peer: Peer) -> Endpoint:
        self.scheduler.pause()
        if self.scheduler.random.random() < 0.1:
            raise TransportError("busy")
        self.endpoints.append(FakeEndpoint(self))
        return self.endpoints[-1]

    def release(self, peer: Any, reason: str) -> None:
        self.released.append(peer)

    def stop(self) -> None: ...

    @property
    def open(self) -> list[FakeEndpoint]:
        """The endpoints that nobody has closed."""
        return [endpoint for endpoint in self.endpoints if endpoint.open]


class ScheduledRunning(Running):
    """A started transport whose queue is an actor."""

    def __init__(self, scheduler: Scheduler, transport: FakeTransport, log: Any) -> None:
        declaration = TransportDeclaration(
            FAKE, NUMBER, lambda: transport, BaseModel, Capabilities()
        )
        super().__init__(declaration, transport, log)
        self._scheduler = scheduler
        self.calls = Queue(scheduler, "the transport's queue")  # type: ignore[assignment]

    def result(self, future: Future[T], timeout: float, doing: str) -> T:
        self._scheduler.wait(future.done, timeout)
        try:
            return future.result(0)
        except FutureTimeout:
            raise TransportError(f"{doing} took more than {timeout:g} s") from None


class Outside:
    """All that a peer touches, and what it was told there."""

    def __init__(self, scheduler: Scheduler, *remotes: Remote) -> None:
        self.scheduler = scheduler
        self.plane = Plane(scheduler, *remotes)
        self.transport = FakeTransport(scheduler)
        self.log = Logger(lambda *_: None)
        self.transports = Transports(self.log)
        self.transports._running[FAKE] = ScheduledRunning(scheduler, self.transport, self.log)
        self.later = Queue(scheduler, "what comes later")
        self.told: list[str] = []

    def owner(self, gone: Callable[[LivePeer], None] = lambda _: None) -> peers.Owner:
        """What a peer calls; it notes what it is told."""

        def departed(peer: LivePeer) -> None:
            self.told.append("gone")
            gone(peer)
            self.later.submit(lambda: peer.connection.close("gone"))

        return peers.Owner(
            HOST,
            self.transports,
            self.log,
            self.plane.dial,
            lambda *_: None,
            lambda _: self.told.append("retired"),
            departed,
            self.later.submit,
            lambda: Traffic(Rules({}), HealthRules(), Alarm("test-alarm")),
        )

    @property
    def quiet(self) -> bool:
        """Whether nothing is under way."""
        queue: Any = self.transports._running[FAKE].calls
        return self.later.done and queue.done
