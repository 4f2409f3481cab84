"""The fake of verbs by itself: what it counts, fails, holds and moves."""

from __future__ import annotations

import enum
import errno
import os
import select
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tent_core.types import Opcode
from tent_mock.verbs import FakeVerbs, Status

PATIENCE_S = 30


class VerbsError(Exception):
    def __init__(self, what: str, number: int) -> None:
        super().__init__(what)
        self.errno = number


class Completion(NamedTuple):
    wr_id: int
    status: int
    length: int
    queue_pair: int


class Event(enum.Enum):
    PORT_ACTIVE = 1
    PORT_DOWN = 2
    ADDRESS_CHANGED = 3
    FATAL = 4
    QUEUE_PAIR = 5
    OTHER = 6


WORDS = SimpleNamespace(
    VerbsError=VerbsError,
    Completion=Completion,
    Event=Event,
    Limits=SimpleNamespace,
    PortState=SimpleNamespace,
)
"""A vocabulary of a stranger: the fake needs nothing else of the seam that it stands for."""


class Wire:
    """Two connected queue pairs, the first on fake0 and the second on fake1, with 64 KiB behind each."""

    def __init__(self, fabric: FakeVerbs, *, depth: int = 64, entries: int = 256) -> None:
        self.fabric = fabric
        self.devices = [fabric.open(name) for name in fabric.devices()]
        self.channels = [d.channel() for d in self.devices]
        self.queues = [
            d.completion_queue(entries, c) for d, c in zip(self.devices, self.channels, strict=True)
        ]
        self.memory = [
            np.arange(65536, dtype=np.uint64).astype(np.uint8),
            np.zeros(65536, dtype=np.uint8),
        ]
        self.registrations = [
            d.register(m.ctypes.data, m.nbytes, remote_read=True, remote_write=True)
            for d, m in zip(self.devices, self.memory, strict=True)
        ]
        self.pairs = [
            d.queue_pair(1, q, q, send_depth=depth, receive_depth=4)
            for d, q in zip(self.devices, self.queues, strict=True)
        ]
        for mine, other in ((0, 1), (1, 0)):
            gid = list(fabric.nics.values())[other].gid_text
            route = SimpleNamespace(
                port=1, gid=gid, number=self.pairs[other].number, psn=other + 5, mtu=1024
            )
            self.pairs[mine].connect(route, mine + 5)

    def columns(self, count: int, length: int = 256) -> Any:
        here, there = self.registrations
        offsets = np.arange(count, dtype=np.uint64) * np.uint64(length)
        columns = np.zeros((count, 5), np.uint64)
        columns[:, 0], columns[:, 1] = np.uint64(here.iova) + offsets, here.lkey
        columns[:, 2], columns[:, 3] = np.uint64(there.iova) + offsets, there.rkey
        columns[:, 4] = length
        return columns

    def write(self, count: int, wr_id: int, length: int = 256) -> None:
        self.pairs[0].post(Opcode.WRITE, self.columns(count, length), wr_id)

    def ended(self, side: int = 0) -> list[tuple[int, int]]:
        return [(c.wr_id, c.status) for c in self.queues[side].poll(1000)]

    def close(self) -> None:
        for things in (self.pairs, self.registrations, self.queues, self.channels, self.devices):
            for thing in things:
                thing.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire(FakeVerbs(WORDS))
    yield made
    made.fabric.faults.clear()
    made.close()
    assert set(made.fabric.counts.live.values()) == {0}


def readable(thing: Any) -> bool:
    return bool(select.select([thing], [], [], 0)[0])


def test_bytes_are_where_they_belong_when_the_last_of_a_post_completes(wire: Wire) -> None:
    wire.write(64, 7)
    assert wire.ended() == [(7, Status.SUCCESS)]
    assert (wire.memory[1][: 64 * 256] == wire.memory[0][: 64 * 256]).all()
    assert not wire.memory[1][64 * 256 :].any()


def test_what_is_held_has_moved_nothing_until_it_is_stepped(wire: Wire) -> None:
    wire.fabric.hold()
    wire.write(4, 7)
    assert wire.ended() == []
    assert wire.fabric.step(3) == 3
    assert wire.ended() == []
    assert wire.memory[1][: 3 * 256].any()
    assert not wire.memory[1][3 * 256 :].any()
    assert wire.fabric.step(9) == 1
    assert wire.ended() == [(7, Status.SUCCESS)]
    wire.fabric.release()


