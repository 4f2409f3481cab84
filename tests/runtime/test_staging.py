"""Data that no transport moves directly goes through host memory, chunk by chunk.

The device memory is a mock: memory registered at cuda:0, which of all transports only `copy` touches, and
that one stays within its process; `net` moves host memory between engines, and refuses what was not
registered with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tent_core as tent
import tent_mock
from tent_core.plugins import Registry
from tent_core.staging import BUFFER
from tent_core.testing import wait_until
from tent_core.types import MemoryKind, MemoryPair, Priority, Reach, Status

KIB = 1 << 10
SIZE = 256 * KIB
NEVER_S = 30.0
CHUNK = 8 * KIB
GPU, DRAM = MemoryKind.GPU, MemoryKind.DRAM
COPIES = frozenset({MemoryPair(GPU, DRAM), MemoryPair(DRAM, GPU)})


class World:
    """A device buffer `device` here, a host buffer `target` at the peer."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        registry = Registry.of(
            tent_mock.declare("net", 1001, reach=Reach.NETWORK, cancellation=True),
            tent_mock.declare("spare", 1003, reach=Reach.NETWORK, cancellation=True),
            tent_mock.declare(
                "copy", 1002, memory_pairs=COPIES, reach=Reach.PROCESS, cancellation=True
            ),
        )
        base = {
            "transports": {"net": {"enable": True}, "copy": {"enable": True}},
            "policy": [{"name": "any", "transports": ["net", "spare", "copy"]}],
            "staging": {"buffers": 2, "chunk": CHUNK},
            "failover": {"max_attempts": 0},
            "log": {"level": "error"},
        }
        # Both engines are in one process: the peer's buffers are not the copy engine's to touch.
        transports = {"net": {"enable": True}, "copy": {"enable": False}}
        self.there = tent.Engine({**base, "transports": transports}, plugins=registry)
        self.here = tent.Engine({**base, **(config or {})}, plugins=registry)
        self.target = self.there.allocate(SIZE, name="target")
        self.memory = np.random.default_rng(5).integers(0, 256, SIZE, np.uint8)
        self.device = self.here.register(self.memory, name="device", location="cuda:0")
        self.segment = self.here.open_segment(self.there.segment_name)
        self.remote = self.segment.buffer("target")

    def mock(self, name: str) -> tent_mock.Controller:
        return tent_mock.controller(self.here, name)

    def submit(self, opcode: str = "write", length: int = SIZE, **options: Any) -> tent.Batch:
        return self.segment.submit(
            opcode, self.device, np.array([0]), self.remote, np.array([0]), length, **options
        )

    def free(self) -> int:
        return self.here.stager.slots.free

    def close(self) -> None:
        with contextlib.suppress(LookupError):  # closed already
            for name in ("net", "copy"):
                self.mock(name).clear()
                self.mock(name).release()
        self.here.close()
        self.there.close()


Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    worlds: list[World] = []

    def made(config: dict[str, Any] | None = None) -> World:
        worlds.append(World(config))
        return worlds[-1]

    yield made
    for world in worlds:
        world.close()


def statuses(batch: tent.Batch) -> list[Status]:
    return [Status(s) for s in batch.status.tolist()]


def test_a_write_from_device_memory_arrives_through_host_memory(make: Make) -> None:
    world = make()
    world.segment.write(world.device, world.remote)
    assert (world.target.array == world.memory).all()
    assert world.free() == 2


def test_a_read_into_device_memory_arrives_through_host_memory(make: Make) -> None:
    world = make()
    world.target.array[:] = world.memory[::-1]
    world.segment.read(world.device, world.remote)
    assert (world.memory == world.target.array).all()


def test_many_requests_share_chunks_and_end_exactly(make: Make) -> None:
    world = make()
    draw = np.random.default_rng(1)
    at, to = draw.permutation(256)[:40] * KIB, draw.permutation(256)[:40] * KIB
    before = world.mock("net").count("request")
    batch = world.segment.write_many(world.device, at, world.remote, to, 700)
    assert batch.moved.tolist() == [700] * 40
    assert world.mock("net").count("request") - before < 40
    for a, b in zip(at, to, strict=True):
        assert (world.target.array[b : b + 700] == world.memory[a : a + 700]).all()
    assert batch.transports() == {"copy+net": 28_000}


