"""How long the receiver looks for more before it sleeps."""

from __future__ import annotations

import os
from resource import RUSAGE_SELF, getrusage

_SAMPLE_S = 20e-3
"""Between two looks at how often the processor was lost: the kernel has time to find a free one."""

_LEAST = 8
"""Messages that a look needs."""

_OFTEN = 0.75
"""Lost so many times for each message: other threads want all processors."""

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
        self._looked = 0.0
        self._messages = 0
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
            self._look(now)
        self._until = now + self._spin_s
        self._messages += 1
        if now - self._looked >= _SAMPLE_S:
            messages, lost = self._look(now)
            if messages >= _LEAST and lost >= _OFTEN * messages:
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

    def _look(self, now: float) -> tuple[int, int]:
        """Messages since the last look, and how often the processor was lost."""
        messages, before = self._messages, self._lost
        self._looked, self._messages, self._lost = now, 0, _times_lost()
        return messages, self._lost - before


def _times_lost() -> int:
    """How often this process has lost its processor to others."""
    return getrusage(RUSAGE_SELF).ru_nivcsw
