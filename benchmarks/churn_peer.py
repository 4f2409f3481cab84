"""What a peer of `churn.py` does, in its own process."""

from __future__ import annotations

import itertools
import threading

import numpy as np

import tent_core as tent

POOL = 1 << 20
"""Bytes of the buffer that each side offers."""

BLOCK = 4096


def visit(engine: tent.Engine, target: str, writes_on: bool) -> None:
    """Open that segment, move data both ways, from both kinds of memory, notify; and maybe go on writing."""
    pool = engine.allocate(POOL)
    registered = engine.register(np.arange(POOL, dtype=np.uint8))
    segment = engine.open_segment(target)
    remote = segment.buffer("pool")
    segment.write(registered, remote)
    segment.read(pool, remote)
    offsets = np.arange(0, POOL, BLOCK)
    segment.write_many(pool, offsets, remote, offsets[::-1], BLOCK)
    segment.notify("visited")
    if writes_on:
        threading.Thread(target=write_for_ever, args=(segment, pool), daemon=True).start()


def write_for_ever(segment: tent.Segment, source: tent.Buffer) -> None:
    """Write until that fails."""
    remote = segment.buffer("pool")
    for start in itertools.cycle(range(0, POOL, POOL // 4)):
        piece = slice(start, start + POOL // 4)
        try:
            segment.write(source[piece], remote[piece])
        except tent.TentError:
            return
