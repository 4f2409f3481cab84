"""Bytes go where they belong: each way of copying, each kind of memory, each shape of batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import shm_owners as owners
from shm_harness import FakePeer, Node, Pair, blocks, bytes_of, pair, requests, submit, transfer

from tent_core.errors import PermissionDenied, StaleHandle
from tent_core.types import Opcode, Permission, Status
from tent_core.work import Work

KIB, MIB = 1 << 10, 1 << 20
DIRECTIONS = pytest.mark.parametrize("opcode", Opcode)
BLOCKING = pytest.mark.parametrize("may_block", [True, False])


@pytest.fixture(scope="module")
def six() -> Iterator[Pair]:
    with pair(owners.six_buffers) as made:
        yield made


@pytest.fixture(scope="module")
def threads() -> Iterator[Pair]:
    """Everything that is not quick is spread over three threads, in many calls."""
    with pair(owners.six_buffers, copy_threads=3, split_bytes="64KiB", keep_gil_bytes="0B") as made:
        yield made


@DIRECTIONS
@BLOCKING
@pytest.mark.parametrize("remote", [(0,), (1,), (0, 1), (2, 4), (3, 5), (0, 1, 2, 3, 4, 5)])
@pytest.mark.parametrize(("count", "block"), [(1, 1), (1, 4096), (3, 257), (100, 8192), (3000, 64)])
def test_every_byte_of_a_batch_arrives(
    six: Pair, opcode: Opcode, may_block: bool, remote: tuple[int, ...], count: int, block: int
) -> None:
    rows = blocks(count, block, MIB, remote)
    for number in set(remote):
        six.owner.ask(owners.fill, number, number)
    work = six.transfer(opcode, rows, may_block=may_block)
    assert (work.status == Status.COMPLETED).all(), work.causes
    assert work.moved.tolist() == [block] * count
    six.check(rows[:: max(1, count // 20)])


@DIRECTIONS
@BLOCKING
@pytest.mark.parametrize("remote", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize(("count", "block"), [(1, MIB), (7, 100_001), (2000, 512)])
def test_every_byte_arrives_when_several_threads_share_the_work(
    threads: Pair, opcode: Opcode, may_block: bool, remote: tuple[int, ...], count: int, block: int
) -> None:
    rows = blocks(count, block, MIB, remote)
    for number in remote:
        threads.owner.ask(owners.fill, number, 50 + number)
    work = threads.transfer(opcode, rows, may_block=may_block)
    assert (work.status == Status.COMPLETED).all(), work.causes
    threads.check(rows[:: max(1, count // 20)])


def test_nothing_beside_the_requested_bytes_is_written(six: Pair) -> None:
    six.owner.ask(owners.fill, 0, 3)
    six.owner.ask(owners.fill, 1, 3)
    before = np.frombuffer(six.owner.ask(bytes_of, 0, 0, MIB), np.uint8)
    for number, row in ((0, (0, 5, 0, 70_001, 999)), (1, (0, 5, 1, 70_001, 999))):
        six.transfer(Opcode.WRITE, [row])
        after = np.frombuffer(six.owner.ask(bytes_of, number, 0, MIB), np.uint8)
        changed = np.flatnonzero(after != before)
        assert changed.min() >= 70_001
        assert changed.max() < 71_000


def test_registered_memory_here_reaches_mapped_memory_there(six: Pair) -> None:
    rows = [(1, 4096, 0, 8192, 100_000), (1, 0, 0, 0, 10)]
    for row in rows:
        assert six.transfer(Opcode.WRITE, [row]).status.tolist() == [Status.COMPLETED]
    six.check(rows)


def test_a_work_that_may_not_block_is_carried_out_by_the_transports_threads(six: Pair) -> None:
    thread: list[str] = []
    rows = blocks(1000, 1024, MIB, [1])
    what = requests(six.node, six.owner.peer, Opcode.WRITE, rows)
    done = threading.Event()

    def finished(work: Work) -> None:
        thread.append(threading.current_thread().name)
        done.set()

    six.endpoint.submit(Work(what, finished, may_block=False))
    assert done.wait(10)
    assert thread[0].startswith("tent-shm-copy")


@pytest.mark.parametrize("number", [0, 1])
def test_a_prepared_transfer_is_planned_once_and_posted_many_times(six: Pair, number: int) -> None:
    what = requests(six.node, six.owner.peer, Opcode.WRITE, [(0, 0, number, 0, 4096)], reused=True)
    plans = []
    for seed in range(3):
        six.node.arrays[0][:4096] = seed
        work, _ = submit(six.endpoint, what)
        assert work.status.tolist() == [Status.COMPLETED]
        assert six.owner.ask(bytes_of, number, 0, 4096) == bytes([seed]) * 4096
        plans.append(what.derived)
    assert plans[0] is not None
    assert plans[0] is plans[1] is plans[2]


def test_more_than_2_gib_go_in_one_request_and_in_one_batch() -> None:
    unit, times = 16 * MIB, 130
    with pair(owners.huge) as made:
        made.node.register(owners.repeated(0x3000_0000_0000, unit, times))
        made.node.arrays[2][:unit] = np.arange(unit, dtype=np.uint32).astype(np.uint8)
        for rows in (
            [(2, 0, 1, 0, unit * times)],
            [(2, i * unit, 1, i * unit, unit) for i in range(times)],
        ):
            made.owner.ask(owners.fill_unit, 1, unit)
            work = made.transfer(Opcode.WRITE, rows)
            assert (work.status == Status.COMPLETED).all(), work.causes
            assert int(work.moved.sum()) == unit * times
            assert made.owner.ask(owners.digest_unit, 1, unit) == owners.digest_of(
                made.node.arrays[2][:unit]
            )


def test_memory_that_peers_may_only_read_is_mapped_read_only_and_not_written() -> None:
    with pair(owners.read_only) as made:
        made.owner.ask(owners.fill, 0, 4)
        read = made.transfer(Opcode.READ, [(0, 0, 0, 0, 4096)])
        assert read.status.tolist() == [Status.COMPLETED]
        inode = owners.inode_of(made.owner.peer.segment.buffers[0])
        assert owners.protections(inode) == ["r--s"]
        before = made.owner.ask(owners.digest, 0)
        for number in (0, 1):
            work = made.transfer(Opcode.WRITE, [(0, 0, number, 0, 4096)])
            assert work.status.tolist() == [Status.INITIAL]
            assert isinstance(work.cause_of(0), PermissionDenied)
        assert made.owner.ask(owners.digest, 0) == before


def test_a_request_that_cannot_be_moved_does_not_stop_the_others_of_its_batch() -> None:
    with pair(owners.six_buffers) as made:
        peer = made.owner.peer
        rows = [(0, 0, 0, 0, 100), (0, 100, 1, 0, 100), (0, 200, 2, 0, 100), (0, 300, 1, 200, 100)]
        what = requests(made.node, peer, Opcode.WRITE, rows)
        one = replace(peer.segment.buffers[1], permission=Permission.GLOBAL_READ_ONLY)
        peer.segment = replace(peer.segment, buffers={**peer.segment.buffers, 1: one})
        work, finished = submit(made.endpoint, what)
        assert finished == [work]
        assert work.surplus == 0
        assert work.status.tolist() == [4, 0, 4, 0]
        made.check([rows[0], rows[2]])


def test_a_buffer_that_the_newest_snapshot_does_not_have_is_refused(six: Pair) -> None:
    what = requests(six.node, six.owner.peer, Opcode.WRITE, [(0, 0, 5, 0, 100)])
    whole = six.owner.peer.segment
    six.owner.peer.segment = six.owner.peer.without(5)
    try:
        work, _ = submit(six.endpoint, what)
    finally:
        six.owner.peer.segment = whole
    assert work.status.tolist() == [Status.INITIAL]
    assert isinstance(work.cause_of(0), StaleHandle)


def test_two_transports_of_one_process_reach_each_other() -> None:
    one, other = Node("one:1"), Node("other:1")
    try:
        for node in (one, other):
            owners.allocated_and_registered(node)
        peer = FakePeer(one.segment())
        endpoint = other.transport.connect(peer)
        other.arrays[0][:] = 7
        for number in (0, 1):
            work = transfer(endpoint, other, peer, Opcode.WRITE, [(0, 0, number, 0, 5000)])
            assert work.status.tolist() == [Status.COMPLETED]
            assert (one.arrays[number][:5000] == 7).all()
    finally:
        other.transport.stop()
        one.transport.stop()
