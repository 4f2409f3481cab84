"""What a replay says of itself when it is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class Tally:
    """Counts while a replay runs. `latencies_s` has one entry per request that sent something."""

    requests: int = 0
    blocks_sent: int = 0
    blocks_reused: int = 0
    pieces: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failovers: int = 0
    pieces_checked: int = 0
    mismatches: int = 0
    first_mismatch: str = ""
    latencies_s: list[float] = field(default_factory=list)
    transports: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a replay.

    `seconds` is the time in which blocks were being transferred, and nothing else: not the filling of pages,
    their verification, nor the talk between the two sides. `latency_ms` is, per request that sent something,
    the time from the start of its transfer until the receiver's engine has been notified. `transports` has
    the bytes that each one carried; `failovers` counts the pieces of failed attempts that went on to another.
    `mismatches` counts pieces; `verified` says that every piece that was sent has been checked at the
    receiver, and none was wrong.
    """

    requests: int
    blocks_sent: int
    blocks_reused: int
    pieces: int
    bytes: int
    seconds: float
    latency_p50_ms: float
    latency_p99_ms: float
    transports: Mapping[str, int]
    failovers: int
    verified: bool
    mismatches: int
    first_mismatch: str = ""

    @property
    def gigabytes_per_second(self) -> float:
        """10^9 bytes per second of transfer; 0 if nothing was sent."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """The document that `tent replay --json` prints."""
        return {
            "requests": self.requests,
            "blocks_sent": self.blocks_sent,
            "blocks_reused": self.blocks_reused,
            "pieces": self.pieces,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 6),
            "GBps": round(self.gigabytes_per_second, 3),
            "latency_ms": {
                "p50": round(self.latency_p50_ms, 3),
                "p99": round(self.latency_p99_ms, 3),
            },
            "transports": dict(self.transports),
            "failovers": self.failovers,
            "verified": self.verified,
            "mismatches": self.mismatches,
        }


def summarise(tally: Tally) -> Report:
    """The report of a finished replay."""
    latencies = np.array(tally.latencies_s or [0.0]) * 1e3
    return Report(
        requests=tally.requests,
        blocks_sent=tally.blocks_sent,
        blocks_reused=tally.blocks_reused,
        pieces=tally.pieces,
        bytes=tally.bytes,
        seconds=tally.seconds,
        latency_p50_ms=float(np.percentile(latencies, 50)),
        latency_p99_ms=float(np.percentile(latencies, 99)),
        transports=dict(sorted(tally.transports.items())),
        failovers=tally.failovers,
        verified=tally.mismatches == 0 and tally.pieces_checked == tally.pieces,
        mismatches=tally.mismatches,
        first_mismatch=tally.first_mismatch,
    )
