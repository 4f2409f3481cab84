"""How fast one transport has been moving bytes to one peer. Pure: it is told the time."""

from __future__ import annotations

BULK = 64 << 10
"""Smaller sub-batches say nothing about a rate, and delay nobody: they are not counted."""

_KEPT = 0.8
"""Of what was measured before, at each new measurement: the last five or so decide."""


class Pace:
    """Bytes under way, and the rate at which they have been arriving. Not thread-safe: its owner has a lock.

    The time of a sub-batch that shared the way with others begins when the one before it ended, so that many
    at once do not make each of them look slow.
    """

    __slots__ = ("_bytes", "_last", "_seconds", "under_way")

    def __init__(self) -> None:
        self.under_way = 0
        self._bytes = 0.0
        self._seconds = 0.0
        self._last = 0.0

    def began(self, size: int) -> None:
        """A sub-batch of `size` bytes was submitted."""
        self.under_way += size

    def ended(self, size: int, moved: int, began: float, now: float) -> None:
        """It has ended; `moved` bytes of it arrived."""
        self.under_way -= size
        if moved:
            self._bytes = self._bytes * _KEPT + moved
            self._seconds = self._seconds * _KEPT + max(0.0, now - max(began, self._last))
        self._last = now

    @property
    def rate(self) -> float | None:
        """Bytes a second, or None while nothing is known."""
        return self._bytes / self._seconds if self._seconds > 0.0 else None
