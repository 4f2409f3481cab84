"""What is under way to one peer on each transport, who waits for room there, and how the transports do."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
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
        self._gates: dict[str, Admission] = {}
        self._paces: dict[str, Pace] = {}
        self.pacing = False
        """Whether anybody has asked how long something takes: what nobody asks for is not measured."""

    # ---------------------------------------------------------------- health

    @property
    def troubled(self) -> bool:
        """Whether any transport has failed lately: without that there is nothing to order."""
        return self._health.troubled

    def order(self, names: Sequence[str]) -> tuple[str, ...]:
        """Candidates, with those that have been failing last."""
        with self._lock:
            return self._health.order(names, time.monotonic())

    def failed(self, name: str) -> float | None:
        """An attempt failed through the transport's fault; seconds of the pause that this began, if any."""
        with self._lock:
            return self._health.failed(name, time.monotonic())

    def succeeded(self, name: str) -> None:
        """A sub-batch was carried."""
        if self._health.troubled:
            with self._lock:
                self._health.succeeded(name, time.monotonic())

    def paused(self) -> dict[str, float]:
        """Seconds that each paused transport has still to wait."""
        with self._lock:
            return self._health.paused(time.monotonic())

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
            self._paces[name].ended(size, moved, began, time.monotonic())

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
        """Whether the entry may start now; otherwise `ticket.go()` is called when it may."""
        now = time.monotonic()
        with self._lock:
            gate = self._gates.get(name)
            if gate is None:
                gate = self._gates[name] = Admission(self._rules)
            if gate.enter(ticket, now):
                return True
            first = gate.waiting == 1
            when = gate.next_promotion() if first else None
        if when is not None:
            self._alarm.at(when, partial(self._promote, name))
        return False

    def leave(self, name: str, ticket: Ticket) -> None:
        """An admitted entry has ended: let others start."""
        with self._lock:
            admitted = self._gates[name].leave(ticket, time.monotonic())
        for other in admitted:
            other.go()

    def withdraw(self, name: str, ticket: Ticket) -> bool:
        """It does not wait any more; False if it does not wait, but was admitted."""
        with self._lock:
            return self._gates[name].withdraw(ticket)

    def waiting(self) -> dict[str, int]:
        """How many wait, by transport."""
        with self._lock:
            return {name: gate.waiting for name, gate in self._gates.items() if gate.waiting}

    def _promote(self, name: str) -> None:
        with self._lock:
            gate = self._gates[name]
            admitted = gate.due(time.monotonic())
            when = gate.next_promotion()
        if when is not None:
            self._alarm.at(when, partial(self._promote, name))
        for ticket in admitted:
            ticket.go()
