"""Run by a peer: uses an engine as it should be used, again and again, and checks every answer."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

import tent_core as tent

BLOCK, BLOCKS = 4096, 16


class GoodPeer:
    """Writes, reads back, compares and notifies until told to stop."""

    def __init__(self, engine: tent.Engine, segment_name: str, buffer: str) -> None:
        self.segment = engine.open_segment(segment_name)
        self.remote = self.segment.buffer(buffer)
        self.source = engine.allocate(BLOCK * BLOCKS)
        self.sink = engine.allocate(BLOCK * BLOCKS)
        self.rounds = 0
        self.error: str | None = None
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        try:
            rng = np.random.default_rng(4)
            while not self.stopping.is_set():
                self.round(rng)
                self.rounds += 1
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def round(self, rng: np.random.Generator) -> None:
        self.source.array[:] = rng.integers(0, 256, BLOCK * BLOCKS, np.uint8)
        offsets = rng.permutation(BLOCKS) * BLOCK
        self.segment.write_many(self.source, offsets, self.remote, offsets, BLOCK)
        self.segment.read(self.sink, self.remote)
        assert (self.sink.array == self.source.array).all(), "what came back is not what went"
        self.segment.notify("good", str(self.rounds).encode())

    def stop(self) -> dict[str, Any]:
        """Stop, and answer the number of rounds and the error, if any, that ended them."""
        self.stopping.set()
        self.thread.join(30)
        return {"rounds": self.rounds, "error": self.error, "hangs": self.thread.is_alive()}
