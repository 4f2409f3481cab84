"""Many engines in one process, for `many_peers.py` and `churn.py`: each is a peer of the same engine."""

from __future__ import annotations

import contextlib
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
        self.served = False
        self.refusals: list[str] = []
        """What was answered when it was not let in, each within `timeout` seconds."""
        self._target = target
        self._timeout = timeout
        self.thread = threading.Thread(target=self._ask, daemon=True)
        self.thread.start()

    def _ask(self) -> None:
        while not self.served:
            try:
                segment = self.engine.open_segment(self._target, timeout=self._timeout)
            except tent.ClosedError:
                return
            except tent.TentError as error:
                self.refusals.append(f"{type(error).__name__}: {error}")
            else:
                self.served = True
                self._stay(segment)

    def _stay(self, segment: tent.Segment) -> None:
        """Write once; then have something pending all the time: a notification that nobody takes."""
        source = self.engine.register(
            np.ones(BLOCK, np.uint8), permission=Permission.LOCAL_READ_WRITE
        )
        with contextlib.suppress(tent.TentError):
            segment.write(source, segment.buffer("pool")[:BLOCK])
            while True:
                with contextlib.suppress(tent.WaitTimeout):
                    segment.notify("still here", timeout=60.0)


class Guests:
    """Several in one process."""

    def __init__(self, config: dict[str, Any], target: str, timeout: float, count: int) -> None:
        self._guests = [Guest(config, target, timeout) for _ in range(count)]

    def state(self) -> tuple[int, list[str]]:
        """How many are in, and the last answer to each of those who are not."""
        out = [guest for guest in self._guests if not guest.served]
        return len(self._guests) - len(out), [g.refusals[-1] for g in out if g.refusals]

    def leave(self, count: int) -> int:
        """Some of those who are in close their engines; how many did."""
        leaving = [guest for guest in self._guests if guest.served][:count]
        for guest in leaving:
            guest.engine.close()
            self._guests.remove(guest)
        return len(leaving)

    def close(self) -> None:
        """All close their engines."""
        while self._guests:
            self._guests.pop().engine.close()
