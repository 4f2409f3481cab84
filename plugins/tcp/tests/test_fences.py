"""A write that was given up: nothing of it is written once its end was reported as fenced."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
from tcp_harness import Here, OwnerProcess
from tcp_proxy import Proxy

from tent_core.errors import TransportError
from tent_core.testing import wait_until
from tent_core.testing.harness import Row, requests
from tent_core.transport import Endpoint
from tent_core.types import Opcode, Priority, Status
from tent_core.work import Work
from tent_tcp.protocol import STOPPED, pack_fence

KIB, MIB = 1 << 10, 1 << 20
READ, WRITE = Opcode.READ, Opcode.WRITE
SIZE = 8 * MIB
_STARTS = range(0, SIZE, 8 * KIB)

waiting = pytest.mark.parametrize("waiting", [True, False], ids=["waiting", "not-waiting"])
allocated = pytest.mark.parametrize("allocated", [True, False], ids=["allocated", "registered"])


class Attempt:
    """A work that was submitted in a thread, with the time its transport has, and the time until it may
    still report."""

    def __init__(
        self,
        endpoint: Endpoint,
        opcode: Opcode,
        *rows: Row,
        waiting: bool,
        seconds: float = 20.0,
        expires: float = 20.0,
        priority: Priority = Priority.MEDIUM,
    ) -> None:
        self._ended = threading.Event()
        now = time.monotonic()
        self.work = Work(
            requests(opcode, rows),
            lambda _: self._ended.set(),
            may_block=waiting,
            deadline=now + seconds,
            expires=now + expires,
            priority=priority,
        )
        self._endpoint = endpoint
        self._thread = threading.Thread(target=self._submit, daemon=True)
        self._thread.start()

    def _submit(self) -> None:
        try:
            self._endpoint.submit(self.work)
        except TransportError as error:  # as the engine does
            self.work.refuse(error)

    def cancel(self) -> None:
        self.work.cancelled = True
        self._endpoint.cancel(self.work)

    def end(self) -> Work:
        """The work, once all of it is reported."""
        assert self._ended.wait(15)
        self._thread.join(15)
        assert not self._thread.is_alive()
        return self.work


def _give_up(attempt: Attempt) -> Work:
    attempt.cancel()
    return attempt.end()


def _cut(proxy: Proxy) -> Callable[[Attempt], Work]:
    def cut(attempt: Attempt) -> Work:
        proxy.cut()
        return attempt.end()

    return cut


@waiting
@allocated
@pytest.mark.parametrize("how", ["cancelled", "cut", "too-late"])
def test_late_bytes_of_a_write_that_was_fenced_touch_nothing(
    owner: OwnerProcess, here: Here, how: str, allocated: bool, waiting: bool
) -> None:
    old, new = here.offer(SIZE, value=1), here.offer(SIZE, value=2)
    target = owner.offer(SIZE, allocated=allocated)
    peer = owner.peer(here.segment.snapshot.key)
    with Proxy(peer, allowed=SIZE // 2) as proxy:
        endpoint = here.transport.connect(proxy.through)
        seconds = 0.5 if how == "too-late" else 20.0
        row = (old, 0, target, 0, SIZE)
        attempt = Attempt(endpoint, WRITE, row, waiting=waiting, seconds=seconds)
        proxy.wait_until_holding(SIZE // 4)
        end = {"cancelled": _give_up, "cut": _cut(proxy), "too-late": Attempt.end}[how]
        done = end(attempt)
        assert not done.unfenced, done.cause_of(0)
        wanted = {
            "cancelled": Status.CANCELED,
            "cut": Status.FAILED,
            "too-late": Status.TIMEOUT,
        }
        assert done.status[0] == wanted[how]
        direct = here.transport.connect(peer)
        assert Attempt(direct, WRITE, (new, 0, target, 0, SIZE), waiting=True).end().finished
        assert (owner.content(target) == 2).all()
        proxy.let_go()
        assert Attempt(direct, READ, (old, 0, target, 0, SIZE), waiting=True).end().finished
        assert (owner.content(target) == 2).all()
        assert (here.arrays[old.id] == 2).all()


@waiting
def test_without_a_confirmation_the_outcome_of_a_write_is_unknown_and_late_bytes_do_arrive(
    owner: OwnerProcess, here: Here, waiting: bool
) -> None:
    old, target = here.offer(SIZE, value=1), owner.offer(SIZE)
    with Proxy(owner.peer(), allowed=SIZE // 2) as proxy:  # whose control plane is silent
        endpoint = here.transport.connect(proxy.through)
        attempt = Attempt(endpoint, WRITE, (old, 0, target, 0, SIZE), waiting=waiting)
        proxy.wait_until_holding(SIZE // 4)
        done = _give_up(attempt)
        assert done.unfenced
        assert "did not confirm" in str(done.cause_of(0))
        before = int(owner.content(target).sum())
        proxy.let_go()
        wait_until(lambda: int(owner.content(target).sum()) > before)


@waiting
def test_a_read_that_was_given_up_writes_nothing_here_any_more(
    owner: OwnerProcess, here: Here, waiting: bool
) -> None:
    local, source = here.offer(64 * MIB, value=3), owner.offer(64 * MIB, value=1)
    pid = owner.call("receiver")
    endpoint = here.transport.connect(owner.peer())
    assert Attempt(endpoint, READ, (local, 0, source, 0, KIB), waiting=True).end().finished
    os.kill(pid, signal.SIGSTOP)
    try:
        attempt = Attempt(endpoint, READ, (local, 0, source, 0, 64 * MIB), waiting=waiting)
        wait_until(lambda: attempt.work.progress)
        done = _give_up(attempt)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert done.status[0] == Status.CANCELED
    assert not done.unfenced
    here.arrays[local.id][:] = 4
    assert Attempt(endpoint, WRITE, (local, 0, source, 0, MIB), waiting=True).end().finished
    assert (here.arrays[local.id] == 4).all()


@waiting
def test_a_stopped_receiver_confirms_when_it_goes_on(here: Here, waiting: bool) -> None:
    with OwnerProcess() as owner:
        local, target = here.offer(64 * MIB), owner.offer(64 * MIB)
        pid = owner.call("receiver")
        endpoint = here.transport.connect(owner.peer(here.segment.snapshot.key))
        assert Attempt(endpoint, WRITE, (local, 0, target, 0, KIB), waiting=True).end().finished
        os.kill(pid, signal.SIGSTOP)
        attempt = Attempt(endpoint, WRITE, (local, 0, target, 0, 64 * MIB), waiting=waiting)
        wait_until(lambda: attempt.work.progress)
        attempt.cancel()
        wait_until(lambda: endpoint.holdings()["streams"] == 0)  # it is being asked for
        assert not attempt.work.finished
        os.kill(pid, signal.SIGCONT)
        assert not attempt.end().unfenced


@waiting
def test_a_receiver_that_stays_stopped_confirms_nothing(waiting: bool) -> None:
    with OwnerProcess() as owner, Here(fence_timeout=0.3) as here:
        local, target = here.offer(64 * MIB), owner.offer(64 * MIB)
        pid = owner.call("receiver")
        endpoint = here.transport.connect(owner.peer(here.segment.snapshot.key))
        assert Attempt(endpoint, WRITE, (local, 0, target, 0, KIB), waiting=True).end().finished
        os.kill(pid, signal.SIGSTOP)
        try:
            attempt = Attempt(endpoint, WRITE, (local, 0, target, 0, 64 * MIB), waiting=waiting)
            wait_until(lambda: attempt.work.progress)
            done = _give_up(attempt)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert done.unfenced
        assert "did not confirm" in str(done.cause_of(0))


@waiting
def test_a_receiver_that_has_ended_writes_nothing_more(here: Here, waiting: bool) -> None:
    with OwnerProcess() as owner:
        local, target = here.offer(64 * MIB), owner.offer(64 * MIB)
        pid = owner.call("receiver")
        endpoint = here.transport.connect(owner.peer(here.segment.snapshot.key))
        assert Attempt(endpoint, WRITE, (local, 0, target, 0, KIB), waiting=True).end().finished
        os.kill(pid, signal.SIGSTOP)
        attempt = Attempt(endpoint, WRITE, (local, 0, target, 0, 64 * MIB), waiting=waiting)
        wait_until(lambda: attempt.work.progress)
        os.kill(pid, signal.SIGKILL)
        done = attempt.end()
        assert done.status[0] == Status.FAILED
        assert not done.unfenced


@waiting
def test_no_time_is_left_for_a_fence_after_the_deadline_of_the_transfer(
    owner: OwnerProcess, here: Here, waiting: bool
) -> None:
    local, target = here.offer(SIZE), owner.offer(SIZE)
    with Proxy(owner.peer(here.segment.snapshot.key), allowed=SIZE // 2) as proxy:
        endpoint = here.transport.connect(proxy.through)
        row = (local, 0, target, 0, SIZE)
        attempt = Attempt(endpoint, WRITE, row, waiting=waiting, seconds=0.4, expires=0.4)
        done = attempt.end()
        assert done.status[0] == Status.TIMEOUT
        assert done.unfenced


def test_nobody_stops_the_streams_of_another_peer(owner: OwnerProcess, here: Here) -> None:
    local, target = here.offer(KIB), owner.offer(KIB)
    peer = owner.peer(here.segment.snapshot.key)
    endpoint = here.transport.connect(peer)
    assert Attempt(endpoint, WRITE, (local, 0, target, 0, KIB), waiting=True).end().finished
    (stream,) = endpoint.pool._idle  # type: ignore[attr-defined]
    before = owner.call("counters")["streams"]
    fence = pack_fence(stream.identity, 1.0)
    name, incarnation = here.segment.snapshot.key
    assert owner.call("bootstrap", name, bytes(16), fence) == STOPPED
    assert owner.call("bootstrap", "other:1", incarnation, fence) == STOPPED
    assert owner.call("bootstrap", name, incarnation, pack_fence(bytes(16), 1.0)) == STOPPED
    assert owner.call("counters")["streams"] == before
    assert owner.call("bootstrap", name, incarnation, fence) == STOPPED
    assert owner.call("counters")["streams"] == before - 1


@pytest.mark.parametrize("payload", [b"", b"x" * 30, pack_fence(bytes(16), 1.0)[:-1]])
def test_a_message_that_is_no_fence_is_refused(owner: OwnerProcess, payload: bytes) -> None:
    with pytest.raises(TransportError, match="tcp: a message of peer"):
        owner.call("bootstrap", "stranger:1", bytes(16), payload)


def test_what_waits_for_a_stream_is_cancelled_at_once_and_fenced(owner: OwnerProcess) -> None:
    with Here(streams=1) as here:
        local, target = here.offer(SIZE), owner.offer(SIZE)
        with Proxy(owner.peer(here.segment.snapshot.key), allowed=SIZE // 2) as proxy:
            endpoint = here.transport.connect(proxy.through)
            first = Attempt(endpoint, WRITE, (local, 0, target, 0, SIZE), waiting=False)
            proxy.wait_until_holding(SIZE // 4)
            for is_waiting in (True, False):
                second = Attempt(endpoint, WRITE, (local, 0, target, 0, KIB), waiting=is_waiting)
                done = _give_up(second)
                assert done.status[0] == Status.CANCELED
                assert not done.unfenced
                assert done.progress == 0
            assert not first.work.finished
            _give_up(first)


@waiting
@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_progress_grows_to_the_bytes_that_moved(
    owner: OwnerProcess, here: Here, opcode: Opcode, waiting: bool
) -> None:
    local, remote = here.offer(SIZE), owner.offer(SIZE)
    endpoint = here.transport.connect(owner.peer())
    attempt = Attempt(endpoint, opcode, (local, 0, remote, 0, SIZE), waiting=waiting)
    done = attempt.end()
    assert done.status[0] == Status.COMPLETED
    assert SIZE <= done.progress < SIZE + KIB  # and what the protocol adds


def test_an_endpoint_that_closes_leaves_no_question_open(owner: OwnerProcess, here: Here) -> None:
    local, target = here.offer(SIZE), owner.offer(SIZE)
    key = here.segment.snapshot.key
    with Proxy(owner.peer(key), allowed=SIZE // 2) as proxy:
        endpoint = here.transport.connect(proxy.through)
        attempt = Attempt(endpoint, WRITE, (local, 0, target, 0, SIZE), waiting=False)
        proxy.wait_until_holding(SIZE // 4)
        pid = owner.call("receiver")
        os.kill(pid, signal.SIGSTOP)
        try:
            attempt.cancel()
            wait_until(lambda: endpoint.holdings()["streams"] == 0)
            endpoint.close("the test says so")
            done = attempt.end()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert done.unfenced
        assert not endpoint._mover.fences._open  # type: ignore[attr-defined]


@waiting
@allocated
@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_a_stream_that_was_cut_is_replaced_by_another_which_carries_the_rest(
    owner: OwnerProcess, here: Here, opcode: Opcode, allocated: bool, waiting: bool
) -> None:
    local = here.offer(SIZE, value=1 if opcode is WRITE else 0)
    remote = owner.offer(SIZE, value=0 if opcode is WRITE else 1, allocated=allocated)
    with Proxy(owner.peer(here.segment.snapshot.key), allowed=KIB) as proxy:
        endpoint = here.transport.connect(proxy.through)
        row = (local, 0, remote, 0, SIZE)
        rows = [row] if opcode is WRITE else [(local, i, remote, i, 8 * KIB) for i in _STARTS]
        attempt = Attempt(endpoint, opcode, *rows, waiting=waiting)
        for number in range(2):
            proxy.wait_until_holding(KIB if opcode is WRITE else 1, number)
            proxy.cut_once()
        proxy.let_go_on()
        done = attempt.end()
        assert (done.status == Status.COMPLETED).all(), done.cause_of(0)
        assert done.surplus == 0
        assert (owner.content(remote) == 1).all()
        assert (here.arrays[local.id] == 1).all()


def test_streams_that_break_again_and_again_fail_the_work(owner: OwnerProcess, here: Here) -> None:
    local, target = here.offer(SIZE), owner.offer(SIZE)
    with Proxy(owner.peer(here.segment.snapshot.key), allowed=KIB) as proxy:
        endpoint = here.transport.connect(proxy.through)
        attempt = Attempt(endpoint, WRITE, (local, 0, target, 0, SIZE), waiting=False)
        for number in range(4):
            proxy.wait_until_holding(KIB, number)
            proxy.cut_once()
        done = attempt.end()
        assert done.status[0] == Status.FAILED
        assert "broke" in str(done.cause_of(0))
        assert not done.unfenced
