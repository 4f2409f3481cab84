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


class Tally:
    """Calls of one request that ended well and are not in the counters yet. `calls` is its owner's to raise;
    `over` says that it will not be raised any more."""

    __slots__ = ("calls", "counted", "counters", "over", "size")

    def __init__(self, counters: tuple[Counters, Counters], size: int) -> None:
        self.counters = counters
        self.size = size
        self.calls = 0
        self.counted = 0
        self.over = False


class Stats:
    """Counters of one engine. Totals per transport outlive the peers they were earned with. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, Counters] = {}
        self._tallies: list[Tally] = []
        self._sweep_at = 64
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
            first = name not in peer
            for counters in self._counters(name, peer):
                counters.bytes += moved
                counters.tasks += tasks
                if failed:
                    counters.failures += failed
                    counters.causes[cause or "unknown"] += failed
        return first

    def tally(self, name: str, peer: dict[str, Counters], size: int) -> Tally:
        """What counts calls of one request of `size` bytes over `name`: whoever has it adds them up, and they
        are taken into the counters when those are read."""
        with self._lock:
            if len(self._tallies) >= self._sweep_at:
                self._take_tallies()
                self._sweep_at = 64 + 2 * len(self._tallies)
            tally = Tally(self._counters(name, peer), size)
            self._tallies.append(tally)
            return tally

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
            self._take_tallies()
            return {name: counters.as_dict() for name, counters in self._totals.items()}

    def of_peer(self, peer: dict[str, Counters]) -> dict[str, dict[str, object]]:
        """Per transport, for one peer."""
        with self._lock:
            self._take_tallies()
            return {name: counters.as_dict() for name, counters in peer.items()}

    def _counters(self, name: str, peer: dict[str, Counters]) -> tuple[Counters, Counters]:
        mine = peer.get(name)
        if mine is None:
            mine = peer[name] = Counters()
        total = self._totals.get(name)
        if total is None:
            total = self._totals[name] = Counters()
        return mine, total

    def _take_tallies(self) -> None:
        for tally in self._tallies:
            over, calls = tally.over, tally.calls  # in this order: nothing is added once it is over
            for counters in tally.counters:
                counters.tasks += calls - tally.counted
                counters.bytes += (calls - tally.counted) * tally.size
            tally.counted = calls if not over else -1
        self._tallies = [tally for tally in self._tallies if tally.counted >= 0]
