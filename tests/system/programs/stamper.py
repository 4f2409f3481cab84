"""Run by a peer: overwrites buffers with ever larger numbers, with threads of its own for each buffer.

Each thread writes one range again and again, so what is there says which write arrived last.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import tent_core as tent

PAGE = 4096


@dataclass
class Stamps:
    """What one thread knows: the last number that was COMPLETED, when that write began, what was raised."""

    completed: int = 0
    began: float = 0.0
    raised: Counter[str] = field(default_factory=Counter)


class Stamper:
    """For each buffer: small writes to its first page, large ones to the rest, until told to stop."""

    def __init__(self, engine: tent.Engine, segment_name: str) -> None:
        self.engine = engine
        self.segment = engine.open_segment(segment_name)

    def aim(self, names: list[str], timeout: float = 10.0) -> None:
        """Start to write; returns when every thread has completed a write."""
        self.stopping = threading.Event()
        self.stamps = {(name, size): Stamps() for name in names for size in ("small", "large")}
        self.threads = [
            threading.Thread(target=self.repeat, args=(*key, stamps))
            for key, stamps in self.stamps.items()
        ]
        for thread in self.threads:
            thread.start()
        end = time.monotonic() + timeout
        while not all(stamps.completed for stamps in self.stamps.values()):
            if time.monotonic() > end:
                raise AssertionError(f"not every write completes: {self.stamps}")
            time.sleep(0.0005)

    def repeat(self, name: str, size: str, stamps: Stamps) -> None:
        remote = self.segment.buffer(name)
        there = remote[:PAGE] if size == "small" else remote[PAGE:]
        local = self.engine.allocate(there.length)
        numbers = local.array.view(np.uint64)
        number = 0
        while not self.stopping.is_set():
            number += 1
            numbers[:] = number
            began = time.monotonic()
            try:
                self.segment.write(local, there)
                stamps.completed, stamps.began = number, began
            except Exception as error:
                stamps.raised[f"{type(error).__name__}: {error}"] += 1
                time.sleep(0.0002)

    def stop(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Stop, and answer what each thread knows."""
        self.stopping.set()
        for thread in self.threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in self.threads)
        return {
            key: {"completed": s.completed, "began": s.began, "raised": dict(s.raised)}
            for key, s in self.stamps.items()
        }