def test_a_post_for_which_there_is_no_room_posts_nothing(wire: Wire) -> None:
    wire.fabric.hold()
    wire.write(60, 1)
    with pytest.raises(VerbsError) as caught:
        wire.write(5, 2)
    assert caught.value.errno == errno.ENOMEM
    wire.write(4, 3)
    wire.fabric.release()
    with pytest.raises(VerbsError):
        wire.write(1, 4)  # places come back with the completions that are polled
    assert wire.ended() == [(1, 0), (3, 0)]
    wire.write(64, 5)
    assert wire.ended() == [(5, 0)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_however_work_ends_every_place_of_the_send_queue_comes_back(
    posts: list[int], data: st.DataObject
) -> None:
    wire = Wire(FakeVerbs(WORDS))
    total = sum(posts)
    failing = data.draw(st.none() | st.integers(0, total - 1), "failing")
    wire.fabric.hold()
    for i, count in enumerate(posts):
        wire.write(count, i)
    if failing is not None:
        wire.fabric.faults.fail_work(Status.RETRIES_EXCEEDED, after=failing)
    wire.fabric.release()
    ended = wire.ended()
    if failing is None:
        assert ended == [(i, 0) for i in range(len(posts))]
    else:
        of = np.repeat(np.arange(len(posts)), posts).tolist()
        assert ended == [
            *((i, 0) for i in range(of[failing])),
            (of[failing], Status.RETRIES_EXCEEDED),
            *((i, Status.FLUSHED) for i in of[failing + 1 :]),
        ]
    wire.write(64, 99)
    assert len(wire.ended()) == (1 if failing is None else 64)
    wire.close()


def test_flushing_is_held_too_and_a_marker_comes_last(wire: Wire) -> None:
    wire.fabric.hold()
    wire.write(2, 1)
    wire.pairs[0].to_error()
    wire.write(1, 2)
    assert wire.ended() == []
    wire.fabric.release()
    assert wire.ended() == [(1, Status.FLUSHED), (1, Status.FLUSHED), (2, Status.FLUSHED)]


@pytest.mark.parametrize("column", [1, 3])
def test_keys_of_another_nic_or_of_the_other_kind_are_refused(wire: Wire, column: int) -> None:
    here, there = wire.registrations
    wrong = {1: (here.rkey, there.lkey), 3: (there.lkey, here.rkey)}[column]
    columns = wire.columns(1)
    columns[0, column] = wrong[0]
    wire.pairs[0].post(Opcode.WRITE, columns, 1)
    status = Status.LOCAL_PROTECTION if column == 1 else Status.REMOTE_ACCESS
    assert wire.ended() == [(1, status)]
    assert not wire.memory[1].any()


def test_keys_of_another_context_of_the_same_nic_are_refused(wire: Wire) -> None:
    stranger = wire.fabric.open("fake1")
    memory = wire.memory[1]
    other = stranger.register(
        memory.ctypes.data, memory.nbytes, remote_read=True, remote_write=True
    )
    columns = wire.columns(1)
    columns[0, 3] = other.rkey
    wire.pairs[0].post(Opcode.WRITE, columns, 1)
    assert wire.ended() == [(1, Status.REMOTE_ACCESS)]
    other.close()
    stranger.close()


def test_a_port_that_is_down_fails_work_on_either_side_and_tells_each_context(wire: Wire) -> None:
    wire.fabric.nics["fake1"].set_port(False)
    assert [readable(d) for d in wire.devices] == [False, True]
    assert wire.devices[1].next_event() is Event.PORT_DOWN
    assert not readable(wire.devices[1])
    assert not wire.devices[1].port(1).active
    wire.write(2, 1)
    assert wire.ended() == [(1, Status.RETRIES_EXCEEDED), (1, Status.FLUSHED)]


@pytest.mark.parametrize("returns", [True, False])
def test_work_hangs_on_a_port_until_it_returns_or_retries_are_used_up(
    wire: Wire, returns: bool
) -> None:
    nic = wire.fabric.nics["fake1"]
    nic.set_port(False, hang=True)
    wire.write(1, 1)
    assert wire.ended() == []
    if returns:
        nic.set_port(True)
    else:
        nic.expire()
    assert wire.ended() == [(1, Status.SUCCESS if returns else Status.RETRIES_EXCEEDED)]


def test_a_device_that_breaks_flushes_says_so_and_can_only_be_closed(wire: Wire) -> None:
    wire.fabric.hold()
    wire.write(2, 1)
    wire.fabric.nics["fake0"].fatal()
    wire.fabric.release()
    assert wire.devices[0].next_event() is Event.FATAL
    assert wire.ended() == [(1, Status.FLUSHED)] * 2
    with pytest.raises(VerbsError) as caught:
        wire.devices[0].channel()
    assert caught.value.errno == errno.EIO


def test_completions_without_room_are_lost_and_the_device_says_so() -> None:
    wire = Wire(FakeVerbs(WORDS), entries=2)
    for i in range(3):
        wire.write(1, i)
    assert wire.fabric.counts.overflows == 1
    assert wire.devices[0].next_event() is Event.OTHER
    assert wire.ended() == [(0, 0), (1, 0)]
    wire.close()


def test_limits_count_over_all_nics_and_what_is_closed_gives_room(wire: Wire) -> None:
    faults, device, memory = wire.fabric.faults, wire.devices[0], wire.memory[0]
    faults.max_registrations = 3
    third = device.register(memory.ctypes.data, 100, remote_read=True, remote_write=True)
    with pytest.raises(VerbsError) as caught:
        device.register(memory.ctypes.data, 100, remote_read=True, remote_write=True)
    assert caught.value.errno == errno.ENOMEM
    third.close()
    faults.max_registrations, faults.max_pinned = None, 2 * 65536 + 50
    with pytest.raises(VerbsError):
        device.register(memory.ctypes.data, 51, remote_read=True, remote_write=True)
    device.register(memory.ctypes.data, 50, remote_read=True, remote_write=True).close()
    faults.max_queue_pairs = 2
    with pytest.raises(VerbsError):
        device.queue_pair(1, wire.queues[0], wire.queues[0], send_depth=1)


def test_any_single_call_can_be_made_to_fail_and_makes_nothing_then() -> None:
    steps = sum(Wire(FakeVerbs(WORDS)).fabric.counts.calls.values())
    assert steps == 12
    for step in range(steps):
        fabric = FakeVerbs(WORDS)
        fabric.faults.fail_next(None, errno.EAGAIN, after=step)
        with pytest.raises(VerbsError) as caught:
            Wire(fabric)
        assert caught.value.errno == errno.EAGAIN
        counts = fabric.counts
        assert sum(counts.calls.values()) == step + 1
        assert sum(counts.live.values()) == min(step, 10)  # the last two connect


def test_what_is_in_use_cannot_be_closed_and_a_second_close_is_counted(wire: Wire) -> None:
    for thing in (wire.devices[0], wire.channels[0], wire.queues[0]):
        with pytest.raises(VerbsError) as caught:
            thing.close()
        assert caught.value.errno == errno.EBUSY
    pinned = wire.fabric.counts.pinned
    wire.registrations[0].close()
    wire.registrations[0].close()
    counts = wire.fabric.counts
    assert counts.closed["registration"] == counts.closed_again["registration"] == 1
    assert counts.pinned == pinned - 65536


def test_a_close_that_fails_has_closed_nothing_and_may_be_asked_again(wire: Wire) -> None:
    wire.fabric.faults.fail_next("close_registration", errno.EAGAIN)
    with pytest.raises(VerbsError):
        wire.registrations[0].close()
    assert wire.fabric.counts.alive("registration") == 2
    wire.registrations[0].close()
    assert wire.fabric.counts.alive("registration") == 1


def test_a_close_waits_at_its_gate_and_others_go_on(wire: Wire) -> None:
    gate = wire.fabric.faults.gate("close_queue_pair", nic="fake1")
    thread = threading.Thread(target=wire.pairs[1].close)
    thread.start()
    assert gate.entered.wait(PATIENCE_S)
    wire.write(1, 1)
    assert wire.ended() == [(1, 0)]
    assert wire.fabric.counts.alive("queue_pair") == 2
    gate.open()
    thread.join(PATIENCE_S)
    assert wire.fabric.counts.alive("queue_pair") == 1


def test_a_descriptor_of_memory_stands_for_a_dma_buf(wire: Wire) -> None:
    fd = os.memfd_create("exported")
    os.truncate(fd, 8192)
    made = wire.devices[1].register_dmabuf(fd, 4096, 4096, remote_read=True, remote_write=True)
    columns = wire.columns(1)
    columns[0, 2], columns[0, 3] = made.iova + 10, made.rkey
    wire.pairs[0].post(Opcode.WRITE, columns, 1)
    assert wire.ended() == [(1, 0)]
    assert os.pread(fd, 256, 4096 + 10) == wire.memory[0][:256].tobytes()
    made.close()
    os.close(fd)


def test_instant_work_is_counted_and_completes_and_moves_nothing() -> None:
    wire = Wire(FakeVerbs(WORDS, instant=True))
    wire.queues[0].arm()
    wire.write(64, 7)
    assert readable(wire.channels[0])
    wire.write(64, 8)
    assert wire.ended() == [(7, 0), (8, 0)]
    counts = wire.fabric.counts
    assert (counts.posted, counts.signalled, counts.polled) == (128, 2, 2)
    assert not wire.memory[1].any()
    wire.close()
