"""What a peer is told of this side's use of it, without I/O: only what has changed."""

from __future__ import annotations

SLACK_S = 0.5
"""An idle time that begins anew by less than this is the same one."""


class Use:
    """Whether a peer is in use here, or since when it is idle, as it is to be told. In use until reported."""

    __slots__ = ("since",)

    def __init__(self) -> None:
        self.since: float | None = None
        """Since when it is idle, or None while it is in use."""

    def report(self, since: float | None) -> bool:
        """It is idle since then, or in use (None). Answers whether that is news for the peer."""
        old = self.since
        if old is not None and since is not None and abs(since - old) < SLACK_S:
            return False
        self.since = since
        return old is not since
