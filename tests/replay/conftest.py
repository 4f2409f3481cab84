"""Two engines that exist only in this process, so that the roles of a replay run without any transport."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tent_core.control.contract import Notification
from tent_core.descriptor import PeerKey
from tent_core.errors import UnknownSegment, WaitTimeout


@dataclass
class FakeBuffer:
    name: str
    array: np.ndarray[Any, np.dtype[np.uint8]]


@dataclass
class FakeBatch:
    moved: int

    def transports(self) -> dict[str, int]:
        return {"fake": self.moved}


@dataclass
class FakeSegment:
    """Copies bytes row by row, unless the owner is `deaf`; its `spoil` may change what has been written."""

    sender: FakeEngine
    owner: FakeEngine

    @property
    def descriptor(self) -> SimpleNamespace:
        return SimpleNamespace(key=self.owner.key)

    def buffer(self, name: str) -> FakeBuffer:
        return self.owner.buffers[name]

    def notify(self, name: str, payload: bytes = b"", timeout: float | None = None) -> None:
        assert len(name) + len(payload) <= 65_472
        self.owner.notes.put(Notification(self.sender.key, name, payload, 0))

    def write_many(
        self,
        local: FakeBuffer,
        here: Any,
        remote: FakeBuffer,
        there: Any,
        length: Any,
        timeout: float,
    ) -> FakeBatch:
        size = int(length)
        self.sender.sent(here, there)
        for source, target in zip(here.tolist(), there.tolist(), strict=True):
            if self.owner.deaf:
                break
            remote.array[target : target + size] = local.array[source : source + size]
        self.owner.spoil(remote.array, there, size)
        return FakeBatch(size * len(here))

    def __enter__(self) -> FakeSegment:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass
class FakeEngine:
    key: PeerKey
    engines: dict[str, FakeEngine]
    buffers: dict[str, FakeBuffer] = field(default_factory=dict)
    notes: queue.Queue[Notification] = field(default_factory=queue.Queue)
    deaf: bool = False
    failovers: int = 0

    def stats(self) -> dict[str, Any]:
        return {"failovers": self.failovers}

    def allocate(self, size: int, *, name: str) -> FakeBuffer:
        self.buffers[name] = FakeBuffer(name, np.zeros(size, np.uint8))
        return self.buffers[name]

    def open_segment(self, name: str, timeout: float | None = None) -> FakeSegment:
        if name not in self.engines:
            raise UnknownSegment(f"nobody answers at {name}")
        return FakeSegment(self, self.engines[name])

    def next_notification(self, timeout: float | None = None) -> Notification:
        try:
            return self.notes.get(timeout=timeout)
        except queue.Empty:
            raise WaitTimeout("nothing came") from None

    def sent(self, here: Any, there: Any) -> None:
        """Called with the offsets of every write of this engine."""

    def spoil(self, memory: Any, offsets: Any, length: int) -> None:
        """Called after every write into this engine's memory."""


@pytest.fixture
def engines() -> tuple[FakeEngine, FakeEngine]:
    """A prefill and a decode engine that know each other."""
    known: dict[str, FakeEngine] = {}
    for name in ("prefill:1", "decode:2"):
        known[name] = FakeEngine(PeerKey(name, name.encode()), known)
    return known["prefill:1"], known["decode:2"]
