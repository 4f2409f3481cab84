"""Run by a peer: writes all of a buffer of an owner again and again, until the process is killed."""

from __future__ import annotations

import threading

import numpy as np

import tent_core as tent


def flood(engine: tent.Engine, owner: str, name: str) -> None:
    """Start to write all of the buffer `name` of the segment `owner`."""
    segment = engine.open_segment(owner)
    remote = segment.buffer(name)
    local = engine.register(np.ones(remote.length, np.uint8))

    def write() -> None:
        while True:
            segment.write(local, remote)

    threading.Thread(target=write, daemon=True).start()
