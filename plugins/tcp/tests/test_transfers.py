"""Bytes between two processes: every shape of batch, both kinds of memory, both ways of waiting."""

from __future__ import annotations

import mmap
from dataclasses import replace

import numpy as np
import pytest
from tcp_harness import FixedPeer, Here, OwnerProcess, work

from tent_core.errors import BufferRevoked, PermissionDenied, RangeError, StaleHandle
from tent_core.testing.harness import Row, requests
from tent_core.transport import LocalBuffer
from tent_core.types import Opcode, Permission, Status
from tent_core.work import Work

KIB, MIB = 1 << 10, 1 << 20
READ, WRITE = Opcode.READ, Opcode.WRITE

waiting = pytest.mark.parametrize("waiting", [True, False], ids=["waiting", "not-waiting"])
allocated = pytest.mark.parametrize("allocated", [True, False], ids=["allocated", "registered"])


def scattered(local: LocalBuffer, remote: LocalBuffer, count: int, longest: int) -> list[Row]:
    """Blocks of random lengths at random places of both, none of which overlap."""
    random = np.random.default_rng(count)
    places = [random.permutation(b.length // longest)[:count] * longest for b in (local, remote)]
    lengths = random.integers(1, longest + 1, count)
    columns = zip(*(c.tolist() for c in (*places, lengths)), strict=True)
    return [(local, here, remote, there, length) for here, there, length in columns]


def moved_to(there: np.ndarray, here: np.ndarray, rows: list[Row]) -> np.ndarray:
    """What `there` holds after the rows were written from `here`."""
    expected = there.copy()
    for _, a, _, b, length in rows:
        expected[b : b + length] = here[a : a + length]
    return expected


@waiting
@allocated
@pytest.mark.parametrize(("count", "longest"), [(1, 40), (1000, 64), (5000, 97), (300, 16 * KIB)])
def test_blocks_of_any_number_and_length_arrive_where_they_belong(
    owner: OwnerProcess, here: Here, waiting: bool, allocated: bool, count: int, longest: int
) -> None:
    source = here.offer(2 * count * longest)
    content = here.arrays[source.id]
    content[:] = np.random.default_rng(1).integers(0, 256, source.length, np.uint8)
    target = owner.offer(2 * count * longest, allocated=allocated, value=7)
    endpoint = here.transport.connect(owner.peer())
    rows = scattered(source, target, count, longest)

    done = work(endpoint, WRITE, rows, waiting=waiting)
    assert (done.status == Status.COMPLETED).all()
    assert done.moved.tolist() == [row[4] for row in rows]
    expected = moved_to(np.full(target.length, 7, np.uint8), content, rows)
    assert np.array_equal(owner.content(target), expected)

    back = here.offer(source.length, allocated=allocated, value=9)
    rows = [(back, *row[1:]) for row in rows]
    assert (work(endpoint, READ, rows, waiting=waiting).status == Status.COMPLETED).all()
    reversed_rows = [(b, there, a, at, n) for a, at, b, there, n in rows]
    expected = moved_to(np.full(back.length, 9, np.uint8), owner.content(target), reversed_rows)
    assert np.array_equal(here.arrays[back.id], expected)


@waiting
@allocated
def test_a_block_of_a_hundred_megabytes_arrives(
    owner: OwnerProcess, here: Here, waiting: bool, allocated: bool
) -> None:
    size = 100 * MIB + 3
    source, target = here.offer(size), owner.offer(size, allocated=allocated)
    here.arrays[source.id][:] = np.resize(np.arange(251, dtype=np.uint8), size)
    endpoint = here.transport.connect(owner.peer())
    work(endpoint, WRITE, [(source, 0, target, 0, size)], waiting=waiting)
    assert np.array_equal(owner.content(target), here.arrays[source.id])
    back = here.offer(size)
    work(endpoint, READ, [(back, 0, target, 0, size)], waiting=waiting)
    assert np.array_equal(here.arrays[back.id], here.arrays[source.id])


def test_one_batch_may_touch_many_buffers_of_both_kinds(owner: OwnerProcess, here: Here) -> None:
    source = here.offer(8 * KIB)
    here.arrays[source.id][:] = np.arange(8 * KIB) // 64
    targets = [owner.offer(KIB, allocated=bool(i % 2)) for i in range(8)]
    endpoint = here.transport.connect(owner.peer())
    rows = [(source, i * KIB, target, 0, KIB) for i, target in enumerate(targets)]
    work(endpoint, WRITE, rows)
    for i, target in enumerate(targets):
        assert np.array_equal(
            owner.content(target), here.arrays[source.id][i * KIB : (i + 1) * KIB]
        )


def test_what_is_prepared_once_moves_the_bytes_of_each_moment(
    owner: OwnerProcess, here: Here
) -> None:
    source, target = here.offer(KIB), owner.offer(KIB)
    endpoint = here.transport.connect(owner.peer())
    prepared = requests(WRITE, [(source, 0, target, 512, 512), (source, 512, target, 0, 512)])
    prepared.reused = True
    for value in range(20):
        here.arrays[source.id][:] = value
        endpoint.submit(Work(prepared, lambda _: None, may_block=True))
        assert set(owner.content(target).tolist()) == {value}


@waiting
@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_permissions_are_checked_at_the_owner(
    owner: OwnerProcess, here: Here, waiting: bool, opcode: Opcode
) -> None:
    local = here.offer(KIB, value=1)
    readable = owner.offer(KIB, permission=Permission.GLOBAL_READ_ONLY, value=2)
    private = owner.offer(KIB, permission=Permission.LOCAL_READ_WRITE, value=3)
    endpoint = here.transport.connect(owner.peer())
    for remote, allowed in ((readable, opcode is READ), (private, False)):
        done = work(endpoint, opcode, [(local, 0, remote, 0, KIB)], waiting=waiting)
        if not allowed:
            assert isinstance(done.cause_of(0), PermissionDenied)
            assert repr(remote.name) in str(done.cause_of(0))
            assert not done.unfenced
        assert (done.status[0] == Status.COMPLETED) == allowed
    assert set(owner.content(readable).tolist()) == {2}
    assert set(owner.content(private).tolist()) == {3}


@waiting
def test_a_buffer_that_was_removed_or_replaced_is_refused_and_the_stream_goes_on(
    owner: OwnerProcess, here: Here, waiting: bool
) -> None:
    local = here.offer(KIB, value=1)
    gone, kept = owner.offer(KIB), owner.offer(KIB)
    peer = owner.peer()
    endpoint = here.transport.connect(peer)
    work(endpoint, WRITE, [(local, 0, gone, 0, KIB)], waiting=waiting)
    accepted = owner.call("counters")["accepted"]
    owner.call("remove", gone.id)
    refused = work(endpoint, WRITE, [(local, 0, gone, 0, KIB)], waiting=waiting)
    assert isinstance(refused.cause_of(0), BufferRevoked)
    assert (
        work(endpoint, WRITE, [(local, 0, kept, 0, KIB)], waiting=waiting).status[0]
        == Status.COMPLETED
    )
    assert owner.call("counters")["accepted"] == accepted
    assert not peer.suspicions


@waiting
def test_blocks_of_other_buffers_complete_although_one_buffer_was_revoked(
    owner: OwnerProcess, here: Here, waiting: bool
) -> None:
    local = here.offer(64 * 100, value=5)
    buffers = [owner.offer(64 * 100) for _ in range(3)]
    endpoint = here.transport.connect(owner.peer())
    owner.call("remove", buffers[1].id)
    rows = [(local, 64 * i, buffers[i % 3], 64 * i, 64) for i in range(100)]
    done = work(endpoint, WRITE, rows, waiting=waiting)
    for i in range(100):
        if i % 3 == 1:
            assert isinstance(done.cause_of(i), BufferRevoked)
            assert done.moved[i] == 0
        else:
            assert done.status[i] == Status.COMPLETED
            assert done.moved[i] == 64


def test_a_range_outside_the_buffer_is_refused_by_the_owner(
    owner: OwnerProcess, here: Here
) -> None:
    local, remote = here.offer(64 * KIB), owner.offer(KIB)
    endpoint = here.transport.connect(owner.peer())
    for change in ({"address": remote.address - 1}, {"address": remote.address + 1}):
        wrong = replace(remote, **change)
        done = work(endpoint, WRITE, [(local, 0, wrong, 0, KIB)])
        assert isinstance(done.cause_of(0), RangeError)
    done = work(endpoint, READ, [(local, 0, remote, 0, KIB), (local, KIB, remote, 1023, 2)])
    assert all(isinstance(done.cause_of(i), RangeError) for i in range(2))


def test_a_buffer_that_the_peer_never_offered_is_a_stale_handle(
    owner: OwnerProcess, here: Here
) -> None:
    local = here.offer(KIB)
    endpoint = here.transport.connect(owner.peer())
    offered = owner.offer(KIB)
    for never in (replace(offered, id=999), replace(offered, generation=999)):
        done = work(endpoint, WRITE, [(local, 0, never, 0, KIB)])
        assert isinstance(done.cause_of(0), StaleHandle)


def test_a_buffer_is_written_to_before_the_endpoint_is_told_of_it(
    owner: OwnerProcess, here: Here
) -> None:
    local = here.offer(KIB)
    endpoint = here.transport.connect(owner.peer())
    later = owner.offer(KIB)
    assert work(endpoint, WRITE, [(local, 0, later, 0, KIB)]).cause_of(0) is None


def test_memory_that_the_owner_has_unmapped_fails_the_request_alone(
    owner: OwnerProcess, here: Here
) -> None:
    """What is registered is kept alive by the engine; were it not, the kernel would say so."""
    page = mmap.PAGESIZE
    local, kept = here.offer(4 * page), here.offer(page)
    memory = mmap.mmap(-1, 4 * page)
    array = np.frombuffer(memory, np.uint8)
    lost = here.register(array)
    del here.arrays[lost.id], array
    memory.close()
    endpoint = here.transport.connect(FixedPeer(here.segment.snapshot))
    for opcode in (WRITE, READ):
        done = work(endpoint, opcode, [(local, 0, lost, 0, 4 * page)])
        assert done.status[0] == Status.FAILED
        assert "memory" in str(done.cause_of(0))
        again = work(endpoint, opcode, [(local, 0, kept, 0, page)])
        assert again.status[0] == Status.COMPLETED
