"""How long to wait for a stream, and why one is given up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from tent_core.errors import TransportError

TICK_S = 0.1
"""A blocked call looks up this often, for its deadline and for whether its endpoint was closed."""

CROWDED_SPIN_S = 500e-6
"""How long to look for an answer where sleeping costs a switch interval: until a receiver has woken up."""

SHORT = 128 << 10
"""Up to this size the GIL is kept in any case: some tens of microseconds."""


def spins(spin_s: float) -> tuple[float, float]:
    """How long to look for an answer before sleeping: usually, and where a released GIL is late (index 1)."""
    return spin_s, max(spin_s, CROWDED_SPIN_S)


class StreamFailed(TransportError):
    """A stream is of no more use: it could not be made, broke, or spoke nonsense."""


class StreamBroke(StreamFailed):
    """A stream was closed, reset or cut: another one may do."""


class DeadlinePassed(StreamFailed):
    """A stream was given up because its user's time was over: the peer need not have gone."""


class Canceled(StreamFailed):
    """A stream was given up because nobody wants any more what it carried."""


class Patience(NamedTuple):
    """How long to wait: to an absolute deadline, and at most `stall_s` without any progress."""

    deadline: float
    stall_s: float
    interrupted: Callable[[], StreamFailed | None]
    """Why to give up at once, or None. Asked at every tick."""
    spin_s: float = 0.0
    """How long to look again before a call that waits."""
    crowded: bool = False
    """Whether other threads of the process compute, so that a released GIL comes back late."""
    keep_gil: int = 0
    """If so, what is short: moved by calls that do not wait and keep the GIL, in bytes."""

    def is_short(self, size: int) -> bool:
        """Whether to keep the GIL for a transfer of `size` bytes."""
        return size <= (max(self.keep_gil, SHORT) if self.crowded else SHORT)

    def check(self, progress: float) -> float:
        """Seconds to wait now, given when there was progress last. Raises StreamFailed."""
        now = time.monotonic()
        reason = self.interrupted()
        if reason is not None:
            raise reason
        if now >= self.deadline:
            raise DeadlinePassed("the deadline of the transfer has passed")
        if now >= progress + self.stall_s:
            raise StreamFailed(f"not a byte moved for {self.stall_s:g} s")
        return min(TICK_S, self.deadline - now, progress + self.stall_s - now)
