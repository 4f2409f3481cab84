"""A peer is killed in the middle of a transfer: that fails soon, with a cause, and nothing of it stays."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

import tent_core as tent
from tent_core.testing import Held, wait_until

from .conftest import Make, Start
from .support import held_by_family, often, only, program, soon_no_more_than

LARGE = 32 << 20
BOUND_S = 3.0
ROUNDS = often(2, 50)
MEMORY = ["registered", "allocated"]
TRANSPORTS = ["shm", "tcp"]


def offer(memory: str, name: str, size: int) -> str:
    """Source that makes a buffer in another process."""
    if memory == "allocated":
        return f"{name} = engine.allocate({size}, name='{name}')"
    return f"{name} = engine.register(np.ones({size}, np.uint8), name='{name}')"


def held_once_released(before: Held | None) -> Held:
    """What is held now, which soon is no more than after the peer before; the first one warms up."""
    if before is not None:
        soon_no_more_than(before, BOUND_S)
    return held_by_family()


class Flood:
    """A thread that keeps several transfers under way until one raises."""

    def __init__(self, segment: tent.Segment, opcode: str, local: tent.Buffer, remote: Any) -> None:
        self.completed = 0
        self.last_began = 0.0
        self.error: Exception | None = None
        self._submit = partial(segment.submit, opcode, local, [0], remote, [0], LARGE)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_until(lambda: self.completed or self.error, 30, "the first transfer")

    def _run(self) -> None:
        try:
            while True:
                began = time.monotonic()
                batches = [self._submit() for _ in range(3)]
                for batch in batches:
                    batch.wait(30)
                    self.completed, self.last_began = self.completed + 1, began
        except Exception as error:
            self.error = error

    def ends(self, timeout: float) -> str:
        """The error that ends it within `timeout` seconds."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"no error within {timeout} s"
        return f"{type(self.error).__name__}: {self.error}"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("opcode", ["write", "read"])
def test_a_transfer_to_a_peer_that_is_killed_fails_soon_with_a_cause(
    make: Make, start: Start, opcode: str, transport: str
) -> None:
    here = make(only(transport))
    local = here.allocate(LARGE)
    before = None
    for i in range(ROUNDS):
        peer = start(only(transport))
        peer.run(offer(MEMORY[i % 2], "target", LARGE))
        segment = here.open_segment(peer.segment_name)
        remote = segment.buffer("target")
        flood = Flood(segment, opcode, local, remote)
        peer.kill()
        killed = time.monotonic()
        error = flood.ends(BOUND_S)
        assert error.startswith(("TransferFailed", "PeerDeparted"))
        assert peer.segment_name in error
        assert flood.last_began < killed
        _departs(segment, remote, local)
        before = held_once_released(before)


def _departs(segment: tent.Segment, remote: Any, local: tent.Buffer) -> None:
    """Soon every call says that the peer has departed."""

    def departed() -> bool:
        try:
            segment.write(local[:64], remote[:64])
        except tent.PeerDeparted:
            return True
        except tent.TransferFailed:
            return False
        raise AssertionError("a write to a process that has ended was called completed")

    wait_until(departed, BOUND_S)
    with pytest.raises(tent.PeerDeparted):
        segment.notify("late")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_target_of_an_initiator_that_is_killed_keeps_nothing_of_it(
    make: Make, start: Start, transport: str
) -> None:
    here = make(only(transport))
    targets = [here.register(np.zeros(LARGE, np.uint8)), here.allocate(LARGE)]
    before = None
    for i in range(ROUNDS):
        target = targets[i % 2]
        target.array[:] = 0
        peer = start(only(transport))
        peer.run(program("flood"))
        peer.run("flood(engine, owner, name)", owner=here.segment_name, name=target.name)
        wait_until(lambda array=target.array: array[-1], 20, "the first write")
        killed = time.monotonic()
        peer.kill()
        wait_until(lambda: here.stats()["sessions"] == 0, BOUND_S, "the departure")
        assert time.monotonic() - killed < BOUND_S
        wait_until(lambda: _idle(here, transport), BOUND_S, "its streams to be closed")
        before = held_once_released(before)
    for target in targets:
        target.unregister(timeout=5)


def _idle(engine: tent.Engine, transport: str) -> bool:
    holdings = engine.stats()["transports"][transport]["holdings"]
    return not holdings.get("streams", 0)


def test_a_copy_into_mapped_memory_whose_owner_is_killed_is_not_called_completed(
    make: Make, start: Start
) -> None:
    here = make(only("shm"))
    local = here.allocate(4 * LARGE)
    failed = 0
    for _ in range(ROUNDS):
        peer = start(only("shm"))
        peer.run(offer("allocated", "target", 4 * LARGE))
        with here.open_segment(peer.segment_name) as segment:
            remote = segment.buffer("target")
            segment.write(local[:64], remote[:64])
            batch = segment.submit("write", local, [0], remote, [0], 4 * LARGE)
            ended: list[float] = []
            batch.add_done_callback(lambda _, ended=ended: ended.append(time.monotonic()))
            peer.kill()
            killed = time.monotonic()
            batch.wait(BOUND_S, check=False)
            assert batch.status[0] == tent.Status.FAILED or ended[0] < killed
            failed += batch.status[0] == tent.Status.FAILED
    assert failed, "every kill came after its copy"
