"""Counters by transport and by peer."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from tent_core.deadlines import Deadlines


@dataclass(slots=True)
class Counters:
    """What one transport carried for one peer. Guarded by the lock of the `Stats` that made it."""

    bytes: int = 0
    tasks: int = 0
    failures: int = 0
    causes: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, object]:
        """For `engine.stats()`; causes only where there are any."""
        known: dict[str, object] = {
            "bytes": self.bytes,
            "tasks": self.tasks,
            "failures": self.failures,
        }
        if self.causes:
            known["causes"] = dict(self.causes)
        return known


class Stats:
    """Counters of one engine. Totals per transport outlive the peers they were earned with. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, Counters] = {}
        self.failovers = 0
        self.deadlines = Deadlines()
        self.surplus_reports = 0

    def count(
        self,
        name: str,
        peer: dict[str, Counters],
        tasks: int,
        moved: int,
        failed: int,
        cause: str | None,
    ) -> bool:
        """Add the outcome of one sub-batch; True when it is the first that `name` carried for this peer."""
        with self._lock:
            mine = peer.get(name)
            first = mine is None
            if mine is None:
                mine = peer[name] = Counters()
            total = self._totals.get(name)
            if total is None:
                total = self._totals[name] = Counters()
            for counters in (mine, total):
                counters.bytes += moved
                counters.tasks += tasks
                if failed:
                    counters.failures += failed
                    counters.causes[cause or "unknown"] += failed
        return first

    def count_failover(self, tasks: int) -> None:
        """`tasks` tasks were moved to another transport."""
        with self._lock:
            self.failovers += tasks

    def count_surplus(self, reports: int) -> None:
        """A transport reported requests a second time."""
        with self._lock:
            self.surplus_reports += reports

    def totals(self) -> dict[str, dict[str, object]]:
        """Per transport."""
        with self._lock:
            return {name: counters.as_dict() for name, counters in self._totals.items()}

    def of_peer(self, peer: dict[str, Counters]) -> dict[str, dict[str, object]]:
        """Per transport, for one peer."""
        with self._lock:
            return {name: counters.as_dict() for name, counters in peer.items()}
