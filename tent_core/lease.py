"""The standing use that a bound transfer has of its buffers and its peer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tent_core.inflight import InFlight

if TYPE_CHECKING:
    from tent_core.stats import Tally


class Lease(InFlight):
    """Marks each use of several things at once, where there would be a mark of each.

    Its things know it (`InFlight.lend`, `LivePeer.lend`), and shut it before they go themselves, or when what
    it was made for is not so any more. A use that is under way then counts as one of theirs until it ends.
    Nobody has to give it back: they forget it when nobody else knows it. Thread-safe; its lock is a leaf.
    """

    __slots__ = ("__weakref__", "_noticed", "tally")

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self.tally = tally
        self._noticed = tally.calls

    def succeeded(self) -> None:
        """A use has ended, and what it was for is done."""
        with self._lock:
            self.tally.calls += 1
            self._count -= 1
            if self._open or self._count:
                return
        self._tell_drained()

    def used(self) -> bool:
        """Whether it is in use, or was since it was asked last. Asked by one thread at a time."""
        calls = self.tally.calls
        used = self._count > 0 or calls != self._noticed
        self._noticed = calls
        return used

    def __del__(self) -> None:
        self.tally.over = True
