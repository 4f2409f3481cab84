"""A buffer is unregistered while a peer hits it in every way: afterwards nobody touches its memory."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import tent_core as tent
from tent_core.testing import wait_until
from tent_core.testing.peers import PeerProcess

from .conftest import Make, Start
from .support import Bytes, changed_bytes, often, only, program

SIZE = 4 << 20
ROUNDS = often(10, 200)
LOOK_S = 0.05
LONG_LOOK_S = often(0.5, 10.0)
SOON_NOTICED: dict[str, Any] = {
    "control": {"keepalive_time_s": 0.2, "keepalive_timeout_s": 0.2},
    "peers": {"grace_s": 0.3},
}


class Owner:
    """An engine here with one buffer at a time, and a peer that hits it."""

    def __init__(self, engine: tent.Engine, peer: PeerProcess) -> None:
        self.engine, self.peer = engine, peer
        self.own = np.zeros(SIZE, np.uint8)
        self.count = 0
        peer.run(program("hammer"))
        peer.run("hammer = Hammer(engine, owner)", owner=engine.segment_name)

    def offer(self, memory: str) -> tuple[tent.Buffer, Bytes]:
        """A new buffer, hit by the peer in every way; registered ones all lie in the same memory."""
        self.count += 1
        name = f"target-{self.count}"
        if memory == "registered":
            self.own[:] = 0  # of the last round's pattern
            buffer = self.engine.register(self.own, name=name)
        else:
            buffer = self.engine.allocate(SIZE, name=name)
        self.peer.run("hammer.aim(name)", name=name)
        return buffer, buffer.array

    def round(self, memory: str, seconds: float) -> dict[str, Any]:
        """Offer, unregister, look for `seconds`: not a byte may change. What the peer says of it."""
        buffer, array = self.offer(memory)
        assert (array != 0).any()
        buffer.unregister()
        assert changed_bytes(array, seconds) == 0
        report: dict[str, Any] = self.peer.run("hammer.rest()")
        return report


def assert_clear(report: dict[str, Any]) -> None:
    """Every way completed calls, then all failed because the owner took the buffer away, and nothing else."""
    assert report["running"] == 0
    assert report["pattern_read"] == 0
    assert set(report["completed"]) == {"single", "prepared", "batch", "read"}
    assert {way for way, *_ in report["raised"]} == set(report["completed"])
    for _, kind, message in report["raised"]:
        assert kind in ("BufferRevoked", "StaleHandle"), message


@pytest.mark.parametrize("memory", ["registered", "allocated"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_not_a_byte_changes_after_unregister_and_the_peer_is_told_why(
    make: Make, start: Start, transport: str, memory: str
) -> None:
    owner = Owner(make(only(transport)), start(only(transport)))
    for _ in range(ROUNDS):
        assert_clear(owner.round(memory, LOOK_S))
    assert_clear(owner.round(memory, LONG_LOOK_S))
    assert owner.engine.buffers() == []


@pytest.mark.parametrize("memory", ["registered", "allocated"])
def test_a_stopped_peer_keeps_a_buffer_from_being_unregistered_until_it_goes_on(
    make: Make, start: Start, memory: str
) -> None:
    owner = Owner(make(only("shm", **SOON_NOTICED)), start(only("shm")))
    buffer, array = owner.offer(memory)
    owner.peer.stop()
    _stays_in_use_past_the_grace(buffer, owner.peer)
    owner.peer.resume()
    buffer.unregister(timeout=10)
    assert changed_bytes(array, LOOK_S) == 0
    assert owner.peer.run("hammer.rest()")["pattern_read"] == 0


@pytest.mark.parametrize("memory", ["registered", "allocated"])
def test_a_stopped_peer_that_is_killed_keeps_nothing(make: Make, start: Start, memory: str) -> None:
    owner = Owner(make(only("shm", **SOON_NOTICED)), start(only("shm")))
    buffer, array = owner.offer(memory)
    owner.peer.stop()
    _stays_in_use_past_the_grace(buffer, owner.peer)
    owner.peer.kill()
    buffer.unregister(timeout=10)
    assert changed_bytes(array, LOOK_S) == 0


def test_a_stopped_peer_that_can_only_come_by_tcp_keeps_nothing(make: Make, start: Start) -> None:
    owner = Owner(make(only("tcp")), start(only("tcp")))
    for memory in ("registered", "allocated"):
        buffer, array = owner.offer(memory)
        owner.peer.stop()
        buffer.unregister(timeout=5)
        assert changed_bytes(array, LOOK_S) == 0
        owner.peer.resume()
        assert changed_bytes(array, LOOK_S) == 0
        assert_clear(owner.peer.run("hammer.rest()"))


def _stays_in_use_past_the_grace(buffer: tent.Buffer, peer: PeerProcess) -> None:
    def holder() -> str:
        with pytest.raises(tent.RevocationTimeout, match=peer.segment_name) as raised:
            buffer.unregister(timeout=0.05)
        (holder,) = raised.value.holders
        return holder

    assert f"pid {peer.pid}" in holder()
    wait_until(lambda: "departed" in holder(), 20, "the peer to be given up")
    began = time.monotonic()
    while time.monotonic() - began < SOON_NOTICED["peers"]["grace_s"]:
        holder()
