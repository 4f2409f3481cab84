"""The peers of `churn.py`: what one process does from its start to its end."""

from __future__ import annotations

import enum
import itertools
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import tent_core as tent

POOL = 1 << 20
"""Bytes of the buffer that each side offers."""

BLOCK = 4096


class End(enum.Enum):
    """How a peer leaves."""

    CLOSE = "close"
    """It closes its engine."""
    KILL = "kill"
    """SIGKILL, while data is moving."""
    STOP = "stop"
    """SIGSTOP, while data is moving, until it has departed by the grace; then SIGKILL."""


@dataclass(frozen=True, slots=True)
class Task:
    """What one peer is to do: open the segment `target`, or with None be opened itself."""

    config: dict[str, Any]
    target: str | None
    end: End


def live(task: Task, driver: Connection) -> None:
    """A peer's whole life. It sends its segment's name when it has been of use, and closes when told."""
    with tent.Engine(task.config) as engine:
        pool = engine.allocate(POOL, name="pool")
        if task.target is None:
            driver.send(engine.segment_name)
            engine.next_notification(30.0)
        else:
            visit(engine, pool, task.target, task.end)
        driver.send(engine.segment_name)
        driver.recv()


def visit(engine: tent.Engine, pool: tent.Buffer, target: str, end: End) -> None:
    """Open the segment, move data both ways, from both kinds of memory, and notify."""
    segment = engine.open_segment(target)
    remote = segment.buffer("pool")
    registered = engine.register(np.arange(POOL, dtype=np.uint8))
    segment.write(registered, remote)
    segment.read(pool, remote)
    offsets = np.arange(0, POOL, BLOCK)
    segment.write_many(pool, offsets, remote, offsets[::-1], BLOCK)
    segment.notify("visited", engine.segment_name.encode())
    if end is not End.CLOSE:
        threading.Thread(target=write_for_ever, args=(segment, pool), daemon=True).start()


def write_for_ever(segment: tent.Segment, pool: tent.Buffer) -> None:
    """Write until that fails."""
    remote = segment.buffer("pool")
    for part in itertools.cycle(range(0, POOL, POOL // 4)):
        piece = slice(part, part + POOL // 4)
        try:
            segment.write(pool[piece], remote[piece])
        except tent.TentError:
            return
