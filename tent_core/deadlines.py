"""What became of transfers that were given a deadline: how much of their time they used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tent_core.types import Priority, Status

if TYPE_CHECKING:
    from tent_core.batch import Batch


@dataclass(slots=True)
class _Record:
    count: int = 0
    done: int = 0
    total: float = 0.0
    largest: float = 0.0
    missed: int = 0
    infeasible: int = 0


class Deadlines:
    """Counters by priority, of batches that were given a timeout or a deadline. Thread-safe; a leaf."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[Priority, _Record] = {}

    def follow(
        self, batch: Batch, priority: Priority, deadline: float, now: Callable[[], float]
    ) -> Clock:
        """A mark whose end, that of the data, is recorded. `now` is the clock that `deadline` is on."""
        return Clock(self, batch, priority, deadline, now)

    def infeasible(self, priority: Priority) -> None:
        """One was submitted that could not be expected to end in time."""
        with self._lock:
            self._of(priority).infeasible += 1

    def ended(self, priority: Priority, ratio: float | None) -> None:
        """One has ended, after so much of the time that it was allowed; None: it was not done by then."""
        with self._lock:
            record = self._of(priority)
            record.count += 1
            if ratio is None or ratio > 1.0:
                record.missed += 1
            if ratio is not None:
                record.done += 1
                record.total += ratio
                record.largest = max(record.largest, ratio)

    def as_dict(self) -> dict[str, dict[str, float]]:
        """By name of the priority: `count`, `missed`, `infeasible`, and of the ratio of the time used to the
        time allowed its `mean` and `max`, over those that were done."""
        with self._lock:
            return {
                priority.name.lower(): {
                    "count": record.count,
                    "missed": record.missed,
                    "infeasible": record.infeasible,
                    "mean": record.total / record.done if record.done else 0.0,
                    "max": record.largest,
                }
                for priority, record in sorted(self._records.items())
            }

    def _of(self, priority: Priority) -> _Record:
        return self._records.setdefault(priority, _Record())


class Clock:
    """The use that a batch has of its time; ends with its data, as its uses of buffers do."""

    __slots__ = ("_batch", "_began", "_deadline", "_now", "_priority", "_to")

    def __init__(
        self,
        to: Deadlines,
        batch: Batch,
        priority: Priority,
        deadline: float,
        now: Callable[[], float],
    ) -> None:
        self._to = to
        self._batch = batch
        self._priority = priority
        self._deadline = deadline
        self._now = now
        self._began = now()

    def end(self) -> None:
        """Record it, unless the batch failed or was cancelled: that says nothing about time."""
        statuses = set(self._batch.status.tolist())
        if Status.TIMEOUT in statuses:
            self._to.ended(self._priority, None)
        elif statuses <= {Status.COMPLETED}:
            allowed = self._deadline - self._began
            used = self._now() - self._began
            self._to.ended(self._priority, used / allowed if allowed > 0.0 else None)
