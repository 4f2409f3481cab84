"""Bulk of this engine takes turns with that of other processes on the host, by slots that they share.

An engine takes a slot when its first bulk starts and keeps it while some is under way. When it has had it for
`quantum` seconds and others wait, it lets nothing more start, gives the slot back when what is under way has
ended, and waits in its turn. It looks for a free slot every few milliseconds, and only while something waits;
what has waited for `promotion` seconds starts without one, so that nobody starves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from tent_core.alarm import Alarm

LOOK_S = 0.002
"""How often to look for a free slot while something waits."""
REST_S = 2 * LOOK_S
"""How long to leave a slot to others after having had it for long."""
QUANTUM_S = 0.02
"""How long to keep a slot for which others wait. A look of theirs is a tenth of it."""


class Slots(Protocol):
    """What `slotfile.SlotFile` does."""

    def take(self, owner: object, count: int) -> int | None: ...

    def give_back(self, slot: int) -> None: ...

    def wait(self, owner: object, waits: bool) -> None: ...

    def others_wait(self, owner: object) -> bool: ...


class Turn:
    """One piece of bulk. `go()` is called when it may start after it had to wait."""

    __slots__ = ("go", "since", "state")

    def __init__(self, go: Callable[[], None]) -> None:
        self.go = go
        self.since = 0.0
        self.state = ""
        """Empty, `waits`, or `counts` while it keeps the slot."""


class Turns:
    """The turns of one engine. Thread-safe; its lock is a leaf but for that of the slots, and no turn is told
    under it."""

    def __init__(
        self, slots: Slots, count: int, promotion: float, alarm: Alarm, quantum: float = QUANTUM_S
    ) -> None:
        self._slots = slots
        self._count = count
        self._promotion = promotion
        self._quantum = quantum
        self._alarm = alarm
        self._lock = threading.Lock()
        self._waiting: deque[Turn] = deque()
        self._slot: int | None = None
        self._since = 0.0
        self._counting = 0
        self._looking = False
        self._shut = False
        self._given_back = float("-inf")
        self._not_before = float("-inf")
        """After a slot was given back for others: when to look again at the earliest."""

    def enter(self, turn: Turn) -> bool:
        """Whether it may start now; otherwise `turn.go()` is called when it may."""
        now = self._alarm.now()
        with self._lock:
            if self._shut:
                return True
            if not self._waiting and self._has_slot(now):
                self._start(turn)
                return True
            turn.state, turn.since = "waits", now
            self._waiting.append(turn)
            look = not self._looking
            self._looking = True
            if look:
                self._slots.wait(self, True)
        if look:
            self._alarm.at(now + LOOK_S, self._look)
        return False

    def withdraw(self, turn: Turn) -> bool:
        """It does not wait any more; False if it does not wait."""
        with self._lock:
            if turn.state != "waits":
                return False
            turn.state = ""
            self._waiting.remove(turn)
            return True

    def leave(self, turn: Turn) -> None:
        """It has ended, or will not start."""
        with self._lock:
            if turn.state == "waits":
                self._waiting.remove(turn)
            elif turn.state == "counts":
                self._counting -= 1
                self._give_back_if_over(self._alarm.now())
            turn.state = ""

    def shut(self) -> None:
        """The engine closes: nothing waits any more."""
        with self._lock:
            self._shut = True
            going = list(self._waiting)
            self._waiting.clear()
            for turn in going:
                turn.state = ""
        for turn in going:
            turn.go()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def _look(self) -> None:
        """See whether there is a slot for those that wait, or they have waited long enough."""
        now = self._alarm.now()
        going: list[Turn] = []
        with self._lock:
            while self._waiting:
                turn = self._waiting[0]
                if self._has_slot(now):
                    self._start(turn)
                elif now - turn.since >= self._promotion:
                    turn.state = ""
                else:
                    break
                going.append(self._waiting.popleft())
            self._looking = bool(self._waiting)
            if not self._looking:
                self._slots.wait(self, False)
            again = self._looking
        if again:
            self._alarm.at(now + LOOK_S, self._look)
        for turn in going:
            turn.go()

    def _has_slot(self, now: float) -> bool:
        """Whether one more may start: there is a slot, whose time is not over or for which nobody waits."""
        if self._slot is None:
            if now < self._not_before:
                return False
            self._slot = self._slots.take(self, self._count)
            if self._slot is None:
                return False
            if now - self._given_back >= REST_S:  # else it goes on with what it had
                self._since = now
        if now - self._since < self._quantum or not self._slots.others_wait(self):
            return True
        self._give_back_if_over(now)
        return False

    def _start(self, turn: Turn) -> None:
        turn.state = "counts"
        self._counting += 1

    def _give_back_if_over(self, now: float) -> None:
        """Give the slot back when nothing is under way; for a while, if its time is over and others wait."""
        if self._counting or self._slot is None:
            return
        if now - self._since >= self._quantum and self._slots.others_wait(self):
            self._not_before = now + REST_S
        self._given_back = now
        slot, self._slot = self._slot, None
        self._slots.give_back(slot)
