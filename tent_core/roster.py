"""All peers of one engine: those that it opened, those that opened it, and those that did both."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tent_core.descriptor import HostIdentity, PeerKey, SegmentDescriptor
from tent_core.errors import (
    ClosedError,
    PeerDeparted,
    TentError,
    TransportError,
    UnknownSegment,
)
from tent_core.inflight import Deadline
from tent_core.life import PeerState
from tent_core.peers import Listener, LivePeer, Owner, taking
from tent_core.scarcity import lacks_resources
from tent_core.serial import SerialQueue
from tent_core.stats import Stats
from tent_core.traffic import Traffic

if TYPE_CHECKING:
    from tent_core.control.contract import SessionInfo
    from tent_core.control.plane import Connection
    from tent_core.hooks import Hooks
    from tent_core.runner import Running, Transports

_LATER_S = 0.5
RELEASE_S = 1.0
"""How long what departed in the middle of a bootstrap is waited for to be released."""
RELIEF_S = 1.0
"""How long retiring idle peers may take when something is refused for lack of resources."""


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """One peer as it is now, for `Engine.peers` and `tent peers`.

    `opened`: this engine opened it; `opens`: it opened this engine. `state` is that of the opened side
    (live, retiring, dormant, waking), or of its session (open, broken, departed). `idle_s` is for how long
    this engine has not used it, or, if only it opened this one, for how long it says not to have used this
    one; None while it is in use. `transports` has, by name, bytes, tasks, failures and what is held.
    """

    name: str
    incarnation: str
    pid: int
    same_machine: bool
    opened: bool
    opens: bool
    state: str
    handles: int
    handshakes: int
    idle_s: float | None
    transports: dict[str, dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


class _Turn:
    """The lock of a name that is being opened, and how many threads want it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wanted = 0


