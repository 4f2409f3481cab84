"""Whether other threads of this process compute, so that a released GIL is slow to come back.

CPython's threads hand the GIL over when they wait, or after a switch interval (5 ms,
`sys.setswitchinterval`). So beside a thread that computes, a call that moves bytes for 20 microseconds and
releases the GIL meanwhile takes 5 ms; and it had better be released beside threads that wait or move bytes.
"""

from __future__ import annotations

import time

_EVERY_S = 0.5
_AWAY_S = 20e-6
"""Long enough for a thread that waits for the GIL to wake up and take it."""
_LATE_S = 1e-3
"""After a computing thread took it, it is away for a switch interval, 5 ms."""


class GilWatch:
    """Looks twice a second: gives the GIL up, and measures how long it stays away. Thread-safe."""

    def __init__(self) -> None:
        self._next = 0.0
        self._contended = False

    def contended(self) -> bool:
        """Whether the GIL, once released, comes back late."""
        began = time.monotonic()
        if began >= self._next:
            self._next = began + _EVERY_S
            self._contended = _is_late() and _is_late()  # once may be a processor that was late
        return self._contended


def _is_late() -> bool:
    began = time.monotonic()
    time.sleep(_AWAY_S)
    return time.monotonic() - began > _LATE_S


contended = GilWatch().contended
"""The same of the one watch of this process: transports ask it before a call that may keep the GIL."""
