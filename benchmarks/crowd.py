"""Many engines in one process, for `many_peers.py` and `churn.py`: each is a peer of the same engine."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

import tent_core as tent
from tent_core.types import Permission

BLOCK = 4096


class Crowd:
    """Engines that open one segment, or are opened."""

    def __init__(self, config: dict[str, Any], count: int) -> None:
        self.engines = [tent.Engine(config) for _ in range(count)]
        self._segments: list[tent.Segment] = []

    def offer(self) -> list[str]:
        """Give each a buffer `pool`; the names of their segments."""
        for engine in self.engines:
            engine.allocate(BLOCK, name="pool")
        return [engine.segment_name for engine in self.engines]

    def open(self, target: str) -> None:
        """Have each open that segment and write to its buffer `pool`."""
        for engine in self.engines:
            source = engine.register(
                np.ones(BLOCK, np.uint8), permission=Permission.LOCAL_READ_WRITE
            )
            segment = engine.open_segment(target)
            segment.write(source, segment.buffer("pool")[:BLOCK])
            self._segments.append(segment)

    def close(self) -> float:
        """Close all at once; the seconds that it took."""
        began = time.monotonic()
        threads = [threading.Thread(target=engine.close) for engine in self.engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic() - began


class Guest:
    """One engine that asks to be let in, from a thread of its own, and stays busy once it is."""

    def __init__(self, config: dict[str, Any], target: str, timeout: float) -> None:
        self.engine = tent.Engine(config)
        self._target = target
        self._timeout = timeout
        self.refused: list[str] = []
        self.served_at: float | None = None
        threading.Thread(target=self._ask, daemon=True).start()

    def _ask(self) -> None:
        while self.served_at is None:
            try:
                segment = self.engine.open_segment(self._target, timeout=self._timeout)
            except tent.TentError as error:
                self.refused.append(f"{type(error).__name__}: {error}")
                continue
            self.served_at = time.monotonic()
            self._stay(segment)

    def _stay(self, segment: tent.Segment) -> None:
        """Have something pending all the time: a notification that nobody takes."""
        while True:
            try:
                segment.notify("still here", timeout=60.0)
            except tent.WaitTimeout:
                continue
            except tent.TentError:
                return
