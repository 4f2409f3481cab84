"""What is held is given back: when a buffer goes, when a connection closes, when the transport stops."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import shm_owners as owners
from shm_harness import TIMEOUT, Context, Node, Owner, Pair, Row, pair, requests, submit

from tent_core.descriptor import PeerKey
from tent_core.errors import StaleHandle, TentError, TransportError, TransportUnavailable
from tent_core.testing import holding, wait_until
from tent_core.types import Opcode, Status
from tent_core.work import Work
from tent_shm import stream
from tent_shm.keeper import Keeper
from tent_shm.page import IdentityPage
from tent_shm.pool import Pool
from tent_shm.transport import ShmTransport

MIB = owners.MIB
ROWS = [(0, i * 1000, number, i * 1000, 900) for i, number in enumerate((0, 1, 2, 3))]


def mapped(made: Pair, number: int) -> list[str]:
    return owners.protections(owners.inode_of(made.owner.peer.segment.buffers[number]))


@pytest.mark.parametrize("change", ["without", "revoking"])
def test_a_buffer_that_goes_is_unmapped_before_refresh_returns_and_others_stay(change: str) -> None:
    with pair(owners.six_buffers) as made:
        made.transfer(Opcode.WRITE, ROWS)
        assert (mapped(made, 0), mapped(made, 2)) == (["rw-s"], ["rw-s"])
        peer, old = made.owner.peer, made.owner.peer.segment
        new = getattr(peer, change)(0)
        made.endpoint.refresh(old, new)
        assert (mapped(made, 0), mapped(made, 2)) == ([], ["rw-s"])
        peer.segment = new
        work = made.transfer(Opcode.WRITE, ROWS[1:])
        assert work.status.tolist() == [4, 4, 4]


def test_a_prepared_transfer_keeps_nothing_mapped_and_is_refused_afterwards() -> None:
    with pair(owners.six_buffers) as made:
        peer = made.owner.peer
        what = requests(made.node, peer, Opcode.WRITE, [(0, 0, 0, 0, 4096)], reused=True)
        submit(made.endpoint, what)
        assert what.derived is not None
        old, peer.segment = peer.segment, peer.without(0)
        made.endpoint.refresh(old, peer.segment)
        assert owners.protections(owners.inode_of(old.buffers[0])) == []
        work, _ = submit(made.endpoint, what)
        assert work.status.tolist() == [Status.INITIAL]
        assert isinstance(work.cause_of(0), StaleHandle)


def test_a_refresh_of_older_versions_does_not_touch_what_was_registered_since() -> None:
    """Refreshes can lag behind the newest snapshot, and ids are reused."""
    with pair(owners.six_buffers) as made:
        peer = made.owner.peer
        before = peer.segment
        old = before.buffers[0]
        made.transfer(Opcode.WRITE, ROWS)
        without = peer.without(0)
        anew = made.owner.ask(owners.replace_buffer, 0)
        peer.segment = anew
        assert anew.buffers[0].generation != old.generation
        work = made.transfer(Opcode.WRITE, ROWS)
        assert work.status.tolist() == [4] * 4
        made.check(ROWS)
        assert owners.protections(owners.inode_of(old)) == []
        made.endpoint.refresh(before, without)
        made.endpoint.refresh(without, anew)
        assert mapped(made, 0) == ["rw-s"]


class Gate:
    """Holds every step of a stream before or after its call, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Semaphore(0), threading.Event()
        real = stream.Stream.step

        def step(this: stream.Stream, start: int, stop: int) -> int:
            self.reached.release()
            assert self.open.wait(TIMEOUT)
            return real(this, start, stop)

        monkeypatch.setattr(stream.Stream, "step", step)


def started(
    made: Pair, rows: Any, may_block: bool = False
) -> tuple[Work, list[Work], Callable[[], None]]:
    finished: list[Work] = []
    what = requests(made.node, made.owner.peer, Opcode.WRITE, rows)
    work = Work(what, finished.append, may_block=may_block)
    made.endpoint.submit(work)

    def wait() -> None:
        wait_until(lambda: finished)

    return work, finished, wait


