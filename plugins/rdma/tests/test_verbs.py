"""The seam to verbs behaves the same whoever is behind it: the fake everywhere, pyverbs where a device is.

Nothing here waits for nothing to happen: a queue pair that was put in error flushes in order, so that a
request posted after that (the marker) completes last, and what has not come before it never comes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tent_rdma.verbs
from tent_core import topology
from tent_core.testing.waiting import wait_until
from tent_core.types import Opcode
from tent_mock.verbs import FakeVerbs
from tent_rdma import by_pyverbs
from tent_rdma.devices import ChosenDevice, choose
from tent_rdma.settings import Settings
from tent_rdma.verbs import (
    FLUSHED,
    STATUS_NAMES,
    SUCCESS,
    Completion,
    CompletionQueue,
    Device,
    Event,
    QueuePair,
    Registration,
    Route,
    Verbs,
    VerbsError,
)

PATIENCE_S = 30.0
MARKER = 1 << 40
REMOTE_ACCESS = STATUS_NAMES.index("remote access error")
RETRIES = STATUS_NAMES.index("transport retries exceeded")
LOCAL = (STATUS_NAMES.index("local queue pair operation error"), 4)
"""What is wrong at this end; soft-RoCE says the first of some that hardware calls protection errors."""

SYSFS = Path("/sys/class/infiniband")


class Rig:
    """Verbs of one kind, and what of the machine behind them the tests must know."""

    def __init__(self, verbs: Verbs, kind: str, name: str, gid_index: int, gid: str) -> None:
        self.verbs, self.kind, self.name = verbs, kind, name
        self.gid_index, self.gid = gid_index, gid

    def set_port(self, active: bool) -> None:
        """Take the port down or up, where that harms nobody."""
        if isinstance(self.verbs, FakeVerbs):
            self.verbs.nics[self.name].set_port(active)
            return
        if not self.name.startswith("rxe"):
            pytest.skip("takes a port down: on soft-RoCE only")
        device = SYSFS / self.name
        netdev = (device / "parent").read_text().strip()
        subprocess.run(["ip", "link", "set", netdev, "up" if active else "down"], check=True)
        wanted = "4: ACTIVE" if active else "1: DOWN"
        wait_until(lambda: (device / "ports/1/state").read_text().strip() == wanted)
        if active:  # the kernel gives a GID back a moment later, and maybe at another place
            self.gid_index = wait_until(self._place) - 1

    def _place(self) -> int:
        """Where the GID is now, counted from 1; 0 if it is nowhere. There are thousands of places."""
        gids = [(SYSFS / self.name / f"ports/1/gids/{i}").read_text().strip() for i in range(16)]
        return gids.index(self.gid) + 1 if self.gid in gids else 0


@cache
def chosen_device(names: tuple[str, ...]) -> ChosenDevice:
    """The device to test. Reading the tables of GIDs takes a second in the lab."""
    return choose(topology.discover(), Settings(devices=names)).chosen[0]


KINDS = ["fake", pytest.param("pyverbs", marks=pytest.mark.rdma)]
EVERY_WAY = [*KINDS, pytest.param("ibv_post_send", marks=pytest.mark.rdma)]
every_way_to_post = pytest.mark.parametrize("rig", EVERY_WAY, indirect=True)


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest, rdma_settings: Settings) -> Rig:
    if request.param == "fake":
        fabric = FakeVerbs(tent_rdma.verbs)
        return Rig(fabric, "fake", "fake0", 1, fabric.nics["fake0"].gid_text)
    verbs = by_pyverbs.load(extended=request.param == "pyverbs")
    device = chosen_device(rdma_settings.devices)
    return Rig(verbs, request.param, device.name, device.gid_index, device.gid)


class End:
    """A queue pair with a completion queue of its own and 256 KiB of registered memory."""

    def __init__(self, device: Device, stack: contextlib.ExitStack, fill: int) -> None:
        self.device = device
        self.channel = device.channel()
        stack.callback(self.channel.close)
        self.queue: CompletionQueue = device.completion_queue(512, self.channel)
        stack.callback(self.queue.close)
        self.memory = (np.arange(1 << 18, dtype=np.uint64) * fill).astype(np.uint8)
        self.region = self.register(True, True)
        stack.callback(self.region.close)
        self.pair: QueuePair = device.queue_pair(
            1, self.queue, self.queue, send_depth=128, receive_depth=8
        )
        stack.callback(self.pair.close)

    def register(self, remote_read: bool, remote_write: bool) -> Registration:
        return self.device.register(
            self.memory.ctypes.data,
            self.memory.nbytes,
            remote_read=remote_read,
            remote_write=remote_write,
        )

    def take(self, count: int) -> list[Completion]:
        """The next `count` completions, slept for on the channel."""
        found: list[Completion] = []
        end = time.monotonic() + PATIENCE_S
        while len(found) < count:
            self.queue.arm()
            more = self.queue.poll(count - len(found))
            found += more
            if not more:
                left = end - time.monotonic()
                assert left > 0, f"{found} of {count} completions came"
                if select.select([self.channel], [], [], left)[0]:
                    self.channel.take(self.queue)
        return found

    def ended(self, count: int) -> list[tuple[int, int]]:
        return [(c.wr_id, c.status) for c in self.take(count)]

    def drained(self) -> list[tuple[int, int]]:
        """Put it in error; all that completes of it from now on."""
        self.pair.to_error()
        self.pair.post(Opcode.WRITE, np.zeros((1, 5), np.uint64), MARKER)
        found = []
        while (MARKER, FLUSHED) not in found:
            found += self.ended(1)
        return found[:-1]


class Wire:
    """Two queue pairs of one device, connected to each other."""

    def __init__(self, rig: Rig, device: Device, stack: contextlib.ExitStack) -> None:
        self.rig = rig
        self.here, self.there = End(device, stack, 7), End(device, stack, 0)
        if rig.kind == "ibv_post_send":
            assert "Extended" not in type(self.here.pair).__name__

    def route(self, other: End, psn: int) -> Route:
        return Route(
            port=1,
            gid_index=self.rig.gid_index,
            gid=self.rig.gid,
            lid=0,
            number=other.pair.number,
            psn=psn,
            mtu=1024,
            timeout=8,  # a millisecond, so that giving up is quick
            retries=3,
            reads=4,
        )

    def connect(self) -> Wire:
        self.here.pair.connect(self.route(self.there, 7), 5)
        self.there.pair.connect(self.route(self.here, 5), 7)
        return self

    def columns(self, count: int, length: int = 1000) -> Any:
        offsets = np.arange(count, dtype=np.uint64) * np.uint64(length)
        columns = np.zeros((count, 5), np.uint64)
        columns[:, 0] = np.uint64(self.here.region.iova) + offsets
        columns[:, 1] = self.here.region.lkey
        columns[:, 2] = np.uint64(self.there.region.iova) + offsets
        columns[:, 3] = self.there.region.rkey
        columns[:, 4] = length
        return columns

    def write(self, count: int, wr_id: int) -> None:
        self.here.pair.post(Opcode.WRITE, self.columns(count), wr_id)

    def send(self, wr_id: int, length: int = 100) -> None:
        region = self.here.region
        self.here.pair.post_send(wr_id, region.iova, region.lkey, length)

    def receive(self, wr_id: int, length: int = 100, offset: int = 0) -> None:
        region = self.there.region
        self.there.pair.post_receive(wr_id, region.iova + offset, region.lkey, length)


@pytest.fixture
def device(rig: Rig) -> Iterator[Device]:
    opened = rig.verbs.open(rig.name)
    yield opened
    opened.close()
    if isinstance(rig.verbs, FakeVerbs):
        assert set(rig.verbs.counts.live.values()) == {0}


@pytest.fixture
def idle(rig: Rig, device: Device) -> Iterator[Wire]:
    """Not connected yet."""
    with contextlib.ExitStack() as stack:
        yield Wire(rig, device, stack)


@pytest.fixture
def wire(idle: Wire) -> Wire:
    return idle.connect()


def readable(thing: Any, patience: float = 0.0) -> bool:
    return bool(select.select([thing], [], [], patience)[0])


# ---------------------------------------------------------------- one-sided


@every_way_to_post
@pytest.mark.parametrize("opcode", list(Opcode))
@pytest.mark.parametrize("count", [1, 2, 64])
def test_all_bytes_have_moved_when_the_last_request_completes(
    wire: Wire, opcode: Opcode, count: int
) -> None:
    columns = wire.columns(count)
    if opcode is Opcode.READ:
        wire.there.memory[:] = wire.here.memory[::-1]
    expected = wire.there.memory.copy() if opcode is Opcode.READ else wire.here.memory.copy()
    wire.here.pair.post(opcode, columns, 77)
    assert wire.here.ended(1) == [(77, SUCCESS)]
    moved = wire.here.memory if opcode is Opcode.READ else wire.there.memory
    assert (moved[: count * 1000] == expected[: count * 1000]).all()
    assert not (moved[count * 1000 :] == expected[count * 1000 :]).all()


@every_way_to_post
def test_only_the_last_request_of_a_post_completes(wire: Wire) -> None:
    wire.write(30, 1)
    wire.write(1, 2)
    wire.write(30, 3)
    assert wire.here.ended(3) == [(1, SUCCESS), (2, SUCCESS), (3, SUCCESS)]
    assert wire.here.drained() == []


def test_a_completion_names_the_queue_pair(wire: Wire) -> None:
    wire.write(2, 1)
    assert wire.here.take(1)[0].queue_pair == wire.here.pair.number
    assert wire.here.pair.number != wire.there.pair.number


@every_way_to_post
def test_no_request_of_a_post_that_fails_goes_on(wire: Wire) -> None:
    for _ in range(3):
        with pytest.raises(VerbsError) as caught:
            wire.here.pair.post(Opcode.WRITE, wire.columns(1024, 1), 1)
        assert caught.value.scarce or wire.rig.kind == "ibv_post_send"
        assert str(wire.here.pair.number) in str(caught.value) or wire.rig.kind == "fake"
    if wire.rig.kind == "ibv_post_send":
        assert all(status == FLUSHED for _, status in wire.here.drained()[1:])
        return
    wire.write(64, 2)
    assert wire.here.ended(1) == [(2, SUCCESS)]
    assert wire.here.drained() == []


@every_way_to_post
def test_requests_before_the_queue_pair_is_connected_are_refused(idle: Wire) -> None:
    with pytest.raises(VerbsError) as caught:
        idle.write(2, 1)
    assert caught.value.errno == errno.EINVAL


# ---------------------------------------------------------------- what is not allowed


@every_way_to_post
@pytest.mark.parametrize("count", [1, 4])
def test_a_wrong_rkey_breaks_both_ends_and_flushes_each_request_after_it(
    wire: Wire, count: int
) -> None:
    wire.receive(5)
    columns = wire.columns(count)
    columns[count // 2, 3] = 0x7FFFFFFF
    wire.here.pair.post(Opcode.WRITE, columns, 1)
    after = count - count // 2 - 1
    assert wire.here.ended(1 + after) == [(1, REMOTE_ACCESS), *[(1, FLUSHED)] * after]
    assert wire.there.ended(1) == [(5, FLUSHED)]
    assert not wire.there.memory[count // 2 * 1000 :].any()
    wire.write(3, 2)
    assert wire.here.ended(3) == [(2, FLUSHED)] * 3


@pytest.mark.parametrize("beyond", ["remote", "local"])
def test_a_request_that_ends_outside_its_registration_moves_nothing(
    wire: Wire, beyond: str
) -> None:
    columns = wire.columns(1)
    columns[0, 2 if beyond == "remote" else 0] += np.uint64((1 << 18) - 999)
    wire.here.pair.post(Opcode.WRITE, columns, 1)
    ((_, status),) = wire.here.ended(1)
    assert status == REMOTE_ACCESS if beyond == "remote" else status in LOCAL
    assert not wire.there.memory.any()


@every_way_to_post
@pytest.mark.parametrize("opcode", list(Opcode))
def test_a_wrong_lkey_fails_at_this_end(wire: Wire, opcode: Opcode) -> None:
    columns = wire.columns(1)
    columns[0, 1] = 0x7FFFFFFF
    before = wire.here.memory.copy()
    wire.here.pair.post(opcode, columns, 1)
    ((_, status),) = wire.here.ended(1)
    assert status in LOCAL
    assert not wire.there.memory.any()
    assert (wire.here.memory == before).all()


def test_what_may_only_be_read_cannot_be_written(wire: Wire) -> None:
    with contextlib.closing(wire.there.register(True, False)) as readonly:
        columns = wire.columns(1)
        columns[0, 3] = readonly.rkey
        before = wire.here.memory.copy()
        wire.here.pair.post(Opcode.READ, columns, 1)
        assert wire.here.ended(1) == [(1, SUCCESS)]
        wire.here.memory[:] = before
        wire.here.pair.post(Opcode.WRITE, columns, 2)
        assert wire.here.ended(1) == [(2, REMOTE_ACCESS)]
        assert not wire.there.memory.any()


def test_a_registration_that_was_closed_is_dead(wire: Wire) -> None:
    columns = wire.columns(1)
    wire.there.region.close()
    wire.here.pair.post(Opcode.WRITE, columns, 1)
    assert wire.here.ended(1) == [(1, REMOTE_ACCESS)]
    assert not wire.there.memory.any()


# ---------------------------------------------------------------- send and receive


def test_a_send_waits_for_room_and_tells_its_length(wire: Wire) -> None:
    wire.send(1, 60)
    wire.receive(2, 100)
    assert wire.here.ended(1) == [(1, SUCCESS)]
    (received,) = wire.there.take(1)
    assert received == Completion(2, SUCCESS, 60, wire.there.pair.number)
    assert (wire.there.memory[:60] == wire.here.memory[:60]).all()
    assert not wire.there.memory[60:].any()


def test_sends_fill_rooms_in_order(wire: Wire) -> None:
    for i in range(5):
        wire.receive(10 + i, 100, offset=100 * i)
    for i in range(5):
        wire.send(i, 10 + i)
    assert [(c.wr_id, c.length) for c in wire.there.take(5)] == [(10 + i, 10 + i) for i in range(5)]
    assert wire.here.ended(5) == [(i, SUCCESS) for i in range(5)]


def test_a_send_that_does_not_fit_fails_at_both_ends(wire: Wire) -> None:
    wire.receive(2, 10)
    wire.send(1, 11)
    assert wire.here.ended(1)[0][1] not in (SUCCESS, FLUSHED)
    assert wire.there.ended(1)[0][1] not in (SUCCESS, FLUSHED)
    assert not wire.there.memory[10:].any()


def test_room_can_be_posted_before_connecting_and_no_more_than_the_depth(idle: Wire) -> None:
    idle.receive(0)
    with pytest.raises(VerbsError) as caught:  # noqa: PT012  # soft-RoCE has some room more
        for i in range(1, 64):
            idle.receive(i)
    assert caught.value.errno == errno.ENOMEM
    idle.connect()
    idle.send(1, 10)
    assert [(c.wr_id, c.length) for c in idle.there.take(1)] == [(0, 10)]


# ---------------------------------------------------------------- errors and draining


@every_way_to_post
def test_what_is_outstanding_is_flushed_in_order_one_completion_for_each_request(
    wire: Wire,
) -> None:
    wire.send(1)  # waits for room that never comes, and all after it wait for it
    wire.write(3, 2)
    wire.write(1, 3)
    wire.send(4)
    assert wire.here.drained() == [(i, FLUSHED) for i in (1, 2, 2, 2, 3, 4)]
    assert not wire.there.memory.any()


def test_what_has_completed_before_the_error_stays_completed(wire: Wire) -> None:
    wire.receive(9)
    wire.send(1)
    wire.write(2, 2)
    assert wire.there.ended(1) == [(9, SUCCESS)]
    wire.there.queue.poll(1)
    wire.send(3)
    assert wire.here.drained() == [(1, SUCCESS), (2, SUCCESS), (3, FLUSHED)]


@every_way_to_post
def test_a_queue_pair_in_error_flushes_all_that_is_sent_and_may_be_put_there_again(
    wire: Wire,
) -> None:
    assert wire.here.drained() == []
    wire.here.pair.to_error()
    wire.write(2, 1)
    wire.send(2)
    assert wire.here.ended(3) == [(1, FLUSHED), (1, FLUSHED), (2, FLUSHED)]
    wire.here.pair.to_error()
    wire.send(3)
    assert wire.here.ended(1) == [(3, FLUSHED)]


def test_room_posted_in_error_is_flushed_at_the_next_error_at_the_latest(wire: Wire) -> None:
    wire.there.pair.to_error()
    wire.receive(3)
    wire.there.pair.to_error()
    assert wire.there.ended(1) == [(3, FLUSHED)]


def test_receives_are_flushed_also_by_one_that_was_never_connected(idle: Wire) -> None:
    idle.receive(1)
    idle.receive(2)
    idle.there.pair.to_error()
    assert idle.there.ended(2) == [(1, FLUSHED), (2, FLUSHED)]


@pytest.mark.parametrize("how", ["closed", "in error", "not there", "of another sequence"])
def test_retries_are_used_up_when_the_other_end_does_not_answer(idle: Wire, how: str) -> None:
    if how == "of another sequence":
        idle.here.pair.connect(idle.route(idle.there, 7), 5)
        idle.there.pair.connect(idle.route(idle.here, 1005), 7)
    elif how == "not there":
        index = idle.rig.gid_index
        nowhere = "0000:0000:0000:0000:0000:ffff:cb00:7107"
        idle.here.pair.connect(Route(1, index, nowhere, 0, 4711, 7, 1024, timeout=8, retries=1), 5)
    else:
        idle.connect()
        if how == "closed":
            idle.there.pair.close()
        else:
            idle.there.pair.to_error()
    idle.write(2, 1)
    assert idle.here.ended(2) == [(1, RETRIES), (1, FLUSHED)]


def test_closing_a_queue_pair_forgets_what_is_outstanding(wire: Wire) -> None:
    wire.send(1)
    wire.here.pair.close()
    assert wire.here.queue.poll(10) == []


# ---------------------------------------------------------------- events


def test_an_armed_queue_tells_once(wire: Wire) -> None:
    end = wire.here
    end.queue.arm()
    assert not readable(end.channel)
    wire.write(1, 1)
    assert readable(end.channel, PATIENCE_S)
    end.channel.take(end.queue)
    wire.write(1, 2)
    found: list[Completion] = []
    while len(found) < 2:
        found += end.queue.poll(10)
    assert not readable(end.channel)
    end.queue.arm()
    assert not readable(end.channel)
    wire.write(1, 3)
    assert readable(end.channel, PATIENCE_S)


def test_an_event_that_is_not_there_is_an_error_and_no_wait(wire: Wire) -> None:
    with pytest.raises(VerbsError) as caught:
        wire.here.channel.take(wire.here.queue)
    assert caught.value.errno == errno.EAGAIN
    with pytest.raises(VerbsError) as caught:
        wire.here.device.next_event()
    assert caught.value.errno == errno.EAGAIN


def test_a_port_says_that_it_goes_down_and_that_it_returns(rig: Rig, device: Device) -> None:
    for active, event in ((False, Event.PORT_DOWN), (True, Event.PORT_ACTIVE)):
        try:
            rig.set_port(active)
            while True:
                assert readable(device, PATIENCE_S)
                if device.next_event() is event:  # addresses may change too
                    break
            assert device.port(1).active is active
        finally:
            rig.set_port(True)


def test_work_on_a_port_that_is_down_fails_and_nothing_is_left(wire: Wire) -> None:
    try:
        wire.rig.set_port(False)
        wire.write(2, 1)
        first, second = wire.here.ended(2)
        assert first[1] in (RETRIES, *LOCAL)
        assert second == (1, FLUSHED)
    finally:
        wire.rig.set_port(True)


# ---------------------------------------------------------------- making and closing


def test_a_device_says_what_it_can_and_how_its_port_is(device: Device) -> None:
    limits, port = device.limits, device.port(1)
    assert limits.max_registration >= 1 << 30
    assert min(limits.max_queue_pairs, limits.max_work_requests, limits.max_completions) >= 1024
    assert limits.max_registrations >= 1024
    assert limits.max_reads >= 1
    assert port.active
    assert port.mtu in (256, 512, 1024, 2048, 4096)
    with pytest.raises(VerbsError):
        device.port(99)


def test_a_device_that_is_not_there_is_named(rig: Rig) -> None:
    with pytest.raises(VerbsError, match="nowhere0") as caught:
        rig.verbs.open("nowhere0")
    assert caught.value.errno == errno.ENODEV


def test_a_registration_that_fails_says_why(device: Device) -> None:
    with pytest.raises(VerbsError, match=r"1048576 bytes at 0x1000.*Bad address") as caught:
        device.register(0x1000, 1 << 20, remote_read=True, remote_write=True)
    assert caught.value.errno == errno.EFAULT
    assert not caught.value.scarce


def test_a_route_that_leads_nowhere_is_refused(idle: Wire) -> None:
    index, gid = idle.rig.gid_index, idle.rig.gid
    with pytest.raises(VerbsError):
        idle.here.pair.connect(Route(1, index, "nonsense", 0, 17, 7, 1024), 5)
    idle.here.pair.connect(Route(1, index, gid, 0, 17, 7, 1024), 5)
    with pytest.raises(VerbsError):
        idle.here.pair.connect(Route(1, index, gid, 0, 17, 7, 1024), 5)


def test_more_than_the_device_has_is_refused(wire: Wire) -> None:
    device, queue = wire.here.device, wire.here.queue
    limits = device.limits
    with pytest.raises(VerbsError):
        device.completion_queue(limits.max_completions + 1)
    with pytest.raises(VerbsError):
        device.queue_pair(1, queue, queue, send_depth=limits.max_work_requests + 1)
    with pytest.raises(VerbsError):
        device.queue_pair(99, queue, queue, send_depth=1)


def test_everything_can_be_closed_twice(wire: Wire) -> None:
    for end in (wire.here, wire.there):
        for _ in range(2):
            for thing in (end.pair, end.region, end.queue, end.channel):
                thing.close()
    wire.here.device.close()
    wire.here.device.close()


def test_a_descriptor_is_found_while_other_threads_make_theirs(rig: Rig) -> None:
    begin = threading.Barrier(4)

    def work(_: int) -> set[int]:
        begin.wait(PATIENCE_S)
        found = set()
        with contextlib.ExitStack() as stack:
            device = rig.verbs.open(rig.name)
            stack.callback(device.close)
            found.add(device.fileno())
            for _ in range(6):
                with contextlib.closing(device.channel()) as passing:
                    assert passing.fileno() != device.fileno()
                end = End(device, stack, 1)
                end.pair.post_receive(1, end.region.iova, end.region.lkey, 1)
                end.queue.arm()
                end.pair.to_error()
                assert readable(end.channel, PATIENCE_S)  # by its own completion, and no other's
                found.add(end.channel.fileno())
            begin.wait(PATIENCE_S)  # all are open at the same time
        return found

    with ThreadPoolExecutor(4) as pool:
        every = list(pool.map(work, range(4)))
    assert len(set().union(*every)) == 4 * 7


def test_descriptors_are_closed_with_what_they_belong_to_and_not_inherited(rig: Rig) -> None:
    device = rig.verbs.open(rig.name)
    channel = device.channel()
    fds = [device.fileno(), channel.fileno()]
    for fd in fds:
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    channel.close()
    device.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
