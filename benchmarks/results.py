"""What `compare.py` found: the times of every process that ran, and what is read from them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

IDLE = "idle"
STATES = (IDLE, "target", "initiator", "both")
"""Where a Python thread computes without pause, beside what is measured; nowhere, when idle."""

TWO_KINDS = 1.6
"""A gap this large between neighbouring processes' times makes two kinds of them."""

FAST, SLOW = "fast kind", "slow kind"
MIXED = ("nixl", "nixl-prepped")
"""Peers whose processes come in two kinds, by what UCX finds best when they start."""


class Case(NamedTuple):
    """One thing that every contender does."""

    op: str
    block: int
    batch: int

    @property
    def key(self) -> str:
        """As it stands in a saved result."""
        return f"{self.op} {self.block}x{self.batch}"

    @property
    def what(self) -> str:
        """The same for people, without the operation."""
        size = f"{self.block >> 20} MiB" if self.block >= 1 << 20 else f"{self.block >> 10} KiB"
        return f"{self.batch:,} x {size}"


TELLS = (Case("write", 4096, 1000), Case("read", 4096, 1000))
"""By the first of these that was measured, processes of a contender are told apart."""


def parse(key: str) -> Case:
    """A case from its key."""
    op, _, rest = key.partition(" ")
    block, _, batch = rest.partition("x")
    return Case(op, int(block), int(batch))


class Spread(NamedTuple):
    """Microseconds of a call: the median of several processes' medians, and the lowest and highest."""

    median: float
    lowest: float
    highest: float
    processes: int


@dataclass(slots=True)
class Run:
    """One process of a contender: the median microseconds of each case, by its key."""

    contender: str
    state: str
    round: int
    us: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Result:
    """All processes of one run of the comparison, the machine, and who could not be measured and why."""

    machine: dict[str, str]
    seconds: float
    rounds: int
    runs: list[Run] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """A document that `of_json` reads."""
        return asdict(self)

    def states(self) -> list[str]:
        """Those in which something was measured."""
        return [state for state in STATES if any(run.state == state for run in self.runs)]

    def cases(self) -> list[Case]:
        """What was measured, in order, writes first."""
        return [parse(key) for key in dict.fromkeys(key for run in self.runs for key in run.us)]

    def of(self, contender: str, state: str) -> list[Run]:
        """The processes of a contender."""
        return [run for run in self.runs if (run.contender, run.state) == (contender, state)]

    def kinds(self, contender: str, state: str = IDLE) -> dict[str, list[Run]]:
        """The processes of the kinds FAST and SLOW, if nixl's come in two here; else nothing."""
        return two_kinds(self.of(contender, state)) if contender in MIXED else {}

    def spread(
        self, contender: str, case: Case, state: str = IDLE, kind: str | None = None
    ) -> Spread | None:
        """The times of a contender, or of its processes of one kind."""
        runs = self.kinds(contender, state)[kind] if kind else self.of(contender, state)
        times = sorted(run.us[case.key] for run in runs if case.key in run.us)
        if not times:
            return None
        return Spread(statistics.median(times), times[0], times[-1], len(times))


def of_json(document: Mapping[str, Any]) -> Result:
    """A result from a saved document."""
    return Result(**{**document, "runs": [Run(**run) for run in document["runs"]]})


def two_kinds(runs: list[Run]) -> dict[str, list[Run]]:
    """Processes of one contender as those of a fast and a slow kind, or nothing if there is only one."""
    for case in TELLS:
        ordered = sorted((r for r in runs if case.key in r.us), key=lambda r: r.us[case.key])
        gaps = [high.us[case.key] / low.us[case.key] for low, high in itertools.pairwise(ordered)]
        if gaps:
            cut = gaps.index(max(gaps)) + 1
            return {FAST: ordered[:cut], SLOW: ordered[cut:]} if max(gaps) >= TWO_KINDS else {}
    return {}