def test_the_copy_and_the_wire_work_at_the_same_time_and_in_bounded_memory(make: Make) -> None:
    world = make()
    world.mock("net").plan("hang")
    batch = world.submit()
    world.mock("net").wait_held(2)
    assert world.free() == 0
    assert world.mock("copy").count("request") == 2
    world.mock("net").release(1)
    world.mock("net").wait_held(2)
    assert world.mock("copy").count("request") == 3
    world.mock("net").clear()
    world.mock("net").release()
    batch.wait(NEVER_S)
    assert (world.target.array == world.memory).all()


@pytest.mark.parametrize("hop", ["copy", "net"])
@pytest.mark.parametrize("opcode", ["write", "read"])
def test_a_request_whose_hop_fails_fails_alone(make: Make, hop: str, opcode: str) -> None:
    world = make()
    world.mock(hop).plan("fail", at=3)
    batch = world.segment.submit(
        opcode,
        world.device,
        np.arange(8) * 8 * KIB,
        world.remote,
        np.arange(8)[::-1] * 8 * KIB,
        CHUNK,
    )
    batch.wait(NEVER_S, check=False)
    failed = [i for i, status in enumerate(statuses(batch)) if status is not Status.COMPLETED]
    assert len(failed) == 1
    assert statuses(batch)[failed[0]] is Status.FAILED
    assert hop in batch.explain_failures()
    assert batch.moved[failed[0]] < CHUNK
    assert world.free() == 2


def test_a_hop_fails_over_like_any_transfer(make: Make) -> None:
    world = make({"failover": {"max_attempts": 3}})
    world.mock("net").plan("fail", at=1)
    batch = world.submit().wait(NEVER_S)
    assert sorted(batch.transports()) == ["copy+net", "copy+spare"]
    assert (world.target.array == world.memory).all()


def test_a_staged_transfer_is_cancelled_and_gives_its_memory_back(make: Make) -> None:
    world = make()
    world.mock("net").plan("hang")
    batch = world.submit()
    world.mock("net").wait_held(2)
    batch.cancel()
    batch.wait(NEVER_S, check=False)
    assert statuses(batch) == [Status.CANCELED]
    wait_until(lambda: world.free() == 2)
    assert world.device.inflight.count == 0


def test_what_waits_for_memory_to_be_staged_in_times_out_at_its_deadline(make: Make) -> None:
    world = make()
    world.mock("net").plan("hang")
    first = world.submit(length=2 * CHUNK)
    world.mock("net").wait_held(2)
    second = world.submit(length=KIB, timeout=0.05)
    second.wait(NEVER_S, check=False)
    assert statuses(second) == [Status.TIMEOUT]
    world.mock("net").clear()
    world.mock("net").release()
    first.wait(NEVER_S)


def test_a_peer_that_departs_ends_what_is_staged_for_it(make: Make) -> None:
    world = make()
    world.mock("net").plan("hang")
    batch = world.submit()
    world.mock("net").wait_held(2)
    world.segment.peer.depart("scripted")
    batch.wait(NEVER_S, check=False)
    assert statuses(batch) == [Status.FAILED]
    wait_until(lambda: world.free() == 2)


def test_low_priority_takes_turns_also_when_it_is_staged(make: Make) -> None:
    world = make()
    batch = world.submit(priority=Priority.LOW)
    batch.wait(NEVER_S)
    assert (world.target.array == world.memory).all()


def test_closing_the_engine_ends_what_is_staged_and_leaves_nothing(make: Make) -> None:
    world = make()
    world.mock("net").plan("hang")
    batch = world.submit()
    world.mock("net").wait_held(2)
    world.here.close()
    assert batch.done
    assert statuses(batch) == [Status.FAILED]
    assert world.free() == 2
    assert world.here.buffers() == []


def test_no_memory_is_taken_before_it_is_needed(make: Make) -> None:
    world = make()
    assert [b.name for b in world.here.buffers()] == ["device"]
    world.submit().wait(NEVER_S)
    staging = next(b for b in world.here.buffers() if b.name == BUFFER)
    assert staging.length == 2 * CHUNK


