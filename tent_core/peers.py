"""A live peer: its newest snapshot, its buffers, and one endpoint per transport that reaches it.

All that the core and the transports keep for a peer hangs on its `LivePeer`, and goes with it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from tent_core.descriptor import BufferDescriptor, HostIdentity, PeerKey, SegmentDescriptor
from tent_core.errors import (
    BufferRevoked,
    ClosedError,
    PeerDeparted,
    StaleHandle,
    TentError,
    TransportError,
    Unreachable,
)
from tent_core.inflight import InFlight
from tent_core.memory import slice_bounds
from tent_core.runner import Running, Transports
from tent_core.stats import Counters
from tent_core.transport import Endpoint
from tent_core.types import BufferState

if TYPE_CHECKING:
    from tent_core.control.plane import Connection

CONNECT_TIMEOUT_S = 10.0


class RemoteBuffer:
    """One registration of a peer's buffer. `remote[a:b]` is a slice in bytes. Immutable but for its end.

    After the owner unregistered it (or departed) every use raises StaleHandle; ask the segment again.
    """

    __slots__ = ("descriptor", "inflight", "peer", "trait")

    def __init__(self, peer: LivePeer, descriptor: BufferDescriptor) -> None:
        self.peer = peer
        self.descriptor = descriptor
        self.inflight = InFlight()
        offers = tuple(sorted((a.name, a.number) for a in descriptor.attributes.values()))
        self.trait = (descriptor.location, offers)
        """What selection reads of this buffer: location and who offers it."""

    id = property(lambda self: self.descriptor.id)
    generation = property(lambda self: self.descriptor.generation)
    name = property(lambda self: self.descriptor.name)
    address = property(lambda self: self.descriptor.address)
    length = property(lambda self: self.descriptor.length)
    location = property(lambda self: self.descriptor.location)
    permission = property(lambda self: self.descriptor.permission)

    def __len__(self) -> int:
        return self.descriptor.length

    def __getitem__(self, index: slice) -> RemoteSlice:
        start, stop = slice_bounds(self, index)
        return RemoteSlice(self, start, stop - start)

    def gone(self) -> TentError:
        """Why this buffer takes no requests."""
        if self.peer.departed is not None:
            return PeerDeparted(
                f"buffer {self.name!r} of segment {self.peer.key.name}: "
                f"the peer departed ({self.peer.departed}); "
                "open the segment again"
            )
        now = self.peer.segment.buffers.get(self.id)
        if now is not None and now.generation == self.generation:
            return BufferRevoked(
                f"buffer {self.name!r} of segment {self.peer.key.name} is being unregistered by its owner"
            )
        return StaleHandle(
            f"buffer {self.name!r} of segment {self.peer.key.name} was unregistered by its owner; "
            "ask the segment for its buffers again"
        )

    def __repr__(self) -> str:
        d = self.descriptor
        return (
            f"<RemoteBuffer {d.name!r} id={d.id} of {self.peer.key.name}: {d.length} bytes, "
            f"{d.location} {d.permission.name} {d.state.name}>"
        )


class RemoteSlice:
    """`length` bytes of a peer's buffer from `offset`."""

    __slots__ = ("buffer", "length", "offset")

    def __init__(self, buffer: RemoteBuffer, offset: int, length: int) -> None:
        self.buffer, self.offset, self.length = buffer, offset, length


class PeerView:
    """A peer as one transport sees it; implements `transport.Peer`."""

    def __init__(self, peer: LivePeer, running: Running) -> None:
        self._peer = peer
        self._running = running

    @property
    def key(self) -> PeerKey:
        return self._peer.key

    @property
    def segment(self) -> SegmentDescriptor:
        return self._peer.segment

    def bootstrap(self, payload: bytes, timeout: float) -> bytes:
        """Hand `payload` to this transport's `bootstrap` at the peer."""
        return self._peer.connection.bootstrap(
            self._running.name, self._running.number, payload, timeout
        )

    def suspect(self, cause: Exception) -> None:
        """The transport believes that the peer has gone: probe it now."""
        self._peer.connection.suspect(cause)


