"""A peer that this engine opened: its newest snapshot, its buffers, its endpoints, and its life.

All that the core and the transports keep for the peer hangs on its `LivePeer`, and goes with it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

from tent_core.descriptor import HostIdentity, PeerKey, SegmentDescriptor
from tent_core.endpoints import CONNECT_TIMEOUT_S, Endpoints
from tent_core.errors import BufferRevoked, PeerDeparted, StaleHandle, TentError, WaitTimeout
from tent_core.inflight import Deadline
from tent_core.lease import Lease
from tent_core.life import Begin, Life, PeerState
from tent_core.remote_buffer import RemoteBuffer
from tent_core.runner import Running, Transports
from tent_core.stats import Counters
from tent_core.traffic import Traffic
from tent_core.transport import Endpoint
from tent_core.types import BufferState
from tent_core.work import Requests

if TYPE_CHECKING:
    from tent_core.control.plane import Connection


IDLE_S = 1.0
"""A peer that has had no use for so long is told that it is idle; a shorter pause is not worth a message."""


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

    def begin_bootstrap(self, payload: bytes, timeout: float) -> Future[bytes]:
        """The same without waiting."""
        return self._peer.connection.begin_bootstrap(
            self._running.name, self._running.number, payload, timeout
        )

    def suspect(self, cause: Exception) -> None:
        """The transport believes that the peer has gone: probe it now."""
        self._peer.connection.suspect(cause)


class Listener:
    """Hands one connection's events to its peer; implements `control.plane.ConnectionListener`.

    Events that come before the peer has adopted the connection are in what it adopts, or kept here. Many
    callers may get one connection: `turn` is held by the one that finds or makes its peer.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.peer: LivePeer | None = None
        self.reason: str | None = None
        self.given_up = False
        """Whether the connection was closed before it had a peer."""

    def updated(self, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        """The peer published a new snapshot."""
        if self.peer is not None:
            self.peer.updated(self, old, new)

    def departed(self, reason: str) -> None:
        """The peer is gone."""
        self.reason = reason
        if self.peer is not None:
            self.peer.depart(reason, self)

    def asked_to_retire(self) -> None:
        """The peer needs room: let go of it if nothing is pending."""
        if self.peer is not None:
            self.peer.retire(0.0, "it needs room")


@contextlib.contextmanager
def taking(connection: Connection, timeout: float) -> Iterator[Listener]:
    """Take the turn of a connection, to find or make its peer; answers the listener. Raises WaitTimeout."""
    listener = cast(Listener, connection.listener)
    if not listener.turn.acquire(timeout=timeout):
        raise WaitTimeout(f"peer {connection.key} is being connected by another thread; try again")
    try:
        yield listener
    finally:
        listener.turn.release()


class _Update:
    """A snapshot whose losses have not all been let go of yet."""

    __slots__ = ("new", "old", "waiting")

    def __init__(self, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        self.old, self.new, self.waiting = old, new, 1


@dataclass(frozen=True, slots=True)
class Owner:
    """What an engine does for its peers; calls may come from any thread, and return at once but for `dial`.

    - `dial(name, timeout, listener)` connects.
    - `refreshed(peer, old, new)`: the peer published a snapshot.
    - `retired(peer)`: an idle peer has been released.
    - `gone(peer)`: a departed peer has been released, but for its connection; once.
    - `later(call)` runs a call that may wait a little.
    - `traffic()` makes what counts the work under way to a peer.
    """

    host: HostIdentity
    transports: Transports
    log: Any
    dial: Callable[[str, float, Listener], Connection]
    refreshed: Callable[[LivePeer, SegmentDescriptor, SegmentDescriptor], None]
    retired: Callable[[LivePeer], None]
    gone: Callable[[LivePeer], None]
    later: Callable[[Callable[[], None]], None]
    traffic: Callable[[], Traffic]


class LivePeer:
    """One peer that this engine opened.

    `_lock` guards all of it; under it only leaf locks are taken, and only calls are queued. `epoch` grows
    with whatever selection depends on.
    """

    def __init__(self, owner: Owner, listener: Listener, connection: Connection) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._life = Life(time.monotonic())
        self._updates: deque[_Update] = deque()
        self._buffers: dict[int, RemoteBuffer] = {}
        self._listener = listener
        self._release_pending = False
        self.key: PeerKey = connection.key
        self.connection = connection
        self.endpoints = Endpoints(
            self.key,
            owner.transports,
            lambda running: PeerView(self, running),
            self.replan,
            owner.log,
        )
        self.traffic: Traffic = owner.traffic()
        self.counters: dict[str, Counters] = {}
        self.plans: dict[Any, Any] = {}
        self.epoch = 0
        self._leases: WeakSet[Lease] = WeakSet()
        self.handles = 0
        self.handshakes = 0
        """How often the peer was connected."""
        self._segment: SegmentDescriptor
        self._adopt_connection(listener, connection)

    # ---------------------------------------------------------------- what it is

    @property
    def segment(self) -> SegmentDescriptor:
        """The newest snapshot."""
        return self._segment

    @property
    def state(self) -> PeerState:
        """Where it is in its life."""
        return self._life.state

    @property
    def departed(self) -> str | None:
        """Why it has departed, or None."""
        return self._life.reason

    @property
    def same_machine(self) -> bool:
        """Whether the peer runs under the same kernel."""
        return self._owner.host.same_machine(self._segment.host)

    @property
    def same_process(self) -> bool:
        """Whether the peer is an engine of this very process."""
        return self._owner.host == self._segment.host

    @property
    def unreachable(self) -> dict[str, str]:
        """Transports that can never reach this peer, with the reason."""
        return self.endpoints.unreachable

    def idle_for(self) -> float | None:
        """Seconds without any use, or None while it is in use or not live."""
        with self._lock:
            return self._idle_for(time.monotonic())

    def _idle_for(self, now: float) -> float | None:
        used = [lease.used() for lease in self._leases]  # each is asked, so that each forgets
        if any(used):
            self._life.last_used = now
        return self._life.idle_for(now)

    def check_alive(self) -> None:
        """Raise PeerDeparted if the peer is gone."""
        if self._life.reason is not None:
            raise PeerDeparted(
                f"peer {self.key} departed ({self._life.reason}); "
                f"open segment {self.key.name} again to reach what is there now"
            )

    def replan(self) -> None:
        """What selection depends on has changed."""
        with self._lock:
            self._replan()

    def _replan(self) -> None:
        self.epoch += 1
        self.plans = {}
        for lease in self._leases:
            if not lease.shut_idle(self.end):
                self._life.users += 1
        self._leases = WeakSet()

    # ---------------------------------------------------------------- being used

    def try_begin(self) -> bool:
        """Count a use if the peer is live; False when it would have to be woken. Raises PeerDeparted.

        A use keeps the peer from being retired, and is ended with `end`.
        """
        with self._lock:
            begun = self._life.state is PeerState.LIVE and self._life.begin() is Begin.GO
        if not begun:
            self.check_alive()
        return begun

    def begin(self, timeout: float) -> None:
        """Count a use, waking the peer if it was retired. Waits up to `timeout`.

        Raises PeerDeparted, or what connecting raises.
        """
        deadline = Deadline(timeout)
        while True:
            with self._lock:
                begun = self._life.begin()
                if begun is Begin.GO:
                    return
                if begun is Begin.WAIT and not self._changed.wait(deadline.left):
                    raise WaitTimeout(
                        f"peer {self.key} was not connected again within {timeout:g} s"
                    )
            if begun is Begin.GONE:
                self.check_alive()
            if begun is Begin.CONNECT:
                self._wake(deadline.left)

    def lend(self, lease: Lease, epoch: int) -> bool:
        """The uses marked in `lease` are uses of this peer; what changes the choice of transports shuts it.
        False if that has changed since `epoch`, or the peer is not live."""
        with self._lock:
            current = epoch == self.epoch and self._life.state is PeerState.LIVE
            if current:
                self._leases.add(lease)
            return current

    def end(self) -> None:
        """A use has ended."""
        with self._lock:
            last = self._life.end(time.monotonic())
        if last:
            self._gone()

    def _wake(self, timeout: float) -> None:
        """Connect a dormant peer again; only its incarnation will do."""
        deadline = Deadline(timeout)
        listener = Listener()
        try:
            connection = self._owner.dial(self.key.name, timeout, listener)
            if connection.key != self.key:
                self.depart(f"another incarnation answers under its name: {connection.key}")
            with taking(connection, deadline.left):
                self.adopt(listener, connection, deadline.left)
        except TentError:
            with self._lock:
                self._life.connect_failed()
                self._changed.notify_all()
            raise
        self._owner.log.info("peer_woken", peer=str(self.key))

    def adopt(self, listener: Listener, connection: Connection, timeout: float) -> None:
        """Take a connection that a caller with `listener` got, or shares with others; with its turn taken.

        Waits up to `timeout` while what the peer held before is being released. Raises PeerDeparted, and
        WaitTimeout; a connection that is nobody else's is given up then.
        """
        made_for = cast(Listener, connection.listener)
        with self._lock:
            if connection is not self.connection:
                self._changed.wait_for(lambda: self._life.state is not PeerState.RETIRING, timeout)
        try:
            self._adopt_connection(made_for, connection)
        except TentError as error:
            if made_for is listener and made_for.peer is None:
                made_for.given_up = True
                reason = str(error)
                self._owner.later(lambda: connection.close(reason))
            raise

    def _adopt_connection(self, listener: Listener, connection: Connection) -> None:
        with self._lock:
            if self.handshakes and connection is self.connection:
                return
            alive = self._life.connected(time.monotonic())
            if alive:
                self._listener = listener
                self.connection = connection
                self.handshakes += 1
                gone = self._adopt(connection.descriptor)
                version = self._segment.version
                listener.peer = self
            self._changed.notify_all()
        if not alive:
            self.check_alive()
            raise WaitTimeout(
                f"what was held for peer {self.key} is still being released; try again"
            )
        for buffer in gone:
            buffer.inflight.shut()
        connection.acknowledge(version)
        if listener.reason is not None:
            self.depart(listener.reason, listener)

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

    def taken_away(self, requests: Requests) -> dict[int, StaleHandle]:
        """The buffers of `requests` that their owner has taken away by now, by id, with what says so; none of
        a peer that has departed: that is what has to be said then, though it takes them away as it closes."""
        gone: dict[int, StaleHandle] = {}
        if self._life.reason is not None:
            return gone
        buffers = self._segment.buffers
        for number in requests.remote_used:
            now = buffers.get(number)
            if now is None or now.generation != requests.remote_generations[number]:
                gone[number] = StaleHandle(
                    f"buffer {number} of segment {self.key.name} was unregistered by its owner "
                    "while requests to it were under way"
                )
            elif now.state is not BufferState.LIVE:
                gone[number] = BufferRevoked(
                    f"buffer {now.name!r} of segment {self.key.name} is being unregistered by its "
                    "owner, while requests to it are under way"
                )
        return gone

    def _adopt(self, new: SegmentDescriptor) -> list[RemoteBuffer]:
        """Take `new` as the snapshot (lock held); answer the buffers that it takes away."""
        gone = []
        for number, known in list(self._buffers.items()):
            now = new.buffers.get(number)
            if (
                now is known.descriptor
            ):  # nearly all: what an update does not mention it leaves alone
                continue
            if (
                now is None
                or now.generation != known.generation
                or now.state is not BufferState.LIVE
            ):
                gone.append(self._buffers.pop(number))
            else:
                known.descriptor = now
        for number, descriptor in new.buffers.items():
            if number not in self._buffers and descriptor.state is BufferState.LIVE:
                self._buffers[number] = RemoteBuffer(self, descriptor)
        self._segment = new
        self._replan()
        return gone

    def refresh(self, timeout: float) -> None:
        """Ask the peer for its newest snapshot, in case the watch is behind. Wakes it."""
        self.begin(timeout)
        try:
            self.connection.refresh(timeout)
        finally:
            self.end()

    def notify(self, name: str, payload: bytes, timeout: float) -> None:
        """Deliver a notification to the peer's application. Wakes it."""
        self.begin(timeout)
        try:
            self.connection.notify(name, payload, timeout)
        finally:
            self.end()

    def endpoint(self, name: str, timeout: float = CONNECT_TIMEOUT_S) -> Endpoint:
        """The endpoint of transport `name`, made within `timeout` seconds if there is none.

        Raises Unreachable, TransportError, PeerDeparted."""
        endpoint = self.endpoints.ready.get(name)
        if endpoint is None:
            self.check_alive()
            endpoint = self.endpoints.get(name, timeout)
        return endpoint

    # ---------------------------------------------------------------- the control plane's events

    def updated(self, listener: Listener, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        """A new snapshot arrived. What it takes away is shut now, and acknowledged once let go of."""
        update = _Update(old, new)
        with self._lock:
            if listener is not self._listener or self._life.state is not PeerState.LIVE:
                return  # what it took away is found when the peer is connected again
            gone = self._adopt(new)
            self.endpoints.reconsider(old, new)
            update.waiting += len(gone)
            self._updates.append(update)
        for buffer in gone:
            buffer.inflight.shut()
            buffer.inflight.when_drained(lambda: self._drained(update))
        self._drained(update)
        self._owner.refreshed(self, old, new)

    def _drained(self, update: _Update) -> None:
        """One use fewer keeps `update` from being acknowledged; refreshes go out in the order of versions."""
        with self._lock:
            update.waiting -= 1
            while self._updates and self._updates[0].waiting == 0:
                # Queued with the lock held, so that two threads cannot swap versions.
                self._refresh(self._updates.popleft(), self.connection)

    def _refresh(self, update: _Update, connection: Connection) -> None:
        self.endpoints.refresh(
            update.old, update.new, lambda: connection.acknowledge(update.new.version)
        )

    # ---------------------------------------------------------------- idle, and gone

    def retire(self, at_least: float, reason: str) -> bool:
        """Release all that is held for the peer if nothing has used it for `at_least` seconds; the next use
        brings it back. Answers whether it does. Never blocks."""
        with self._lock:
            now = time.monotonic()
            idle = self._idle_for(now)
            if idle is None or idle < at_least:
                return False
            self._replan()  # which stops what is bound to it; some of that may have begun meanwhile
            if not self._life.retire(now, at_least):
                return False
            self._updates.clear()
        self._owner.log.info("peer_retired", peer=str(self.key), reason=reason)
        self.endpoints.close_all(
            f"the peer was retired: {reason}",
            lambda: self._owner.later(lambda: self._retired(reason)),
            for_good=False,
        )
        return True

    def report_idle(self) -> None:
        """Have the peer told whether, and for how long, nothing here has used it. Never blocks."""
        idle = self.idle_for()
        self.connection.report_idle(None if idle is None or idle < IDLE_S else idle)

    def forget(self, reason: str) -> bool:
        """Nobody may use it any more, if it is dormant: answers whether that is so."""
        with self._lock:
            return self._life.forget(reason)

    def _retired(self, reason: str) -> None:
        """The endpoints are closed; the control connection goes last."""
        self.connection.close(reason, retired=True)
        with self._lock:
            self._life.released()
            gone = self._life.state is PeerState.DEPARTED
            self._changed.notify_all()
        (self._owner.gone if gone else self._owner.retired)(self)

    def depart(self, reason: str, listener: Listener | None = None) -> None:
        """The peer is gone: shut everything and release it. Once; never blocks."""
        with self._lock:
            if listener is not None and listener is not self._listener:
                return  # of a connection that was given up
            before = self._life.depart(reason)
            if before is None:
                return
            self._replan()
            self._updates.clear()
            buffers = list(self._buffers.values())
            self._release_pending = before is PeerState.LIVE
            self._changed.notify_all()
        for buffer in buffers:
            buffer.inflight.shut()
        if before is PeerState.LIVE:
            self.connection.give_up(reason)
            self.endpoints.close_all(reason, self._endpoints_closed, for_good=True)
        elif before is not PeerState.RETIRING:  # a retirement under way ends by itself
            self._owner.gone(self)
        self.traffic.departed()

    def _endpoints_closed(self) -> None:
        with self._lock:
            self._release_pending = False
        self._gone()

    def _gone(self) -> None:
        """The last use has ended, or the last endpoint was closed: when both have, the peer is released."""
        with self._lock:
            if self._release_pending or self._life.users:
                return
            self._release_pending = True  # told once
        self._owner.gone(self)

    def holdings(self) -> dict[str, dict[str, int]]:
        """What each transport holds for this peer."""
        return self.endpoints.holdings()
