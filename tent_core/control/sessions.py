"""The sessions that peers opened here, without I/O: who is there, has let go of what, and has departed.

A state machine that takes events and a clock and answers what happened; `server.py` drives it.

    connect --> BROKEN <--> OPEN          (the watch stream is lost and found again)
                  |           |
                  v           v
               departed, once, with its reason --> gone, or a holder: DEPARTED while its process lives

A session that departed stays a *holder* when its process is on this machine and not known to have ended:
it may be stopped inside a system call that touches our memory. Its goodbye, which its engine says after it
has let go of everything, or the end of its process, ends that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tent_core.control.contract import SessionInfo, SessionState
from tent_core.descriptor import HostIdentity, PeerKey

NOTHING_SENT = -1
"""`SessionInfo.acknowledged` of a session that has not been sent a snapshot: it holds nothing."""

REASONS_KEPT = 256
"""Of how many departed sessions it is still known why: told to a peer that comes back too late."""

_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Opened:
    """A session was opened."""

    info: SessionInfo


@dataclass(frozen=True, slots=True)
class Departed:
    """The peer of a session has departed."""

    info: SessionInfo
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """Nothing of a session is left: its process need not be watched any more."""

    session: int


Event = Opened | Departed | Gone


class Full(Exception):
    """No further session is taken. `events` happened all the same: what has departed stays departed."""

    def __init__(self, why: str, events: list[Event]) -> None:
        self.events = events
        super().__init__(why)


@dataclass(slots=True)
class _Session:
    info: SessionInfo
    nonce: int
    opened: float
    broken_since: float
    notified: int = 0


class Sessions:
    """All sessions of one engine. Not thread-safe: for the control thread.

    `draw` makes session numbers (random, never 0), `grace_s` is the time that a peer has to come back,
    `most` bounds sessions and holders together, and `limit` says what `most` comes from.
    """

    def __init__(
        self, host: HostIdentity, grace_s: float, most: int, limit: str, draw: Callable[[], int]
    ) -> None:
        self._host = host
        self._grace_s = grace_s
        self._most = most
        self._limit = limit
        self._draw = draw
        self._live: dict[int, _Session] = {}
        self._holders: dict[int, _Session] = {}
        self._by_name: dict[str, int] = {}
        self._reasons: dict[int, str] = {}

    def connect(
        self,
        now: float,
        key: PeerKey,
        nonce: int,
        host: HostIdentity,
        transports: Mapping[str, int],
    ) -> tuple[int, list[Event]]:
        """A peer connects: its session's number, and what happened.

        Asked again with the same nonce it is the same session. A new nonce or incarnation under a name
        that has a session departs that session at once. Raises Full.
        """
        events: list[Event] = []
        held = self._live.get(self._by_name.get(key.name, 0))
        if held is not None:
            if (held.info.key, held.nonce) == (key, nonce):
                return held.info.session, events
            reason = (
                "it connected anew"
                if held.info.key == key
                else f"another incarnation of it, {key}, connected"
            )
            events += self._depart(held, reason)
        if len(self._live) + len(self._holders) >= self._most:
            raise Full(self.full(), events)
        while (number := self._draw()) == 0 or number in self._live or number in self._holders:
            pass
        info = SessionInfo(
            number,
            key,
            host,
            transports,
            NOTHING_SENT,
            SessionState.BROKEN,
            self._host.same_machine(host),
        )
        self._live[number] = _Session(info, nonce, now, now)
        self._by_name[key.name] = number
        return number, [*events, Opened(info)]

    def full(self) -> str:
        """Why there is no room when there is none."""
        return (
            f"it keeps {self._most} sessions already, {len(self._holders)} of them of departed peers whose "
            f"processes still live: close some, or raise {self._limit} there"
        )

    def knows(self, name: str) -> bool:
        """Whether a peer of that name has a live session, whose place it would take."""
        return name in self._by_name

    def get(self, session: int) -> SessionInfo | None:
        """The live session of that number, or None when it is not (or no longer) known."""
        found = self._live.get(session)
        return None if found is None else found.info

    def why_departed(self, session: int) -> str | None:
        """Why a session that is no longer live departed, if that is still known."""
        return self._reasons.get(session)

    def watching(self, session: int) -> None:
        """The watch stream of a live session is up."""
        held = self._live[session]
        held.info = replace(held.info, state=SessionState.OPEN)

    def lost(self, now: float, session: int) -> None:
        """The watch stream of a session broke: its grace begins. Nothing if it is not live."""
        held = self._live.get(session)
        if held is not None and held.info.state is SessionState.OPEN:
            held.info = replace(held.info, state=SessionState.BROKEN)
            held.broken_since = now

    def sent(self, session: int, version: int) -> None:
        """A snapshot is about to be sent. The first one is all that its peer can hold so far."""
        held = self._live[session]
        if held.info.acknowledged == NOTHING_SENT:
            held.info = replace(held.info, acknowledged=version)

    def acknowledge(self, session: int, version: int) -> None:
        """The peer has let go of all that `version` and older ones took away. Holders may say so as well."""
        held = self._live.get(session) or self._holders.get(session)
        if held is not None and held.info.acknowledged != NOTHING_SENT:
            held.info = replace(held.info, acknowledged=max(held.info.acknowledged, version))

    def report(self, now: float, session: int, idle_s: float | None) -> None:
        """A peer says for how long it has been idle, or that it is not (None). Nothing if it is not live."""
        held = self._live.get(session)
        if held is not None:
            since = None if idle_s is None else max(held.opened, now - idle_s)
            held.info = replace(held.info, idle_since=since)

    def idle(self) -> dict[int, float]:
        """The sessions whose peers are idle, as they say, and can be asked to retire; since when each is."""
        return {
            number: held.info.idle_since
            for number, held in self._live.items()
            if held.info.idle_since is not None and held.info.state is SessionState.OPEN
        }

    def notified(self, session: int) -> int:
        """The highest sequence number of a notification that was taken in a live session."""
        return self._live[session].notified

    def take_notification(self, session: int, sequence: int) -> None:
        """A notification was taken: this and lower numbers are duplicates from now on."""
        self._live[session].notified = sequence

    def goodbye(
        self, session: int, reason: str, *, retired: bool = False
    ) -> tuple[bool, list[Event]]:
        """The peer said goodbye: it touches nothing any more. Answers whether the session was known.

        One that has `retired` lives on, and comes back when it needs this engine.
        """
        held = self._live.get(session)
        if held is not None:
            said = "it retired" if retired else "it said goodbye"
            return True, self._depart(held, f"{said}: {reason}", holds=False)
        if self._holders.pop(session, None) is not None:
            return True, [Gone(session)]
        return False, []

    def process_ended(self, session: int) -> list[Event]:
        """The process behind a session has ended."""
        held = self._live.get(session)
        if held is not None:
            return self._depart(held, f"its process {held.info.host.pid} ended", holds=False)
        return [Gone(session)] if self._holders.pop(session, None) is not None else []

    def other_incarnation(self, key: PeerKey) -> list[Event]:
        """`key` was found to answer under its name: a session of another incarnation has departed."""
        number = self._by_name.get(key.name)
        if number is None or self._live[number].info.key == key:
            return []
        return self._depart(
            self._live[number], f"another incarnation answers under its name: {key}"
        )

    def tick(self, now: float) -> list[Event]:
        """Depart those whose grace has ended."""
        events: list[Event] = []
        for held in [h for h in self._live.values() if self._ends(h) <= now]:
            reason = (
                f"its control connection broke and did not come back within {self._grace_s:g} s"
            )
            events += self._depart(held, reason)
        return events

    def next_tick(self) -> float | None:
        """When `tick` has something to do, or None."""
        return min(
            (end for h in self._live.values() if (end := self._ends(h)) != _NEVER), default=None
        )

    def all(self) -> list[SessionInfo]:
        """Live sessions, then holders."""
        return [h.info for h in (*self._live.values(), *self._holders.values())]

    def unacknowledged(self, version: int) -> list[SessionInfo]:
        """Those who may still use what `version` took away: live or holders, behind it, not empty-handed."""
        return [info for info in self.all() if NOTHING_SENT != info.acknowledged < version]

    def _ends(self, held: _Session) -> float:
        return (
            held.broken_since + self._grace_s if held.info.state is SessionState.BROKEN else _NEVER
        )

    def _depart(self, held: _Session, reason: str, *, holds: bool = True) -> list[Event]:
        info = held.info
        del self._live[info.session]
        del self._by_name[info.key.name]
        held.info = replace(info, state=SessionState.DEPARTED)
        self._reasons[info.session] = reason
        if len(self._reasons) > REASONS_KEPT:
            del self._reasons[next(iter(self._reasons))]
        events: list[Event] = [Departed(held.info, reason)]
        if holds and info.same_host and info.acknowledged != NOTHING_SENT:
            self._holders[info.session] = held
        else:
            events.append(Gone(info.session))
        return events
