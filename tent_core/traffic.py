"""What is under way to one peer on each transport, who waits for room there, and how the transports do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from tent_core.admission import Admission, Rules, Ticket
from tent_core.alarm import Alarm
from tent_core.health import Health, HealthRules
from tent_core.pace import Pace


class Traffic:
    """Thread-safe; its lock is a leaf, and tickets are told without it."""

    def __init__(self, admission: Rules, health: HealthRules, alarm: Alarm) -> None:
        self._rules = admission
        self._alarm = alarm
        self._lock = threading.Lock()
        self._health = Health(health)
        self.troubled = False
        """Whether any transport has failed lately: without that there is nothing to order."""
        self._gates: dict[str, Admission] = {}
        self._paces: dict[str, Pace] = {}
        self.pacing = False
        """Whether anybody has asked how long something takes: what nobody asks for is not measured."""
        self._armed: dict[str, float] = {}
        """When the alarm looks after a gate; there is one alarm for each, however many wait."""
        self._resting: set[Callable[[], None]] = set()

    # ---------------------------------------------------------------- health

    def order(self, names: Sequence[str]) -> tuple[str, ...]:
        """Candidates, with those that have been failing last."""
        with self._lock:
            return self._health.order(names, self._alarm.now())

    def failed(self, name: str) -> float | None:
        """An attempt failed through the transport's fault; seconds of the pause that this began, if any."""
        with self._lock:
            self.troubled = True
            return self._health.failed(name, self._alarm.now())

    def succeeded(self, name: str) -> None:
        """A sub-batch was carried. Without trouble there is nothing to tell."""
        with self._lock:
            self._health.succeeded(name, self._alarm.now())
            self.troubled = self._health.troubled

    def paused(self) -> dict[str, float]:
        """Seconds that each paused transport has still to wait."""
        with self._lock:
            return self._health.paused(self._alarm.now())

    # ---------------------------------------------------------------- rests

    def rest(self, seconds: float, go: Callable[[], None]) -> None:
        """Call `go` in so many seconds, or when the peer departs before: it may be called twice."""
        with self._lock:
            self._resting.add(go)
        self._alarm.at(self._alarm.now() + seconds, partial(self._rested, go))

    def _rested(self, go: Callable[[], None]) -> None:
        with self._lock:
            self._resting.discard(go)
        go()

    def departed(self) -> None:
        """The peer has departed: nobody rests any longer."""
        with self._lock:
            resting, self._resting = self._resting, set()
        for go in resting:
            go()

    # ---------------------------------------------------------------- pace

    def began(self, name: str, size: int) -> None:
        """`size` bytes were submitted, BULK or more."""
        with self._lock:
            pace = self._paces.get(name)
            if pace is None:
                pace = self._paces[name] = Pace()
            pace.began(size)

    def ended(self, name: str, size: int, moved: int, began: float) -> None:
        """They have ended; `moved` of them arrived since `began`."""
        with self._lock:
            self._paces[name].ended(size, moved, began, self._alarm.now())

    def seconds_for(self, name: str, size: int, *, in_line: bool) -> float | None:
        """How long `size` bytes should take behind those that are under way, and, `in_line`, behind those
        that wait for room; None while no rate is known."""
        self.pacing = True
        with self._lock:
            pace = self._paces.get(name)
            rate = pace.rate if pace is not None else None
            if pace is None or rate is None:
                return None
            gate = self._gates.get(name)
            waiting = gate.waiting_bytes if in_line and gate is not None else 0
            return (pace.under_way + waiting + size) / rate

    # ---------------------------------------------------------------- admission

    def enter(self, name: str, ticket: Ticket) -> bool:
        """Whether the entry may start now; otherwise `ticket.go()` is called when it may, or when its
        deadline has passed."""
        now = self._alarm.now()
        with self._lock:
            gate = self._gates.get(name)
            if gate is None:
                gate = self._gates[name] = Admission(self._rules)
            if gate.enter(ticket, now):
                return True
            when = self._to_arm(name, gate)
        self._arm(name, when)
        return False

    def leave(self, name: str, ticket: Ticket) -> None:
        """An admitted entry has ended: let others start."""
        with self._lock:
            going = self._gates[name].leave(ticket, self._alarm.now())
        for other in going:
            other.go()

    def withdraw(self, name: str, ticket: Ticket) -> bool:
        """It does not wait any more; False if it does not wait, but was admitted."""
        with self._lock:
            return self._gates[name].withdraw(ticket)

    def waiting(self) -> dict[str, int]:
        """How many wait, by transport."""
        with self._lock:
            return {name: gate.waiting for name, gate in self._gates.items() if gate.waiting}

    def _to_arm(self, name: str, gate: Admission) -> float | None:
        """When to look after the gate, unless an alarm does so early enough. With the lock held."""
        when = gate.next_due()
        if when is None or when >= self._armed.get(name, float("inf")):
            return None
        self._armed[name] = when
        return when

    def _arm(self, name: str, when: float | None) -> None:
        if when is not None:
            self._alarm.at(when, partial(self._look_after, name, when))

    def _look_after(self, name: str, armed: float) -> None:
        """Promotions and deadlines of those that wait."""
        with self._lock:
            if self._armed.get(name) != armed:
                return  # an earlier alarm was set later, and has looked or will
            del self._armed[name]
            gate = self._gates[name]
            going = gate.due(self._alarm.now())
            when = self._to_arm(name, gate)
        self._arm(name, when)
        for ticket in going:
            ticket.go()
