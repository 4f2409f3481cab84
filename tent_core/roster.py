"""All peers of one engine: those that it opened, those that opened it, and those that did both."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tent_core.descriptor import HostIdentity, PeerKey, SegmentDescriptor
from tent_core.errors import ClosedError, PeerDeparted, TentError, TransportError
from tent_core.inflight import Deadline
from tent_core.life import PeerState
from tent_core.peers import Listener, LivePeer, Owner
from tent_core.scarcity import lacks_resources
from tent_core.serial import SerialQueue
from tent_core.stats import Stats

if TYPE_CHECKING:
    from tent_core.control.contract import SessionInfo
    from tent_core.control.plane import Connection
    from tent_core.hooks import Hooks
    from tent_core.runner import Running, Transports

RELIEF_S = 1.0
"""How long retiring idle peers may take when something is refused for lack of resources."""


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """One peer as it is now, for `Engine.peers` and `tent peers`.

    `opened`: this engine opened it; `opens`: it opened this engine. `state` is that of the opened side
    (live, retiring, dormant, waking), or of its session (open, broken, departed). `idle_s` is None while it
    is in use or cannot be judged here. `transports` has, by name, bytes, tasks, failures and what is held.
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
        self._opening: dict[str, threading.Lock] = {}
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
        )

    def __len__(self) -> int:
        return len(self._opened)

    # ---------------------------------------------------------------- opening

    def open(self, name: str, timeout: float) -> LivePeer:
        """The peer behind a name: the known one, woken if it was retired, or a new one; a handle is counted.

        Many callers connect once. Raises UnknownSegment, PeerRefused, TransportError, ClosedError.
        """
        deadline = Deadline(timeout)
        with self._lock:
            turn = self._opening.setdefault(name, threading.Lock())
        if not turn.acquire(timeout=deadline.left):
            raise TransportError(
                f"another thread is opening segment {name} and has not ended; try again"
            )
        try:
            peer = self._open(name, deadline.left)
        finally:
            turn.release()
            with self._lock:
                self._opening.pop(name, None)
        with self._lock:
            peer.handles += 1
            first = peer.handles == 1
        if first:
            self._fire("tent_segment_opened", segment=peer.segment)
        return peer

    def handle_closed(self, peer: LivePeer) -> None:
        """A handle was given back; the peer stays until it is idle for long, so that reopening is free."""
        with self._lock:
            peer.handles -= 1
            last = peer.handles == 0
            forgotten = last and peer.state is PeerState.DORMANT
            if forgotten:
                self._forget(peer)
        if last and not self._closed:
            self._fire("tent_segment_closed", peer=peer.key)
        if forgotten:
            self._left(peer.key, "its last handle was closed after it was retired")

    def _open(self, name: str, timeout: float) -> LivePeer:
        peer = self._known(name)
        if peer is None:
            return self._connect(name, timeout)
        try:
            peer.begin(timeout)
        except PeerDeparted:  # it came back as another incarnation
            return self._connect(name, timeout)
        peer.end()
        return peer

    def _known(self, name: str) -> LivePeer | None:
        with self._lock:
            peer = self._opened.get(name)
        return peer if peer is not None and peer.departed is None else None

    def _connect(self, name: str, timeout: float) -> LivePeer:
        if len(self._opened) >= self._most and not self.relieve(None):
            raise TransportError(
                f"cannot open {name}: {len(self._opened)} peers are open and none is idle; the most are "
                f"{self._most} (peers.max, and what the limit of descriptors allows): "
                "close some, or raise those"
            )
        listener = Listener()
        connection = self._dial_with_relief(name, timeout, listener)
        # The engine that answers may be a peer that was opened under another of its names.
        made_for = connection.listener
        peer = made_for.peer if isinstance(made_for, Listener) else None
        if peer is None:
            peer = self._known(connection.key.name)
            if peer is None or peer.key != connection.key:
                peer = LivePeer(self._owner, listener, connection)
            else:
                peer.adopt(listener, connection)
        with self._lock:
            closed = self._closed
            if not closed and peer.departed is None:
                self._opened[peer.key.name] = peer
        if closed:
            peer.depart("the engine was closed")
            raise ClosedError("the engine was closed while a segment was being opened")
        peer.check_alive()
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
        """Let go of peers that nothing here has used for `at_least` seconds. Never blocks."""
        for peer in self._all_opened():
            peer.retire(at_least, f"idle for {at_least:g} s")

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
        for peer in self._all_opened():
            peer.depart("the engine was closed")
        with self._lock:
            self._changed.wait_for(lambda: not self._opened, timeout)
        self._releases.close(0.1)

    def _all_opened(self) -> list[LivePeer]:
        with self._lock:
            return list(self._opened.values())

    def _retired(self, peer: LivePeer) -> None:
        """Nothing is held for an idle peer any more; it is forgotten as well unless a handle keeps it."""
        with self._lock:
            forgotten = peer.handles == 0
            if forgotten:
                self._forget(peer)
            self._changed.notify_all()
        if forgotten:
            self._left(peer.key, "it was retired: idle")

    def _gone(self, peer: LivePeer) -> None:
        """A departed peer's endpoints are closed and no transfer of ours touches its memory: forget it."""
        with self._lock:
            self._forget(peer)
            self._changed.notify_all()
            closed = self._closed
        if not closed:  # else the control plane says goodbye to everybody at once
            self._later(lambda: peer.connection.close(peer.departed or ""))
        self._left(peer.key, peer.departed or "")

    def _forget(self, peer: LivePeer) -> None:
        if self._opened.get(peer.key.name) is peer:
            del self._opened[peer.key.name]

    def _left(self, key: PeerKey, reason: str) -> None:
        """One side of a peer is gone; when nothing of it is left here, that is its departure."""
        with self._lock:
            opened = self._opened.get(key.name)
            left = (opened is None or opened.key != key) and not any(
                info.key == key for info in self._sessions.values()
            )
        if left:
            self._log.info("peer_departed", peer=str(key), reason=reason)
            self._fire("tent_peer_departed", peer=key, reason=reason)

    def _later(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(ClosedError):
            self._releases.submit(call)

    # ---------------------------------------------------------------- peers that opened this engine

    def session_opened(self, info: SessionInfo) -> None:
        """A peer opened this engine's segment. On the control thread."""
        with self._lock:
            self._sessions[info.session] = info

    def session_departed(self, info: SessionInfo, reason: str) -> None:
        """A session ended: the transports free what they made for its peer. On the control thread."""
        with self._lock:
            self._sessions.pop(info.session, None)
            again = any(other.key == info.key for other in self._sessions.values())
        if not again:
            for running in self._transports:
                with contextlib.suppress(ClosedError):
                    running.calls.submit(lambda r=running: _release(r, info.key, reason))  # type: ignore[misc]
        self._left(info.key, reason)

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
            idle_s=peer.idle_for() if peer is not None else None,
            transports=transports,
        )

    def _refreshed(self, peer: LivePeer, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        before = {(b.id, b.generation) for b in old.buffers.values()}
        after = {(b.id, b.generation) for b in new.buffers.values()}
        self._fire(
            "tent_segment_refreshed",
            segment=new,
            added=tuple(sorted(i for i, _ in after - before)),
            removed=tuple(sorted(i for i, _ in before - after)),
        )

    def _fire(self, hook: str, **fields: Any) -> None:
        self._hooks.fire(hook, **self._fields, **fields)


def _release(running: Running, key: PeerKey, reason: str) -> None:
    try:
        running.transport.release(key, reason)
    except Exception as error:
        running.log.error("transport_raised", doing="release", peer=str(key), error=repr(error))
