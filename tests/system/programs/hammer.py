"""Run by a peer: hits one buffer in every way, with a thread for each, and keeps what each call raised."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

import tent_core as tent

SIZE = 4 << 20
BLOCK = 4096
BLOCKS = 1000
PATTERN = 0xEE  # what owners fill their memory with; it must never be read, and is never written


class Hammer:
    """Writes and reads a buffer of SIZE bytes until told to rest, also after the calls began to fail."""

    def __init__(self, engine: tent.Engine, segment_name: str) -> None:
        self.segment = engine.open_segment(segment_name)
        noise = np.random.default_rng(1).integers(1, 200, SIZE, np.uint8)
        self.source = engine.register(noise)
        self.sink = engine.register(np.zeros(SIZE, np.uint8))
        self.rng = np.random.default_rng(2)
        self.offsets = self.rng.permutation(BLOCKS) * BLOCK
        self.threads: list[threading.Thread] = []

    def aim(self, name: str, timeout: float = 10.0) -> None:
        """Start to hit the buffer `name`; returns when every way has hit it."""
        remote = self.segment.buffer(name)
        prepared = self.segment.prepare("write", self.source, remote)
        ways: dict[str, Callable[[], object]] = {
            "single": lambda: self.single(remote),
            "prepared": prepared.run,
            "batch": lambda: self.batch(remote),
            "read": lambda: self.read(remote),
        }
        self.resting = threading.Event()
        self.completed: Counter[str] = Counter()
        self.raised: Counter[tuple[str, str, str]] = Counter()
        self.pattern_read = 0
        self.threads = [threading.Thread(target=self.repeat, args=way) for way in ways.items()]
        for thread in self.threads:
            thread.start()
        end = time.monotonic() + timeout
        while len(self.completed) < len(ways):
            if self.raised or time.monotonic() > end:
                raise AssertionError(f"completed {self.completed}, raised {self.raised}")
            time.sleep(0.0005)

    def repeat(self, way: str, call: Callable[[], object]) -> None:
        while not self.resting.is_set():
            try:
                call()
                self.completed[way] += 1
            except Exception as error:
                self.raised[(way, type(error).__name__, str(error))] += 1
                time.sleep(0.0002)

    def single(self, remote: Any) -> None:
        start, stop = sorted(self.rng.integers(0, SIZE // 64, 2) * 64)
        if start < stop:
            self.segment.write(self.source[start:stop], remote[start:stop])

    def batch(self, remote: Any) -> None:
        self.segment.write_many(self.source, self.offsets, remote, self.offsets, BLOCK)

    def read(self, remote: Any) -> None:
        try:
            self.segment.read_many(self.sink, self.offsets, remote, self.offsets, BLOCK)
        finally:
            self.pattern_read += int(np.count_nonzero(self.sink.array == PATTERN))

    def rest(self) -> dict[str, Any]:
        """Stop, and answer what happened: calls completed by way, errors raised with their number.

        Called when the owner has taken the buffer away: every way gets the time to find that out.
        """
        end = time.monotonic() + 10
        while {way for way, *_ in self.raised.copy()} != set(
            self.completed
        ) and time.monotonic() < end:
            time.sleep(0.001)
        self.resting.set()
        for thread in self.threads:
            thread.join(30)
        return {
            "completed": dict(self.completed),
            "raised": dict(self.raised),
            "pattern_read": self.pattern_read,
            "running": sum(thread.is_alive() for thread in self.threads),
        }