class Listener:
    """Hands the control plane's events to a peer; implements `control.plane.ConnectionListener`."""

    def __init__(self, peer: LivePeer) -> None:
        self.peer = peer

    def updated(self, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        """The peer published a new snapshot."""
        self.peer.updated(old, new)

    def departed(self, reason: str) -> None:
        """The peer is gone."""
        self.peer.depart(reason)


class _Update:
    """A snapshot whose losses have not all been let go of yet."""

    __slots__ = ("new", "old", "waiting")

    def __init__(self, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        self.old, self.new, self.waiting = old, new, 1


class LivePeer:
    """One peer that this engine opened.

    `_lock` guards all of it; under it only `SerialQueue.submit` is called, which queues and returns. `epoch`
    grows with whatever selection depends on.
    """

    def __init__(
        self,
        host: HostIdentity,
        transports: Transports,
        log: Any,
        retire: Callable[[LivePeer], None],
        refreshed: Callable[[LivePeer, SegmentDescriptor, SegmentDescriptor], None],
    ) -> None:
        self._host = host
        self._transports = transports
        self._log = log
        self._retire = retire
        self._refreshed = refreshed
        self._lock = threading.Lock()
        self._connecting: dict[str, Future[Endpoint]] = {}
        self._updates: deque[_Update] = deque()
        self._buffers: dict[int, RemoteBuffer] = {}
        self._segment: SegmentDescriptor
        self._releasing = 0
        self.connection: Connection
        self.attached = False
        self.ready: dict[str, Endpoint] = {}
        self.unreachable: dict[str, str] = {}
        self.counters: dict[str, Counters] = {}
        self.plans: dict[Any, Any] = {}
        self.epoch = 0
        self.handles = 0
        self.departed: str | None = None

    def attach(self, connection: Connection) -> None:
        """Adopt the connection that this peer listens to, with its newest snapshot. Idempotent."""
        with self._lock:
            if self.attached:
                return
            self.connection = connection
            self.attached = True
            self._adopt(connection.descriptor)
            version = self._segment.version
            departed = self.departed is not None
        if departed:  # before it was attached: there is nothing to release but the connection
            self._retire(self)
        else:
            connection.acknowledge(version)

    @property
    def key(self) -> PeerKey:
        """Name and incarnation."""
        return self.connection.key

    @property
    def segment(self) -> SegmentDescriptor:
        """The newest snapshot."""
        return self._segment

    # ---------------------------------------------------------------- buffers

    def buffers(self) -> list[RemoteBuffer]:
        """The buffers that take requests, by id."""
        with self._lock:
            return [self._buffers[i] for i in sorted(self._buffers)]

    def find(self, name: str) -> RemoteBuffer | None:
        """The newest live buffer of that name, or None."""
        with self._lock:
            named = [b for b in self._buffers.values() if b.name == name]
        return max(named, key=lambda b: int(b.generation), default=None)

    def _adopt(self, new: SegmentDescriptor) -> list[RemoteBuffer]:
        """Take `new` as the snapshot (lock held); answer the buffers that it takes away."""
        gone = []
        for known in list(self._buffers.values()):
            now = new.buffers.get(known.id)
            if (
                now is None
                or now.generation != known.generation
                or now.state is not BufferState.LIVE
            ):
                gone.append(self._buffers.pop(known.id))
            elif now != known.descriptor:
                known.descriptor = now
        for descriptor in new.buffers.values():
            if descriptor.state is BufferState.LIVE and descriptor.id not in self._buffers:
                self._buffers[descriptor.id] = RemoteBuffer(self, descriptor)
        self._segment = new
        self.epoch += 1
        self.plans = {}
        return gone

    def refresh(self, timeout: float) -> None:
        """Ask the peer for its newest snapshot, in case the watch is behind."""
        self.check_alive()
        self.connection.refresh(timeout)

    @property
    def same_machine(self) -> bool:
        """Whether the peer runs under the same kernel."""
        return self._host.same_machine(self._segment.host)

    @property
    def same_process(self) -> bool:
        """Whether the peer is an engine of this very process."""
        return self._host == self._segment.host

    # ---------------------------------------------------------------- endpoints

    def endpoint(self, name: str, timeout: float = CONNECT_TIMEOUT_S) -> Endpoint:
        """The endpoint of transport `name`, made now if there is none (single flight).

        Raises Unreachable, TransportError, or PeerDeparted. Blocks up to `timeout` for the first use.
        """
        endpoint = self.ready.get(name)
        if endpoint is not None:
            return endpoint
        running = self._transports.get(name)
        if running is None:
            raise TransportError(f"transport {name} is not running")
        with self._lock:
            self.check_alive()
            if name in self.unreachable:
                raise Unreachable(self.unreachable[name])
            endpoint = self.ready.get(name)
            if endpoint is not None:  # made since the first look
                return endpoint
            future = self._connecting.get(name)
            if future is None:
                future = running.calls.submit(lambda: self._connect(running))
                self._connecting[name] = future
        return running.result(future, timeout, f"connect to {self.key}")

    def _connect(self, running: Running) -> Endpoint:
        """Make an endpoint, in the transport's queue, where refreshes and closes of it are queued as well."""
        name = running.name
        try:
            endpoint = running.transport.connect(PeerView(self, running))
        except Unreachable as error:
            with self._lock:
                self.unreachable[name] = str(error)
                self._connecting.pop(name, None)
                self.epoch += 1
                self.plans = {}
            self._log.info(
                "peer_unreachable", transport=name, peer=str(self.key), reason=str(error)
            )
            raise
        except BaseException:
            with self._lock:
                self._connecting.pop(name, None)
            raise
        with self._lock:
            self._connecting.pop(name, None)
            if self.departed is None:
                self.ready[name] = endpoint
                return endpoint
        endpoint.close(self.departed)
        raise PeerDeparted(f"peer {self.key} departed while {name} connected: {self.departed}")

    def check_alive(self) -> None:
        """Raise PeerDeparted if the peer is gone."""
        if self.departed is not None:
            raise PeerDeparted(
                f"peer {self.key} departed ({self.departed}); "
                f"open segment {self.key.name} again to reach what is there now"
            )

    # ---------------------------------------------------------------- the control plane's events

    def updated(self, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        """A new snapshot arrived. What it takes away is shut now, and acknowledged once let go of."""
        update = _Update(old, new)
        with self._lock:
            if self.departed is not None or not self.attached:
                return  # what came before `attach` is in the snapshot that it adopts
            gone = self._adopt(new)
            for name in list(self.unreachable):
                if old.attributes.get(name) != new.attributes.get(name):
                    del self.unreachable[name]
            update.waiting += len(gone)
            self._updates.append(update)
        for buffer in gone:
            buffer.inflight.shut()
            buffer.inflight.when_drained(lambda: self._drained(update))
        self._drained(update)
        self._refreshed(self, old, new)

    def _drained(self, update: _Update) -> None:
        """One use fewer keeps `update` from being acknowledged; refreshes go out in the order of versions."""
        with self._lock:
            update.waiting -= 1
            while self._updates and self._updates[0].waiting == 0:
                # Queued with the lock held, so that two threads cannot swap versions: submit only queues.
                self._refresh(self._updates.popleft())

    def _refresh(self, update: _Update) -> None:
        names = list(self._transports)
        left = [len(names)]
        count = threading.Lock()

        def refresh(running: Running) -> None:
            endpoint = self.ready.get(running.name)
            if endpoint is not None:
                endpoint.refresh(update.old, update.new)
            with count:
                left[0] -= 1
                last = left[0] == 0
            if last:
                self.connection.acknowledge(update.new.version)

        for running in names:
            try:
                running.calls.submit(
                    partial(self._guarded, running, "refresh", partial(refresh, running))
                )
            except ClosedError:
                return

    def _guarded(self, running: Running, doing: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            # Not acknowledged then: the owner must not believe that this side has let go.
            running.log.error(
                "transport_raised", doing=doing, peer=str(self.key), error=repr(error)
            )

    def depart(self, reason: str) -> None:
        """The peer is gone: shut everything, close the endpoints, then say goodbye. Once; never blocks."""
        running = list(self._transports)
        with self._lock:
            if self.departed is not None:
                return
            self.departed = reason
            if not self.attached:
                return
            self.epoch += 1
            self.plans = {}
            endpoints, self.ready = self.ready, {}
            buffers = list(self._buffers.values())
            self._updates.clear()
            self._releasing = len(buffers) + len(running) + 1
        for r in running:
            try:
                r.calls.submit(partial(self._close_endpoint, r, endpoints.get(r.name), reason))
            except ClosedError:
                self._released()
        for buffer in buffers:
            buffer.inflight.shut()
            buffer.inflight.when_drained(self._released)
        self._released()

    def _close_endpoint(self, running: Running, endpoint: Endpoint | None, reason: str) -> None:
        if endpoint is not None:
            self._guarded(running, "close", lambda: endpoint.close(reason))
        self._guarded(running, "release", lambda: running.transport.release(self.key, reason))
        self._released()

    def _released(self) -> None:
        with self._lock:
            self._releasing -= 1
            if self._releasing:
                return
        self._retire(self)

    def holdings(self) -> dict[str, dict[str, int]]:
        """What each transport holds for this peer."""
        return {name: dict(endpoint.holdings()) for name, endpoint in list(self.ready.items())}