class Roster:
    """Owns every peer of an engine, from its first connection to its last release. Thread-safe.

    `_lock` guards the tables and is a leaf but for hooks' queues; `_opening` has a lock per name, held while
    that name is being connected, with a deadline.
    """

    def __init__(
        self,
        host: HostIdentity,
        transports: Transports,
        hooks: Hooks,
        stats: Stats,
        log: Any,
        dial: Callable[[str, float, Listener], Connection],
        most: int,
        fields: dict[str, Any],
        traffic: Callable[[], Traffic],
    ) -> None:
        self._host = host
        self._transports = transports
        self._hooks = hooks
        self._stats = stats
        self._log = log
        self._dial = dial
        self._most = most
        self._fields = fields
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._opened: dict[str, LivePeer] = {}
        self._sessions: dict[int, SessionInfo] = {}
        self._opening: dict[str, _Turn] = {}
        self._closed = False
        # Goodbyes wait for answers; a thread of their own keeps them out of everybody's way.
        self._releases = SerialQueue("tent-release")
        self._owner = Owner(
            host,
            transports,
            log,
            self._dial_with_relief,
            self._refreshed,
            self._retired,
            self._gone,
            self._later,
            traffic,
        )

    def __len__(self) -> int:
        return len(self._opened)

    # ---------------------------------------------------------------- opening

    def open(self, name: str, timeout: float) -> LivePeer:
        """The peer behind a name: the known one, woken if it was retired, or a new one; a handle is counted.

        Many callers connect once. Raises UnknownSegment, PeerRefused, TransportError, ClosedError.
        """
        deadline = Deadline(timeout)
        with self._turn(name, timeout):
            peer = self._open(name, deadline)
        with self._lock:
            peer.handles += 1
            if peer.handles == 1:
                self._fire("tent_segment_opened", segment=peer.segment)
        peer.end()
        return peer

    def handle_closed(self, peer: LivePeer) -> None:
        """A handle was given back; the peer stays until it is idle for long, so that reopening is free."""
        reason = "its last handle was closed after it was retired"
        with self._lock:
            peer.handles -= 1
            if peer.handles or self._closed:
                return
            self._fire("tent_segment_closed", peer=peer.key)
            if peer.forget(reason):
                self._leave(peer, reason)

    @contextlib.contextmanager
    def _turn(self, name: str, timeout: float) -> Iterator[None]:
        """One thread at a time opens `name`. Raises UnknownSegment when others are still at it."""
        with self._lock:
            turn = self._opening.setdefault(name, _Turn())
            turn.wanted += 1
        try:
            # A little longer than the caller has: who is at it fails by then, and says what failed.
            if not turn.lock.acquire(timeout=timeout + _LATER_S):
                raise UnknownSegment(
                    f"no engine has answered at {name} within {timeout:.3g} s; another thread, which has "
                    "more time, goes on trying"
                )
            try:
                yield
            finally:
                turn.lock.release()
        finally:
            with self._lock:
                turn.wanted -= 1
                if not turn.wanted:
                    del self._opening[name]

    def _open(self, name: str, deadline: Deadline) -> LivePeer:
        """The peer behind `name`, with a use of it counted, so that it stays until a handle is."""
        peer = self._known(name)
        if peer is not None:
            # It has departed if it came back as another incarnation, or was idle and had no handle.
            with contextlib.suppress(PeerDeparted):
                peer.begin(deadline.left)
                return peer
        peer = self._connect(name, deadline)
        peer.begin(deadline.left)
        return peer

    def _known(self, name: str) -> LivePeer | None:
        with self._lock:
            peer = self._opened.get(name)
        return peer if peer is not None and peer.departed is None else None

    def _connect(self, name: str, deadline: Deadline) -> LivePeer:
        if len(self._opened) >= self._most and not self.relieve(None):
            raise TransportError(
                f"cannot open {name}: {len(self._opened)} peers are open and none is idle; the most are "
                f"{self._most} (peers.max, and what the limit of descriptors allows): "
                "close some, or raise those"
            )
        listener = Listener()
        connection = self._dial_with_relief(name, deadline.left, listener)
        with taking(connection, deadline.left) as made_for:
            peer = self._peer_of(connection, made_for, listener, deadline)
        with self._lock:
            closed = self._closed
            if not closed and peer.departed is None:
                self._opened[peer.key.name] = peer
        if closed:
            peer.depart("the engine was closed")
            raise ClosedError("the engine was closed while a segment was being opened")
        return peer

    def _peer_of(
        self, connection: Connection, made_for: Listener, listener: Listener, deadline: Deadline
    ) -> LivePeer:
        """The peer of a connection that was made for `made_for`, and got by a caller with `listener`."""
        if made_for.given_up:
            raise TransportError(f"peer {connection.key} departed while it was opened; try again")
        if made_for.peer is not None:
            return made_for.peer
        # The engine that answers may be a peer that was opened under another of its names.
        peer = self._known(connection.key.name)
        if peer is None or peer.key != connection.key:
            return LivePeer(self._owner, made_for, connection)
        peer.adopt(listener, connection, deadline.left)
        return peer

    def _dial_with_relief(self, name: str, timeout: float, listener: Listener) -> Connection:
        deadline = Deadline(timeout)
        try:
            return self._dial(name, timeout, listener)
        except TentError as error:
            if not lacks_resources(error) or not self.relieve(None):
                raise
        return self._dial(name, deadline.left, listener)

    # ---------------------------------------------------------------- release

    def retire_idle(self, at_least: float) -> None:
        """Let go of peers that nothing here has used for `at_least` seconds; the others are told for how long
        they have been idle. Never blocks."""
        for peer in self._all_opened():
            if not peer.retire(at_least, f"idle for {at_least:g} s"):
                peer.report_idle()

    def relieve(self, sparing: LivePeer | None) -> bool:
        """Retire the peers that are idle longest, an eighth of all but at least one, to make room.

        Waits up to RELIEF_S for their release; whether anything was released. Not for the control thread.
        """
        idle = [
            (seconds, peer)
            for peer in self._all_opened()
            if peer is not sparing and (seconds := peer.idle_for()) is not None
        ]
        idle.sort(key=lambda pair: -pair[0])
        wanted = max(1, len(self._opened) // 8)
        asked = [peer for _, peer in idle[:wanted] if peer.retire(0.0, "room is needed")]
        deadline = Deadline(RELIEF_S)
        with self._lock:
            self._changed.wait_for(
                lambda: all(peer.state is not PeerState.RETIRING for peer in asked), deadline.left
            )
        return any(peer.state is not PeerState.RETIRING for peer in asked)

    def close(self, timeout: float) -> None:
        """Let every peer depart, and wait for their release, within `timeout` seconds."""
        with self._lock:
            self._closed = True
        reason = "the engine was closed"
        for peer in self._all_opened():
            peer.depart(reason)
        with self._lock:
            self._changed.wait_for(lambda: not self._opened, timeout)
            opening = {info.key for info in self._sessions.values()}
            self._sessions.clear()
            for key in opening:
                self._left(key, reason)
        self._releases.close(0.1)

    def _all_opened(self) -> list[LivePeer]:
        with self._lock:
            return list(self._opened.values())

    def _retired(self, peer: LivePeer) -> None:
        """Nothing is held for an idle peer any more; it is forgotten as well unless a handle keeps it."""
        reason = "it was idle and was retired here"
        with self._lock:
            if not peer.handles and peer.forget(reason):
                self._leave(peer, reason)
            self._changed.notify_all()

    def _gone(self, peer: LivePeer) -> None:
        """A departed peer's endpoints are closed and no transfer of ours touches its memory: forget it."""
        reason = peer.departed or ""
        with self._lock:
            self._leave(peer, reason)
            self._changed.notify_all()
            closed = self._closed
        if not closed:  # else the control plane says goodbye to everybody at once
            self._later(lambda: peer.connection.close(reason))

    def _leave(self, peer: LivePeer, reason: str) -> None:
        """Nothing of a peer that was opened is left. With the lock held."""
        if self._opened.get(peer.key.name) is peer:
            del self._opened[peer.key.name]
        self._left(peer.key, reason)

    def _left(self, key: PeerKey, reason: str) -> None:
        """One side of a peer is gone; with the other one gone as well it has departed. With the lock held, so
        that of the two sides one is the last."""
        opened = self._opened.get(key.name)
        if (opened is None or opened.key != key) and not self._session_of(key):
            self._log.info("peer_departed", peer=str(key), reason=reason)
            self._fire("tent_peer_departed", peer=key, reason=reason)

    def _session_of(self, key: PeerKey) -> bool:
        return any(info.key == key for info in self._sessions.values())

    def _later(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(ClosedError):
            self._releases.submit(call)

    # ---------------------------------------------------------------- peers that opened this engine

    def session_opened(self, info: SessionInfo) -> None:
        """A peer opened this engine's segment. On the control thread."""
        with self._lock:
            self._sessions[info.session] = info

    def session_departed(self, info: SessionInfo, reason: str) -> list[Future[None]]:
        """A session ended: the transports free what they made for its peer. On the control thread.

        Answers what ends when each of them has: the peer must not come back before that, since what it makes
        then would be freed as well.
        """
        releases: list[Future[None]] = []
        with self._lock:
            self._sessions.pop(info.session, None)
            if not self._session_of(info.key):
                for running in self._transports:
                    with contextlib.suppress(ClosedError):
                        release = partial(_release, running, info.key, reason)
                        releases.append(running.calls.submit(release))
            self._left(info.key, reason)
        return releases

    def bootstrap(self, running: Running, key: PeerKey, payload: bytes) -> Future[bytes]:
        """Hand a peer's bootstrap message to a transport. What it makes for a peer that departs meanwhile,
        and so after the transport was told, is released again."""
        return running.bootstraps.submit(partial(self._bootstrap, running, key, payload))

    def _bootstrap(self, running: Running, key: PeerKey, payload: bytes) -> bytes:
        if not self._opens(key):
            raise TransportError(f"peer {key} has departed")
        try:
            return running.transport.bootstrap(key, payload)
        finally:
            if not self._opens(key):
                # Waited for, so that a peer which is back begins after it.
                with contextlib.suppress(ClosedError, FutureTimeout):
                    again = partial(_release, running, key, "it departed while it was bootstrapped")
                    running.calls.submit(again).result(RELEASE_S)

    def _opens(self, key: PeerKey) -> bool:
        with self._lock:
            return self._session_of(key)

    # ---------------------------------------------------------------- what there is

    def infos(self, sessions: Iterable[SessionInfo]) -> list[PeerInfo]:
        """Every peer as it is now, by name; `sessions` are those that the control plane keeps."""
        opening = {info.key: info for info in sessions}
        opened = {peer.key: peer for peer in self._all_opened()}
        return [
            self._info(key, opened.get(key), opening.get(key))
            for key in sorted({*opened, *opening})
        ]

    def _info(self, key: PeerKey, peer: LivePeer | None, session: SessionInfo | None) -> PeerInfo:
        transports: dict[str, dict[str, Any]] = {}
        host = session.host if session is not None else None
        state = session.state.value if session is not None else ""
        if peer is not None:
            host, state = peer.segment.host, peer.state.value
            transports = dict(self._stats.of_peer(peer.counters))
            for name, held in peer.holdings().items():
                transports.setdefault(name, {})["holdings"] = held
            for name, count in peer.traffic.waiting().items():
                transports.setdefault(name, {})["waiting"] = count
            for name, seconds in peer.traffic.paused().items():
                transports.setdefault(name, {})["paused_s"] = round(seconds, 3)
        assert host is not None
        return PeerInfo(
            name=key.name,
            incarnation=key.incarnation.hex(),
            pid=host.pid,
            same_machine=self._host.same_machine(host),
            opened=peer is not None,
            opens=session is not None,
            state=state,
            handles=peer.handles if peer is not None else 0,
            handshakes=peer.handshakes if peer is not None else 0,
            idle_s=_idle_s(peer, session),
            transports=transports,
        )

    def _refreshed(self, peer: LivePeer, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        hook = "tent_segment_refreshed"
        if self._hooks.has(hook):
            added, removed = _not_in(new, old), _not_in(old, new)
            self._fire(hook, segment=new, added=added, removed=removed)

    def _fire(self, hook: str, **fields: Any) -> None:
        self._hooks.fire(hook, **self._fields, **fields)


def _not_in(this: SegmentDescriptor, other: SegmentDescriptor) -> tuple[int, ...]:
    """The ids of registrations that `this` has and `other` has not."""
    known = other.buffers
    return tuple(
        sorted(
            number
            for number, buffer in this.buffers.items()
            if (there := known.get(number)) is not buffer
            and (there is None or there.generation != buffer.generation)
        )
    )


def _idle_s(peer: LivePeer | None, session: SessionInfo | None) -> float | None:
    if peer is not None:
        return peer.idle_for()
    since = session.idle_since if session is not None else None
    return None if since is None else max(0.0, time.monotonic() - since)


def _release(running: Running, key: PeerKey, reason: str) -> None:
    try:
        running.transport.release(key, reason)
    except Exception as error:
        running.log.error("transport_raised", doing="release", peer=str(key), error=repr(error))
