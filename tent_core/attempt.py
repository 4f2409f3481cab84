"""The first attempt of a batch that nothing stands in the way of: what can be cancelled of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tent_core.work import Work


class _Carry(Protocol):
    def cancel(self) -> None: ...


class FirstAttempt:
    """Work that a transport has, before there is a Carry for it; implements `batch.Cancellable`.

    `cancelled` says whether somebody does not want it any more.
    """

    __slots__ = ("_carry", "_interrupt", "_now", "_work", "cancelled")

    def __init__(
        self, work: Work, interrupt: Callable[[Work], None] | None, now: Callable[[], float]
    ) -> None:
        """`interrupt` is the endpoint's `cancel`, if it can; `now` the monotonic clock."""
        self._now = now
        self._work: Work | None = work
        self._interrupt = interrupt
        self._carry: _Carry | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """End it as soon as may be, by its transport or by the Carry that goes on from it. Idempotent."""
        self.cancelled = True
        carry, work = self._carry, self._work
        if carry is not None:
            carry.cancel()
        elif work is not None and not work.finished:
            work.cancel(self._now())
            interrupt = self._interrupt
            if interrupt is not None:
                interrupt(work)

    def ended(self) -> None:
        """Nothing is left to cancel. The work knows whoever made it, so to keep it would leave all of them to
        the garbage collector."""
        self._work = self._interrupt = None

    def failed(self, carry: _Carry) -> None:
        """The attempt has failed, and `carry` is about to go on."""
        self._carry = carry
        self.ended()
        if self.cancelled:
            carry.cancel()
