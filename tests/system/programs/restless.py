"""Run by a peer: registers and unregisters buffers all the time, and writes to an owner, until it ends."""

from __future__ import annotations

import contextlib
import threading

import numpy as np

import tent_core as tent


def register_for_ever(engine: tent.Engine) -> None:
    """Make a buffer `brief` come and go, so that a snapshot follows the other."""

    def work() -> None:
        with contextlib.suppress(tent.TentError):
            while True:
                engine.allocate(4096, name="brief").unregister()

    threading.Thread(target=work, daemon=True).start()


def write_for_ever(engine: tent.Engine, owner: str, name: str) -> None:
    """Write all of the buffer `name` of that segment; returns once the first write has arrived."""
    segment = engine.open_segment(owner)
    remote = segment.buffer(name)
    local = engine.register(np.ones(remote.length, np.uint8))
    segment.write(local, remote)

    def work() -> None:
        with contextlib.suppress(tent.TentError):
            while True:
                segment.write(local, remote)

    threading.Thread(target=work, daemon=True).start()
