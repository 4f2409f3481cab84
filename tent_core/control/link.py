"""The state of a connection to a peer, without I/O: up, broken within its grace, or departed with its reason.

broken <--> up
  |         |
  v         v
  departed, once (its grace ended, nobody listens any more, farewell, forgotten, another incarnation, its
  process ended)
"""

from __future__ import annotations

import enum

REFUSED_S = 1.0
"""An engine listens for as long as it lives: a refusal that lasts so long, on this machine, is its end."""


class LinkState(enum.Enum):
    """State of a connection."""

    UP = "up"
    BROKEN = "broken"
    DEPARTED = "departed"


class Link:
    """Decides when the peer of a connection has departed. Not thread-safe: for the control thread."""

    def __init__(self, now: float, grace_s: float) -> None:
        self._grace_s = grace_s
        self._broken_since = now
        self._cause = "it has not been up yet"
        self._refused_since: float | None = None
        self.state = LinkState.BROKEN
        self.reason: str | None = None
        """Why the peer has departed, or None."""
        self.owes_goodbye = True
        """Whether the peer may still count this side among those who touch its memory."""

    @property
    def ends(self) -> float:
        """When the grace of a broken link ends."""
        return self._broken_since + self._grace_s

    def up(self) -> None:
        """The watch stream was accepted."""
        if self.state is LinkState.BROKEN:
            self.state = LinkState.UP
            self._refused_since = None

    def broken(self, now: float, cause: str) -> None:
        """The watch stream, or an attempt to bring it back, ended with `cause`."""
        self._cause = cause
        if self.state is LinkState.UP:
            self.state = LinkState.BROKEN
            self._broken_since = now

    def refused(self, now: float, refused: bool) -> str | None:
        """Whether nobody listens at the address of a peer on this machine, just looked at while the link is
        broken; the reason to depart when that has been so for long, else None."""
        if not refused or self.state is not LinkState.BROKEN:
            self._refused_since = None
            return None
        if self._refused_since is None:
            self._refused_since = now
        if now - self._refused_since < REFUSED_S:
            return None
        return f"nobody listens at its address any more, for {REFUSED_S:g} s: its engine was closed"

    def overdue(self, now: float) -> str | None:
        """The reason to depart when the grace of a broken link has ended, else None."""
        if self.state is not LinkState.BROKEN or now < self.ends:
            return None
        return f"its control connection broke and did not come back within {self._grace_s:g} s: {self._cause}"

    def depart(self, reason: str, *, owes_goodbye: bool = True) -> bool:
        """The peer has departed, or this side is done with it. False if that was so before."""
        if self.state is LinkState.DEPARTED:
            return False
        self.state = LinkState.DEPARTED
        self.reason = reason
        self.owes_goodbye = owes_goodbye
        return True
