"""One thing that was looked at: what was found, how bad it is, and what to do."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """`info` is a fact, `warn` a limit that some uses hit, `bad` something that will fail."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """`topic` groups findings; `remedy` is empty where there is nothing to do."""

    topic: str
    subject: str
    level: Level
    found: str
    remedy: str = ""
