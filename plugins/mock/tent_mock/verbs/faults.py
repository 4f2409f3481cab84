"""What a test makes fail, and what it makes slow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Operation = Literal[
    "devices",
    "open",
    "port",
    "register",
    "channel",
    "completion_queue",
    "queue_pair",
    "connect",
    "post",
    "post_send",
    "post_receive",
    "to_error",
    "poll",
    "arm",
    "take",
    "next_event",
    "close_device",
    "close_registration",
    "close_channel",
    "close_completion_queue",
    "close_queue_pair",
]

PATIENCE_S = 60.0
"""How long a gate that its test forgot holds up a thread."""


class Gate:
    """Stops every thread that enters an operation until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        """Set as soon as somebody waits at the gate."""
        self._open = threading.Event()

    def open(self) -> None:
        """Let all go, those that come later too."""
        self._open.set()

    def _pass(self) -> None:
        if self._open.is_set():
            return
        self.entered.set()
        if not self._open.wait(PATIENCE_S):
            raise TimeoutError(f"a gate of the fake was not opened within {PATIENCE_S:.0f} s")


@dataclass
class _Rule:
    operation: Operation | None
    nic: str | None
    skip: int
    times: int
    number: int

    def due(self, operation: str, nic: str) -> bool:
        """Count one event, and answer whether it is to fail."""
        mine = self.operation == operation or (self.operation is None and nic != "")
        if self.times <= 0 or not mine or self.nic not in (None, nic):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        return True


class Faults:
    """Failures to come, and limits that were not there before. Every method may be called from any thread."""

    def __init__(self) -> None:
        self.max_registrations: int | None = None
        """Over all NICs; beyond it ENOMEM, as for the two below. May be changed at any time."""
        self.max_pinned: int | None = None
        """Bytes, as the memlock limit counts them: memory registered on two NICs counts twice."""
        self.max_queue_pairs: int | None = None
        self._lock = threading.Lock()
        self._calls: list[_Rule] = []
        self._work: list[_Rule] = []
        self._gates: list[tuple[Operation, str | None, Gate]] = []

    def fail_next(
        self,
        operation: Operation | None,
        number: int,
        *,
        times: int = 1,
        after: int = 0,
        nic: str | None = None,
    ) -> None:
        """Calls of an operation fail with errno `number`: `times` of them, `after` so many that do not.

        Without an operation, calls of any kind on a NIC are meant.
        """
        with self._lock:
            self._calls.append(_Rule(operation, nic, after, times, number))

    def fail_work(
        self, status: int, *, times: int = 1, after: int = 0, nic: str | None = None
    ) -> None:
        """Work requests that `nic` carries out next, `after` so many, end with `status` and move nothing."""
        with self._lock:
            self._work.append(_Rule(None, nic, after, times, status))

    def gate(self, operation: Operation, *, nic: str | None = None) -> Gate:
        """Calls of an operation wait from now on: slow teardown, or a race that a test brings about."""
        made = Gate()
        with self._lock:
            self._gates.append((operation, nic, made))
        return made

    def clear(self) -> None:
        """Nothing fails any more and all gates open; limits stay."""
        with self._lock:
            self._calls.clear()
            self._work.clear()
            gates, self._gates = self._gates, []
        for _, _, gate in gates:
            gate.open()

    def enter(self, operation: Operation, nic: str, error: Callable[[str, int], Exception]) -> None:
        """Wait at the gates and raise what is due. For the fake, with no lock of it held."""
        with self._lock:
            gates = [g for o, n, g in self._gates if o == operation and n in (None, nic)]
        for gate in gates:
            gate._pass()
        number = self._due(self._calls, operation, nic)
        if number is not None:
            raise error(f"cannot {operation.replace('_', ' ')} on {nic or 'this host'}", number)

    def of_work(self, nic: str) -> int | None:
        """The status with which the work request that begins now is to end, or None."""
        return self._due(self._work, "work", nic)

    def _due(self, rules: list[_Rule], operation: str, nic: str) -> int | None:
        if not rules:
            return None
        with self._lock:
            found = [rule.number for rule in rules if rule.due(operation, nic)]
            rules[:] = [rule for rule in rules if rule.times > 0]
        return found[0] if found else None
