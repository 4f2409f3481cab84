"""Run by a peer: comes to an engine, writes, reads back, notifies."""

from __future__ import annotations

import numpy as np

import tent_core as tent


def visit(engine: tent.Engine, owner: str, name: str, value: int) -> int:
    """Fill the buffer `name` of the segment `owner` with `value`; how many bytes of it come back as that."""
    segment = engine.open_segment(owner)
    remote = segment.buffer(name)
    local = engine.allocate(remote.length)
    local.array[:] = value
    offsets = np.arange(remote.length // 4096) * 4096
    back = engine.register(np.zeros(remote.length, np.uint8))
    for transport in ("shm", "tcp"):
        segment.write_many(local, offsets, remote, offsets, 4096, transport=transport)
        segment.read(back, remote, transport=transport)
    segment.notify("visited", bytes([value]))
    return int((back.array == value).sum())
