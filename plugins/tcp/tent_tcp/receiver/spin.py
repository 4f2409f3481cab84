"""How long the receiver looks for more before it sleeps."""

from __future__ import annotations

import os
from resource import RUSAGE_SELF, getrusage

_SAMPLE = 8
"""Messages between two looks at how often the processor was lost."""

_OFTEN = 6
"""So many times in a sample: other threads want all processors."""

_CROWDED_S = 0.5
"""For how long the machine counts as crowded then."""

_YIELD_EVERY = 4
"""Looks between two yields, each of which takes as long as two looks."""

_WITHIN_S = 50e-6
"""How long to look for the rest of a message in a crowded machine."""


class Spin:
    """Looks again and again for a while after something came, yielding all the while.

    Where other threads want all processors, who spins is soon behind them, and who sleeps is woken at once: a
    write of 4 KiB took 160 us with spinning there, and 50 without. So between messages it sleeps then, and
    looks, without yielding, only while the rest of a message is on its way.
    """

    def __init__(self, spin_s: float) -> None:
        self._spin_s = spin_s
        self._until = 0.0
        self._crowded_until = 0.0
        self._yielding = True
        self._left = _SAMPLE
        self._lost = _times_lost()
        self._looks = 0

    def came(self, now: float, within: bool) -> None:
        """Something came, and the rest of a message must follow (`within`) or need not."""
        if now < self._crowded_until:
            self._yielding = False
            self._until = now + min(self._spin_s, _WITHIN_S) if within else 0.0
            return
        if not self._yielding:
            self._yielding = True
            self._lost, self._left = _times_lost(), _SAMPLE
        self._until = now + self._spin_s
        self._left -= 1
        if self._left == 0:
            before, self._lost, self._left = self._lost, _times_lost(), _SAMPLE
            if self._lost - before >= _OFTEN:
                self._crowded_until = now + _CROWDED_S

    def goes_on(self, now: float) -> bool:
        """Whether to look again, after others have had a chance to run; False: sleep."""
        if now >= self._until:
            return False
        if self._yielding:
            self._looks += 1
            if self._looks % _YIELD_EVERY == 0:
                os.sched_yield()
        return True


def _times_lost() -> int:
    """How often this process has lost its processor to others."""
    return getrusage(RUSAGE_SELF).ru_nivcsw