@pytest.mark.parametrize("number", [0, 1])
def test_closing_during_a_copy_leaves_the_memory_to_the_copy_and_fails_it(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with pair(owners.allocated_and_registered) as made:
        work, finished, wait = started(made, [(0, 0, number, 0, MIB // 2)])
        assert gate.reached.acquire(timeout=TIMEOUT)
        made.endpoint.close("the test says so")
        assert mapped(made, 0) == ([] if number else ["rw-s"])
        assert not finished
        assert made.node.context.log.names() == ["shm_copy_outlives_close"]
        gate.open.set()
        wait()
        assert (work.status.tolist(), work.surplus, len(finished)) == ([Status.FAILED], 0, 1)
        assert not isinstance(work.cause_of(0), StaleHandle)
        assert "the test says so" in str(work.cause_of(0))
        wait_until(
            lambda: mapped(made, 0) == [] and made.node.transport.holdings()["endpoints"] == 0
        )
        made.endpoint.close("twice")


def test_closing_fails_what_waits_behind_other_work_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch)
    with pair(owners.allocated_and_registered, copy_threads=1) as made:
        first, _, wait = started(made, [(0, 0, 1, 0, MIB // 2)])
        assert gate.reached.acquire(timeout=TIMEOUT)
        second, finished, _ = started(made, [(0, 0, 1, 0, MIB // 2)] * 3)
        closer = threading.Thread(target=made.endpoint.close, args=("enough",))
        closer.start()
        wait_until(lambda: finished)
        assert second.status.tolist() == [Status.FAILED] * 3
        assert not first.finished
        gate.open.set()
        closer.join(TIMEOUT)
        wait()
        assert (first.surplus, second.surplus) == (0, 0)


def test_a_buffer_that_goes_during_a_copy_is_unmapped_by_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine does not do this; if it did, no memory would be unmapped under a running call."""
    gate = Gate(monkeypatch)
    with pair(owners.allocated_and_registered) as made:
        work, _, wait = started(made, [(0, 0, 0, 0, MIB // 2)])
        assert gate.reached.acquire(timeout=TIMEOUT)
        peer = made.owner.peer
        made.endpoint.refresh(peer.segment, peer.without(0))
        assert mapped(made, 0) == ["rw-s"]
        gate.open.set()
        wait()
        assert isinstance(work.cause_of(0), StaleHandle)
        assert mapped(made, 0) == []


def test_a_closed_connection_refuses_work() -> None:
    with pair(owners.allocated_and_registered) as made:
        what = requests(made.node, made.owner.peer, Opcode.WRITE, [(0, 0, 0, 0, 100)], reused=True)
        submit(made.endpoint, what)
        made.endpoint.close("done")
        work, _ = submit(made.endpoint, what)
        assert work.status.tolist() == [Status.INITIAL]
        assert isinstance(work.cause_of(0), TransportError)


def test_submissions_from_many_threads_while_connections_close_are_each_reported_once() -> None:
    with pair(owners.allocated_and_registered, keep_gil_bytes="1KiB", split_bytes="64KiB") as made:
        for round_ in range(12):
            endpoint = made.node.transport.connect(made.owner.peer)
            reports: list[tuple[Work, list[Work]]] = []
            threads = [
                threading.Thread(target=submit_many, args=(made, endpoint, reports))
                for _ in range(3)
            ]
            for thread in threads:
                thread.start()
            wait_until(lambda r=reports, n=10 * round_: len(r) > n)  # type: ignore[misc]
            endpoint.close("a race")
            for thread in threads:
                thread.join(TIMEOUT)
            for work, finished in reports:
                wait_until(lambda f=finished: f)  # type: ignore[misc]
                assert work.surplus == 0
                assert finished == [work]
            wait_until(lambda e=endpoint: e.holdings() == {"mappings": 0, "tasks": 0})  # type: ignore[misc]


def submit_many(made: Pair, endpoint: Any, reports: list[tuple[Work, list[Work]]]) -> None:
    """Small, single and many, waiting or not."""
    kinds: list[list[Row]] = [
        [(0, 0, 0, 0, 512)],
        [(0, 0, 1, 0, 512)],
        [(0, 0, i % 2, i * 5000, 5000) for i in range(100)],
    ]
    for i in range(60):
        finished: list[Work] = []
        what = requests(made.node, made.owner.peer, Opcode.WRITE, kinds[i % 3])
        work = Work(what, finished.append, may_block=bool(i & 4))
        try:
            endpoint.submit(work)
        except TransportError:
            continue
        reports.append((work, finished))


def test_connecting_and_closing_leaves_nothing_behind() -> None:
    with Owner(owners.allocated_and_registered) as owner:
        node = Node("here:1")
        owners.allocated_and_registered(node)

        def once() -> None:
            endpoint = node.transport.connect(owner.peer)
            made = Pair(owner, node, endpoint)
            made.transfer(Opcode.WRITE, [(0, 0, 0, 0, 100), (0, 0, 1, 0, 100)])
            endpoint.close("done")

        once()
        before = holding()
        for _ in range(10):
            once()
        assert holding().beyond(before) == []
        node.transport.stop()


def test_a_peer_that_cannot_be_watched_is_not_connected_to_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with pair(owners.allocated_and_registered) as made:
        before = holding()
        monkeypatch.setattr(Keeper, "watch", full)
        with pytest.raises(TransportError, match="cannot be watched"):
            made.node.transport.connect(made.owner.peer)
        assert holding().beyond(before) == []


def test_starting_and_stopping_leaves_nothing_behind_also_with_open_connections() -> None:
    with Owner(owners.allocated_and_registered) as owner:

        def once() -> None:
            node = Node("here:1", copy_threads=4)
            owners.allocated_and_registered(node)
            endpoint = node.transport.connect(owner.peer)
            Pair(owner, node, endpoint).transfer(Opcode.WRITE, [(0, 0, 0, 0, 100)])
            assert node.transport.holdings() == {"threads": 5, "endpoints": 1}
            node.transport.stop()
            node.transport.stop()
            assert node.context.published is None
            assert node.transport.holdings() == {"threads": 0, "endpoints": 0}
            for buffer in node.locals.values():
                if buffer.memory_fd >= 0:
                    owners.os.close(buffer.memory_fd)
            with pytest.raises(TentError):
                node.transport.connect(owner.peer)

        once()
        before = holding()
        for _ in range(5):
            once()
        wait_until(lambda: holding().beyond(before) == [])


def test_a_transport_that_never_started_can_be_stopped() -> None:
    ShmTransport().stop()


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("tent_shm.page.syscalls.set_robust_list", OSError(38, "Function not implemented")),
        ("tent_shm.page.syscalls.set_robust_list", NotImplementedError("not on this machine")),
        ("tent_shm.keeper.select.epoll", OSError(24, "Too many open files")),
        ("tent_shm.page.syscalls.map_shared", OSError(12, "Cannot allocate memory")),
    ],
)
def test_a_start_that_fails_half_way_is_unavailable_and_leaves_nothing_behind(
    where: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    before = holding()
    with monkeypatch.context() as patch:
        patch.setattr(where, fail)
        transport = ShmTransport()
        with pytest.raises(TransportUnavailable, match=str(error.args[-1])):
            transport.start(Context(PeerKey("here:1", bytes(16))))
        transport.stop()
    wait_until(lambda: holding().beyond(before) == [])


def test_a_removed_local_buffer_is_forgotten_and_a_newer_one_with_its_id_is_not() -> None:
    node = Node("here:1")
    try:
        buffer = node.allocate(4096)
        again = owners.replace(buffer, generation=buffer.generation + 1)
        node.transport.add_buffers([again])
        node.transport.remove_buffer(buffer, 1.0)
        assert node.transport._steady[buffer.id][0] == again.generation
        node.transport.remove_buffer(again, 1.0)
        assert node.transport._steady == {}
    finally:
        node.transport.stop()


def test_an_event_of_a_descriptor_whose_number_was_reused_is_not_anothers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = IdentityPage(b"i" * 16)
    keeper = Keeper(page, None)
    keeper.start()
    called: list[int] = []
    reading, writing = owners.os.pipe()
    keeper.watch(reading, lambda: called.append(1))
    keeper._ended(reading)  # as if by an event of its predecessor
    assert called == []
    owners.os.write(writing, b"x")
    wait_until(lambda: called)
    assert keeper.stop(TIMEOUT)
    page.close()
    owners.os.close(reading)
    owners.os.close(writing)


def test_a_job_that_raises_is_logged_and_its_thread_lives_on() -> None:
    node = Node("here:1")
    pool = Pool(1, node.context.log)
    pool.start()
    done = threading.Event()
    pool.submit(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    pool.submit(done.set)
    assert done.wait(TIMEOUT)
    assert node.context.log.names() == ["shm_copy_raised"]
    assert pool.stop(TIMEOUT)
    node.transport.stop()