def test_memory_from_which_a_failed_write_may_still_take_is_not_used_before_its_connection_is_gone(
    make: Make,
) -> None:
    world = make({"failover": {"max_attempts": 3}})
    world.mock("net").plan("fail", at=1, fenced=False)
    batch = world.submit(length=KIB, retry_unfenced=True).wait(NEVER_S, check=False)
    assert statuses(batch) == [Status.FAILED]
    assert "outcome unknown" in batch.explain_failures()
    wait_until(lambda: world.free() == 1)
    world.submit().wait(NEVER_S)
    assert (world.target.array == world.memory).all()
    assert world.free() == 1
    peer = world.segment.peer
    wait_until(lambda: peer.retire(0.0, "test"))
    wait_until(lambda: peer.endpoints.closed == 1)
    world.submit(length=KIB).wait(NEVER_S)
    wait_until(lambda: world.free() == 2)


def test_explain_shows_the_route(make: Make) -> None:
    world = make()
    found = world.here.explain(world.segment, local_memory="cuda:0")
    assert found.candidates == ()
    assert found.route is not None
    assert found.route.copies == ("copy",)
    assert found.route.carriers == ("net", "spare")
    assert "staged in host memory here, by copy" in str(found)
    assert world.here.explain(world.segment).route is None


def test_the_intent_of_the_copy_selects_its_own_policy_entry(make: Make) -> None:
    policy = [
        {"name": "copies", "intent": "staging_internal", "transports": ["copy"]},
        {"name": "wire", "transports": ["net"]},
    ]
    world = make({"policy": policy})
    world.submit().wait(NEVER_S)
    assert (world.target.array == world.memory).all()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_fails_every_request_ends_exactly_and_no_memory_is_lost(
    make: Make, seed: int
) -> None:
    """Random batches, both ways, over hops that fail, hang, are cancelled, or come too late."""
    world = make({"failover": {"max_attempts": 2, "pause_s": 0.01}})
    draw = np.random.default_rng(seed)
    for name in ("net", "spare", "copy"):
        mock = world.mock(name)
        mock.plan("fail", chance=0.1)
        mock.plan("short", chance=0.05)
        mock.plan("delay", chance=0.2, jitter=0.003)
        mock.plan("hang", chance=0.03)
    batches: list[tuple[tent.Batch, np.ndarray[Any, Any]]] = []
    for _ in range(25):
        n = int(draw.integers(1, 9))
        blocks = draw.permutation(SIZE // (4 * KIB))[:n] * 4 * KIB
        lengths = draw.integers(1, 4 * KIB, n)
        batch = world.segment.submit(
            "write",
            world.device,
            blocks,
            world.remote,
            blocks,
            lengths,
            priority=Priority(int(draw.integers(3))),
            timeout=float(draw.choice([0.01, 20.0])),
        )
        batches.append((batch, lengths))
        if draw.random() < 0.2:
            batch.cancel()

    def over() -> bool:
        for name in ("net", "spare", "copy"):
            world.mock(name).release()
        return all(batch.done for batch, _ in batches)

    wait_until(over)
    for batch, lengths in batches:
        done = batch.status == Status.COMPLETED
        assert Status.PENDING not in statuses(batch)
        assert (batch.moved[done] == lengths[done]).all()
        assert (batch.moved[~done] < lengths[~done]).all()
    wait_until(lambda: world.free() == 2)
    assert world.device.inflight.count == 0
    for name in ("net", "spare", "copy"):
        world.mock(name).clear()
    world.segment.write(world.device, world.remote)
    assert (world.target.array == world.memory).all()


def test_what_is_staged_notifies_once_when_all_of_it_has_arrived(make: Make) -> None:
    world = make()
    world.mock("net").plan("hang", at=3)
    batch = world.submit(notify=("staged", b"1"), timeout=NEVER_S)
    world.mock("net").wait_held(1)
    assert world.there.poll_notifications() == []
    world.mock("net").clear()
    world.mock("net").release()
    note = world.there.next_notification(NEVER_S)
    assert (note.name, note.ok) == ("staged", True)
    assert (world.target.array == world.memory).all()
    batch.wait(NEVER_S)
    assert world.there.poll_notifications() == []
    assert world.here.stats()["deadlines"]["medium"]["count"] == 1


def test_what_cannot_be_staged_is_told_as_failed(make: Make) -> None:
    world = make()
    world.mock("net").plan("fail", at=2)
    batch = world.submit(notify="staged")
    assert not world.there.next_notification(NEVER_S).ok
    batch.wait(NEVER_S, check=False)
    assert world.there.poll_notifications() == []


def test_device_memory_takes_no_checksums(make: Make) -> None:
    world = make()
    with pytest.raises(tent.MemoryUnsupported, match="cuda:0"):
        world.submit(notify="staged", integrity="crc32c")
