"""Whether other threads of this process compute, so that a released GIL is slow to come back."""

from __future__ import annotations

import time

_EVERY_S = 0.5
_AWAY_S = 20e-6
"""Long enough for a thread that waits for the GIL to wake up and take it."""
_LATE_S = 1e-3
"""After a computing thread took it, it is away for a switch interval, 5 ms."""


_CROWDED_SPIN_S = 500e-6
"""How long to look for an answer where sleeping costs a switch interval: until a receiver has woken up."""


class GilWatch:
    """Looks twice a second: gives the GIL up, and measures how long it stays away. Thread-safe."""

    def __init__(self, spin_s: float) -> None:
        """`spin_s`: how long to look for an answer where nobody else computes."""
        self._spin_s = spin_s
        self._next = 0.0
        self._contended = False

    def contended(self) -> bool:
        """Whether the GIL, once released, comes back late."""
        began = time.monotonic()
        if began >= self._next:
            self._next = began + _EVERY_S
            time.sleep(_AWAY_S)
            self._contended = time.monotonic() - began > _LATE_S
        return self._contended

    def spin_s(self, contended: bool) -> float:
        """How long to look for an answer before sleeping."""
        return max(self._spin_s, _CROWDED_SPIN_S) if contended else self._spin_s
