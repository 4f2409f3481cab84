"""What the fake counts: what is alive, what was made and closed, and the work that went through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Literal

Kind = Literal["device", "registration", "channel", "completion_queue", "queue_pair"]


@dataclass
class Counts:
    """Counts of one NIC, or the sum over all.

    `made`, `closed` and `closed_again` are by `Kind`; the last counts calls of `close` on what was closed
    already. `calls` is by operation and includes those that failed. `posted` counts work requests other than
    receives, `signalled` those of them that ask for a completion, `polled` completions taken, `moved` bytes,
    `overflows` completions lost for want of room.
    """

    made: Counter[str] = field(default_factory=Counter)
    closed: Counter[str] = field(default_factory=Counter)
    closed_again: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    pinned: int = 0
    """Bytes registered now; memory registered twice counts twice."""
    posts: int = 0
    posted: int = 0
    signalled: int = 0
    receives: int = 0
    polls: int = 0
    polled: int = 0
    moved: int = 0
    overflows: int = 0

    def alive(self, kind: Kind) -> int:
        """How many of a kind exist now."""
        return self.made[kind] - self.closed[kind]

    @property
    def live(self) -> dict[Kind, int]:
        """How many of each kind exist now; for comparing before and after."""
        kinds: tuple[Kind, ...] = (
            "device",
            "registration",
            "channel",
            "completion_queue",
            "queue_pair",
        )
        return {kind: self.alive(kind) for kind in kinds}

    @classmethod
    def total(cls, parts: Iterable[Counts]) -> Counts:
        """The sum, which no longer changes."""
        found = cls()
        for part in parts:
            for each in fields(cls):
                value = getattr(found, each.name) + getattr(part, each.name)
                setattr(found, each.name, value)
        return found
