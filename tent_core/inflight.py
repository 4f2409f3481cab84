"""Marks of work in flight on one buffer: what must end before the memory may go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from weakref import WeakSet


class InFlight:
    """Counts the batches that use one buffer, and says when the last has ended after it was shut.

    A user marks itself before it checks anything and unmarks after its last byte has moved; whoever takes
    the memory away shuts the gate first and then waits for the marks. Thread-safe; under its lock only those
    of its leases are taken, which are leaves.
    """

    __slots__ = ("_count", "_drained", "_lent", "_lock", "_open")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._open = True
        self._drained: list[Callable[[], None]] = []
        self._lent: WeakSet[InFlight] | None = None

    def begin(self) -> bool:
        """Mark one use; False when the gate is shut (nothing is marked then)."""
        with self._lock:
            if self._open:
                self._count += 1
            return self._open

    def end(self) -> None:
        """Unmark one use. Calls what waits for the last one, in this thread, with no lock held."""
        with self._lock:
            self._count -= 1
            if self._open or self._count:
                return
        self._tell_drained()

    def shut(self) -> None:
        """Refuse every new use from now on."""
        with self._lock:
            self._open = False
            lent, self._lent = self._lent, None
            for lease in lent or ():
                if not lease.shut_idle(self.end):
                    self._count += 1

    def shut_idle(self, ended: Callable[[], None]) -> bool:
        """Refuse every new use from now on. True when there is none; else the last one calls `ended()`."""
        with self._lock:
            self._open = False
            if self._count:
                self._drained.append(ended)
            return not self._count

    def lend(self, lease: InFlight) -> bool:
        """The uses marked in `lease`, which is shut with this gate, are uses of this. False if it is shut."""
        with self._lock:
            if self._open:
                if self._lent is None:
                    self._lent = WeakSet()
                self._lent.add(lease)
            return self._open

    @property
    def is_open(self) -> bool:
        """Whether it takes new uses."""
        return self._open

    @property
    def count(self) -> int:
        """How many uses are marked, beside those of leases."""
        return self._count

    def _tell_drained(self) -> None:
        with self._lock:
            waiting, self._drained = self._drained, []
        for call in waiting:
            call()

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call once the gate is shut and no use is left: now, or in the thread that ends the last one."""
        with self._lock:
            if self._open or self._count:
                self._drained.append(call)
                return
        call()

    def wait_drained(self, timeout: float) -> bool:
        """Wait until the gate is shut and no use is left; False if that takes more than `timeout` seconds."""
        event = threading.Event()
        self.when_drained(event.set)
        return event.wait(max(0.0, timeout))


def begin_all(marks: Iterable[InFlight]) -> InFlight | None:
    """Mark a use of each, or of none: answers the one that was shut, or None when all are marked."""
    begun: list[InFlight] = []
    for mark in marks:
        if not mark.begin():
            for done in begun:
                done.end()
            return mark
        begun.append(mark)
    return None


class Deadline:
    """A point on the monotonic clock, and how much is left until it."""

    __slots__ = ("at",)

    def __init__(self, timeout: float) -> None:
        self.at = time.monotonic() + timeout

    @property
    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())
