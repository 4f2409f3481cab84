"""The life of a peer that this engine opened, without I/O: live, retired while idle, woken by use, departed.

                 retire (idle)              released
        LIVE ------------------> RETIRING -----------> DORMANT
         ^                                              |   ^
         |  connected                        begin (use)|   | connect failed
         +------------------------ WAKING <-------------+   |
                                      +---------------------+
        any of them --- depart (goodbye, broken, ended, another incarnation) ---> DEPARTED
        DORMANT ------- forget (no handle is left) -----------------------------> DEPARTED

Only the initiator judges that a peer is idle: a side that only receives cannot see one-sided traffic.
"""

from __future__ import annotations

import enum


class PeerState(enum.Enum):
    """Where a peer is in its life."""

    LIVE = "live"
    RETIRING = "retiring"
    DORMANT = "dormant"
    WAKING = "waking"
    DEPARTED = "departed"


class Begin(enum.Enum):
    """What somebody who wants to use a peer has to do."""

    GO = "go"
    """It is live, and the use is counted."""
    CONNECT = "connect"
    """It is dormant: this caller, and no other, shall connect it, then report and ask again."""
    WAIT = "wait"
    """It is on its way to dormant or back: wait for a change, then ask again."""
    GONE = "gone"
    """It has departed."""


class Life:
    """Decides; its owner acts. Takes events and a clock (monotonic seconds). Not thread-safe."""

    __slots__ = ("last_used", "reason", "state", "users")

    def __init__(self, now: float) -> None:
        self.state = PeerState.LIVE
        self.users = 0
        self.last_used = now
        self.reason: str | None = None
        """Why it has departed, or None."""

    def begin(self) -> Begin:
        """Somebody wants to use the peer."""
        if self.state is PeerState.LIVE:
            self.users += 1
            return Begin.GO
        if self.state is PeerState.DORMANT:
            self.state = PeerState.WAKING
            return Begin.CONNECT
        return Begin.GONE if self.state is PeerState.DEPARTED else Begin.WAIT

    def end(self, now: float) -> bool:
        """A use has ended. True when it was the last one of a peer that has departed."""
        self.users -= 1
        self.last_used = now
        return self.users == 0 and self.state is PeerState.DEPARTED

    def idle_for(self, now: float) -> float | None:
        """Seconds without any use, or None while it is in use or not live."""
        return None if self.users or self.state is not PeerState.LIVE else now - self.last_used

    def retire(self, now: float, at_least: float) -> bool:
        """Begin to release what is held, if nothing has used it for `at_least` seconds; whether it does."""
        idle = self.idle_for(now)
        if idle is None or idle < at_least:
            return False
        self.state = PeerState.RETIRING
        return True

    def released(self) -> None:
        """What was held is released, the control connection last."""
        if self.state is PeerState.RETIRING:
            self.state = PeerState.DORMANT

    def connected(self, now: float) -> bool:
        """It is connected again; False when it has departed meanwhile, or is being released."""
        if self.state in (PeerState.DEPARTED, PeerState.RETIRING):
            return False
        self.state = PeerState.LIVE
        self.last_used = now
        return True

    def connect_failed(self) -> None:
        """It could not be connected now."""
        if self.state is PeerState.WAKING:
            self.state = PeerState.DORMANT

    def forget(self, reason: str) -> bool:
        """Nothing is held for it and nobody may use it any more: whether it is so, or somebody was faster."""
        if self.state is not PeerState.DORMANT:
            return False
        self.state = PeerState.DEPARTED
        self.reason = reason
        return True

    def depart(self, reason: str) -> PeerState | None:
        """It has departed; answers the state that it was in, or None when it had departed before."""
        before = self.state
        if before is PeerState.DEPARTED:
            return None
        self.state = PeerState.DEPARTED
        self.reason = reason
        return before
