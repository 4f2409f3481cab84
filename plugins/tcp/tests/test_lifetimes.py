"""Ends: of transfers, buffers, peers, receivers, engines. Each is noticed, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tcp_harness import FixedPeer, Here, OwnerProcess, process_is_gone, work
from tcp_stranger import Stranger, request

from tent_core import address
from tent_core.descriptor import Attribute, BufferDescriptor, SegmentDescriptor
from tent_core.errors import BufferRevoked, PermissionDenied, StaleHandle, TransportError
from tent_core.testing import wait_until
from tent_core.testing.harness import requests, this_host
from tent_core.testing.leaks import nothing_stays_behind
from tent_core.transport import Endpoint, LocalBuffer
from tent_core.types import Opcode, Permission, Status
from tent_core.work import Work
from tent_tcp import protocol

KIB, MIB = 1 << 10, 1 << 20
READ, WRITE = Opcode.READ, Opcode.WRITE

waiting = pytest.mark.parametrize("waiting", [True, False], ids=["waiting", "not-waiting"])
allocated = pytest.mark.parametrize("allocated", [True, False], ids=["allocated", "registered"])


class Hammer:
    """A thread that transfers again and again until that fails; `last` is the work that did."""

    def __init__(
        self,
        endpoint: Endpoint,
        opcode: Opcode,
        local: LocalBuffer,
        remote: LocalBuffer,
        waiting: bool = True,
    ) -> None:
        self.rounds = 0
        self.last: Work | None = None
        self.error: Exception | None = None
        size = remote.length // 16
        rows = [(local, i * size, remote, (15 - i) * size, size) for i in range(16)]
        arguments = (endpoint, opcode, rows, waiting)
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()
        wait_until(lambda: self.rounds > 2 or self.last or self.error)

    def _run(self, endpoint: Endpoint, opcode: Opcode, rows: Any, waiting: bool) -> None:
        try:
            while True:
                done = work(endpoint, opcode, rows, waiting=waiting)
                if not (done.status == Status.COMPLETED).all():
                    self.last = done
                    return
                self.rounds += 1
        except TransportError as error:
            self.error = error

    def end(self, within: float = 10.0) -> Exception:
        """Why it stopped."""
        self._thread.join(within)
        assert not self._thread.is_alive(), f"still going after {within:g} s"
        cause = self.error or (self.last.cause_of(0) if self.last else None)
        assert cause is not None
        return cause


# Buffers


@waiting
@allocated
@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_no_byte_changes_after_a_removal_although_a_peer_hammers(
    owner: OwnerProcess, here: Here, allocated: bool, opcode: Opcode, waiting: bool
) -> None:
    local = here.offer(MIB, value=255)
    for round_ in range(5):
        remote = owner.offer(MIB, allocated=allocated)
        endpoint = here.transport.connect(owner.peer())
        hammer = Hammer(endpoint, opcode, local, remote, waiting)
        assert owner.call("remove_and_watch", remote.id, round_, 0.05)
        assert isinstance(hammer.end(), BufferRevoked)
        assert set(np.unique(owner.content(remote))) == {round_}
        endpoint.close("test")


def test_a_write_in_progress_is_dropped_when_its_buffer_is_removed(
    owner: OwnerProcess,
) -> None:
    target = owner.offer(MIB)
    with Stranger(owner) as peer:
        peer.enter().socket.sendall(request(protocol.WRITE, target) + b"\1" * (MIB // 2))
        wait_until(lambda: owner.content(target).any())
        assert owner.call("remove_and_watch", target.id, 9, 0.0)
        peer.socket.sendall(b"\1" * (MIB // 2))
        answer = protocol.parse_answer(peer.exactly(protocol.ANSWER_SIZE))
        assert answer.verdict is protocol.Verdict.REVOKED
        assert answer.moved == 0
    assert set(owner.content(target).tolist()) == {9}


def test_a_read_in_progress_gets_zeros_and_a_verdict_when_its_buffer_is_removed(
    owner: OwnerProcess,
) -> None:
    size = 64 * MIB  # more than the socket buffers hold
    target = owner.offer(size, value=7)
    with Stranger(owner) as peer:
        peer.enter().socket.sendall(request(protocol.READ, target))
        assert protocol.parse_answer(peer.exactly(32)).verdict is protocol.Verdict.OK
        assert set(peer.exactly(KIB)) == {7}
        owner.call("remove", target.id)
        assert peer.exactly(size - KIB)[-1] == 0
        answer = protocol.parse_answer(peer.exactly(protocol.ANSWER_SIZE))
        assert answer.verdict is protocol.Verdict.REVOKED


# Streams and peers


def test_releasing_a_peer_closes_its_streams_and_no_others(here: Here) -> None:
    with OwnerProcess() as owner, Here() as other:
        target = owner.offer(KIB)
        sides = [
            (side, side.transport.connect(owner.peer()), side.offer(KIB)) for side in (here, other)
        ]
        for _, endpoint, local in sides:
            work(endpoint, WRITE, [(local, 0, target, 0, KIB)])
        assert owner.call("holdings")["accepted_streams"] == 2
        owner.call("release", *here.segment.snapshot.key)
        assert owner.call("holdings")["accepted_streams"] == 1
        for _, endpoint, local in reversed(sides):
            wait_until(lambda e=endpoint, b=local: _works(e, b, target))


def _works(endpoint: Endpoint, local: LocalBuffer, remote: LocalBuffer) -> bool:
    done = work(endpoint, WRITE, [(local, 0, remote, 0, remote.length)])
    return bool(done.status[0] == Status.COMPLETED)


def _cause(endpoint: Endpoint, local: LocalBuffer, remote: LocalBuffer) -> Exception | None:
    """Why a write fails, at submit or later."""
    try:
        return work(endpoint, WRITE, [(local, 0, remote, 0, remote.length)]).cause_of(0)
    except TransportError as error:
        return error


def test_a_stream_that_was_closed_while_idle_is_replaced_unseen(
    owner: OwnerProcess, here: Here
) -> None:
    local, target = here.offer(KIB), owner.offer(KIB)
    peer = owner.peer()
    endpoint = here.transport.connect(peer)
    work(endpoint, WRITE, [(local, 0, target, 0, KIB)])
    owner.call("release", *here.segment.snapshot.key)
    time.sleep(0.15)  # a stream is looked at again only when it was idle for a while
    assert _works(endpoint, local, target)
    assert not peer.suspicions


@waiting
def test_closing_an_endpoint_ends_what_is_under_way_at_once(here: Here, waiting: bool) -> None:
    with silent_receiver() as peer:
        local = here.offer(64 * MIB)
        endpoint = here.transport.connect(peer)
        ended = threading.Event()
        row = (local, 0, replace(local, id=0, generation=1), 0, 64 * MIB)
        made = Work(requests(WRITE, [row]), lambda _: ended.set(), may_block=waiting)
        thread = threading.Thread(target=endpoint.submit, args=[made], daemon=True)
        thread.start()
        wait_until(lambda: endpoint.holdings()["streams"] == 1)
        assert peer.streams[0].recv(1, socket.MSG_PEEK)  # something of it was sent
        began = time.monotonic()
        endpoint.close("the test says so")
        assert ended.wait(1.0)
        assert time.monotonic() - began < 1.0
        assert "the test says so" in str(made.cause_of(0)) or "broke" in str(made.cause_of(0))
        assert made.unfenced
        thread.join(5)
        with pytest.raises(TransportError, match="the test says so"):
            work(endpoint, WRITE, [row], waiting=waiting)
        wait_until(lambda: endpoint.holdings()["streams"] == 0)
        assert not peer.suspicions


@waiting
def test_a_deadline_ends_a_transfer_to_a_peer_that_does_not_answer(
    here: Here, waiting: bool
) -> None:
    with silent_receiver() as peer:
        local = here.offer(KIB)
        endpoint = here.transport.connect(peer)
        row = (local, 0, replace(local, id=0, generation=1), 0, KIB)
        began = time.monotonic()
        done = work(endpoint, WRITE, [row], timeout=0.3, waiting=waiting)
        assert 0.2 < time.monotonic() - began < 3.0
        assert done.status[0] == Status.TIMEOUT
        assert done.unfenced
        assert not peer.suspicions


@waiting
def test_no_byte_for_too_long_ends_a_transfer(waiting: bool) -> None:
    with Here(stall_timeout=0.4) as here, silent_receiver() as peer:
        local = here.offer(KIB)
        endpoint = here.transport.connect(peer)
        row = (local, 0, replace(local, id=0, generation=1), 0, KIB)
        for opcode in (WRITE, READ):
            done = work(endpoint, opcode, [row], waiting=waiting)
            assert "not a byte moved for 0.4 s" in str(done.cause_of(0))
            assert done.unfenced == (opcode is WRITE)
        assert len(peer.suspicions) == 2


def test_peers_that_stall_delay_nobody_else(owner: OwnerProcess) -> None:
    with Here(streams=2) as here, silent_receiver() as silent:
        local, target = here.offer(MIB), owner.offer(MIB)
        stuck = here.transport.connect(silent)
        row = (local, 0, replace(local, id=0, generation=1), 0, MIB)
        ended: list[Work] = []
        for _ in range(10):
            stuck.submit(Work(requests(WRITE, [row]), ended.append))
        endpoint = here.transport.connect(owner.peer())
        for _ in range(5):
            began = time.monotonic()
            done = work(endpoint, WRITE, [(local, 0, target, 0, MIB)], waiting=False)
            assert done.status[0] == Status.COMPLETED
            assert time.monotonic() - began < 5
        assert not ended
        stuck.close("enough")
        wait_until(lambda: len(ended) == 10)


def test_work_waits_its_turn_for_the_streams_and_all_of_it_is_carried(
    owner: OwnerProcess,
) -> None:
    with Here(streams=2) as here:
        local, target = here.offer(64 * KIB, value=4), owner.offer(64 * KIB)
        back = here.offer(64 * KIB)
        endpoint = here.transport.connect(owner.peer())
        ended: list[Work] = []
        for i in range(64):
            row = (local, i * KIB, target, i * KIB, KIB)
            endpoint.submit(Work(requests(WRITE, [row]), ended.append))
        threads = [
            threading.Thread(
                target=work, args=[endpoint, READ, [(back, i * KIB, target, i * KIB, KIB)]]
            )
            for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        wait_until(lambda: len(ended) == 64)
        assert all(w.status[0] == Status.COMPLETED for w in ended)
        assert endpoint.holdings()["streams"] <= 2
        assert set(owner.content(target).tolist()) == {4}


@waiting
def test_a_receiver_that_is_not_there_refuses_everything_at_once(here: Here, waiting: bool) -> None:
    with silent_receiver() as peer:
        pass
    local = here.offer(KIB)
    endpoint = here.transport.connect(peer)
    row = (local, 0, replace(local, id=0, generation=1), 0, KIB)
    began = time.monotonic()
    if waiting:
        with pytest.raises(TransportError, match="refused"):
            work(endpoint, WRITE, [row])
    else:
        done = work(endpoint, WRITE, [row], waiting=False)
        assert "refused" in str(done.cause_of(0))
        assert not done.unfenced
    assert time.monotonic() - began < 2
    assert peer.suspicions
    assert endpoint.holdings()["streams"] == 0


def test_an_attribute_of_another_incarnation_is_turned_away_with_a_reason(
    owner: OwnerProcess, here: Here
) -> None:
    peer = owner.peer()
    attribute = peer.segment.attributes["tcp"]
    wrong = attribute.payload[:1] + bytes(32) + attribute.payload[33:]
    peer.segment = replace(peer.segment, attributes={"tcp": replace(attribute, payload=wrong)})
    local, target = here.offer(KIB), owner.offer(KIB)
    peer.segment = replace(peer.segment, buffers=owner.peer().segment.buffers)
    endpoint = here.transport.connect(peer)
    with pytest.raises(TransportError, match="closed the connection at the hello"):
        work(endpoint, WRITE, [(local, 0, target, 0, KIB)])


def test_a_new_attribute_is_used_from_the_next_transfer_on(here: Here) -> None:
    local = here.offer(KIB)
    with OwnerProcess() as first, OwnerProcess() as second:
        targets = [o.offer(KIB) for o in (first, second)]
        peer = first.peer()
        endpoint = here.transport.connect(peer)
        assert _works(endpoint, local, targets[0])
        old, new = peer.segment, second.peer().segment
        changed = replace(old, attributes=new.attributes, buffers=new.buffers)
        endpoint.refresh(old, changed)
        peer.segment = changed
        assert _works(endpoint, local, targets[1])
        endpoint.refresh(changed, replace(changed, attributes={}))
        with pytest.raises(TransportError, match="serves tcp no more"):
            work(endpoint, WRITE, [(local, 0, targets[1], 0, KIB)])


# Processes


@waiting
@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_a_peer_killed_mid_transfer_fails_it_with_a_cause(
    here: Here, opcode: Opcode, waiting: bool
) -> None:
    with OwnerProcess() as owner:
        local, remote = here.offer(16 * MIB), owner.offer(16 * MIB)
        peer = owner.peer()
        endpoint = here.transport.connect(peer)
        hammer = Hammer(endpoint, opcode, local, remote, waiting)
        receiver = owner.call("receiver")
        began = time.monotonic()
        owner.kill()
        cause = hammer.end(3.0)
        assert time.monotonic() - began < 3.0
        assert isinstance(cause, TransportError)
        assert str(peer.segment.attributes["tcp"].payload[33:], "ascii") in str(cause)
        wait_until(lambda: process_is_gone(receiver), 3.0)
        assert peer.suspicions
        if hammer.last is not None:
            assert hammer.last.unfenced == (opcode is WRITE)
        endpoint.close("test")


def test_the_receiver_ends_with_its_engine_although_a_forked_child_keeps_the_sockets() -> None:
    with OwnerProcess() as owner:
        owner.offer(KIB)
        child = owner.call("fork_a_child_that_stays")
        receiver = owner.call("receiver")
        try:
            owner.kill()
            wait_until(lambda: process_is_gone(receiver), 5.0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_child_that_was_forked_before_anything_was_served_does_not_keep_the_port() -> None:
    with OwnerProcess() as owner:
        child = owner.call("fork_a_child_that_stays")
        attribute = owner.peer().segment.attributes["tcp"]
        where = address.parse(protocol.Attribute.decode(attribute.payload).address)
        socket.create_connection((where.host, where.port), timeout=5).close()
        try:
            owner.kill()
            wait_until(lambda: _refuses(where.host, where.port), 5, "the receiver to end")
        finally:
            os.kill(child, signal.SIGKILL)


def _refuses(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_what_peers_may_not_reach_is_kept_without_a_receiver_until_there_is_one(
    owner: OwnerProcess, here: Here
) -> None:
    target = owner.offer(KIB)
    with Here() as side:
        private = side.offer(KIB, permission=Permission.LOCAL_READ_WRITE, value=3)
        other = side.offer(KIB, permission=Permission.LOCAL_READ_WRITE, value=4)
        endpoint = side.transport.connect(owner.peer())
        work(endpoint, WRITE, [(private, 0, target, 0, KIB)])
        assert set(owner.content(target).tolist()) == {3}
        side.transport.remove_buffer(other, 1.0)
        assert side.transport.holdings()["processes"] == 0
        assert side.transport.holdings()["threads"] == 1
        public = side.offer(KIB, value=5)
        assert side.transport.holdings()["processes"] == 1
        back = here.transport.connect(FixedPeer(side.segment.snapshot))
        local = here.offer(KIB)
        work(back, READ, [(local, 0, public, 0, KIB)])
        assert set(here.arrays[local.id].tolist()) == {5}
        for refused, kind in ((private, PermissionDenied), (other, StaleHandle)):
            assert isinstance(_cause(back, local, refused), kind)
        endpoint.close("test")
        back.close("test")


@allocated
def test_nothing_lands_in_the_program_that_the_owner_executes(
    here: Here, allocated: bool, tmp_path: Path
) -> None:
    """It maps memory at the very address that a peer goes on writing to, and watches it."""
    with OwnerProcess() as owner:
        local, remote = here.offer(MIB, value=255), owner.offer(MIB, allocated=allocated)
        child = owner.call("fork_a_child_that_stays")  # which keeps the order socket open
        receiver = owner.call("receiver")
        endpoint = here.transport.connect(owner.peer())
        hammer = Hammer(endpoint, WRITE, local, remote)
        program = str(Path(__file__).with_name("tcp_after_exec.py"))
        try:
            owner.tell("exec", program, str(remote.address), str(remote.length), str(tmp_path))
            wait_until((tmp_path / "ready").exists)
            assert isinstance(hammer.end(), TransportError)
            for _ in range(20):
                assert isinstance(_cause(endpoint, local, remote), TransportError)
            wait_until(lambda: process_is_gone(receiver), 5.0)
            assert not process_is_gone(owner.pid)
            (tmp_path / "stop").touch()
            wait_until((tmp_path / "verdict").exists)
            assert (tmp_path / "verdict").read_text() == "untouched"
        finally:
            os.kill(child, signal.SIGKILL)
        endpoint.close("test")


def test_a_receiver_that_was_killed_is_reported_and_new_work_fails_clearly(here: Here) -> None:
    with OwnerProcess() as owner:
        local, remote = here.offer(KIB), owner.offer(KIB)
        peer = owner.peer()
        endpoint = here.transport.connect(peer)
        work(endpoint, WRITE, [(local, 0, remote, 0, KIB)])
        pid = owner.signal_receiver(signal.SIGKILL)
        wait_until(lambda: "tcp" not in owner.peer().segment.attributes)
        events = [e for e in owner.call("events") if e["event"] == "tcp_receiver_ended"]
        assert [e["level"] for e in events] == ["error"]
        assert f"{pid} has ended by signal 9" in events[0]["reason"]
        assert owner.call("holdings")["processes"] == 0
        for _ in range(2):
            assert isinstance(_cause(endpoint, local, remote), TransportError)
        assert peer.suspicions
        owner.call("remove", remote.id)  # nothing can touch it any more
        with pytest.raises(TransportError, match="has ended"):
            owner.offer(KIB)


def test_a_receiver_that_does_not_answer_makes_a_removal_fail_and_later_succeed() -> None:
    with OwnerProcess() as owner:
        remote = owner.offer(KIB)
        pid = owner.signal_receiver(signal.SIGSTOP)
        with pytest.raises(TransportError, match="did not answer"):
            owner.call("remove", remote.id, 0.3)
        os.kill(pid, signal.SIGCONT)
        owner.call("remove", remote.id)
        owner.signal_receiver(signal.SIGSTOP)  # and it can be stopped all the same


def test_stopping_leaves_no_descriptor_thread_process_or_mapping(owner: OwnerProcess) -> None:
    target = owner.offer(MIB)

    def life() -> None:
        with Here() as side:
            endpoint = side.transport.connect(owner.peer())
            back = side.transport.connect(FixedPeer(side.segment.snapshot))
            for memory in (True, False):
                local = side.offer(MIB, memory)
                work(endpoint, WRITE, [(local, 0, target, 0, MIB)], waiting=memory)
            back.close("test")
            side.arrays.clear()
            for buffer in side.buffers.values():
                if buffer.memory_fd >= 0:
                    os.close(buffer.memory_fd)

    life()
    with nothing_stays_behind():
        life()


def test_many_threads_may_stop_connect_and_transfer_at_once(owner: OwnerProcess) -> None:
    target = owner.offer(KIB)
    peer = owner.peer()
    for _ in range(5):
        side = Here().__enter__()
        local = side.offer(KIB)
        endpoint = side.transport.connect(peer)
        hammers = [Hammer(endpoint, WRITE, local, target, waiting=i % 2 == 0) for i in range(4)]
        side.transport.stop()
        side.transport.stop()
        for hammer in hammers:
            assert isinstance(hammer.end(), TransportError)


class SilentPeer(FixedPeer):
    """`streams` are the ends of the connections that were made to it."""

    def __init__(self, segment: SegmentDescriptor, streams: list[socket.socket]) -> None:
        super().__init__(segment)
        self.streams = streams


@contextmanager
def silent_receiver(answers: bytes = b"") -> Iterator[SilentPeer]:
    """A peer whose receiver welcomes streams and then reads nothing more, nor says more than `answers`.

    The number of a request, its third word, is put into answers that have a 0 there.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = []

    def welcome() -> None:
        while True:
            try:
                stream, _ = listener.accept()
            except OSError:
                return
            ends.append(stream)
            hello = protocol.parse_hello(stream.recv(protocol.HELLO_SIZE))
            stream.recv(hello.name_size + protocol.STREAM_SIZE)
            stream.sendall(protocol.pack_answer(protocol.Verdict.OK, 0))
            if answers:
                number = stream.recv(protocol.REQUEST_SIZE)[16:24]
                given = answers[16:24]
                stream.sendall(answers[:16] + (given if any(given) else number) + answers[24:])

    thread = threading.Thread(target=welcome, daemon=True)
    thread.start()
    port = listener.getsockname()[1]
    payload = protocol.Attribute(bytes(32), f"127.0.0.1:{port}").encode()
    segment = SegmentDescriptor(
        "silent:1",
        os.urandom(16),
        1,
        this_host(),
        attributes={"tcp": Attribute(7, "tcp", payload)},
        buffers={0: BufferDescriptor(0, 1, "any", 0, 1, "cpu:0", Permission.GLOBAL_READ_WRITE)},
    )
    yield SilentPeer(segment, ends)
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    listener.close()
    for stream in ends:
        stream.close()


@waiting
@pytest.mark.parametrize(
    "answers",
    [
        b"\0" * 32,
        protocol.pack_answer(protocol.Verdict.OK, 2**63),
        protocol.pack_answer(protocol.Verdict.OK, 0, moved=1),
    ],
    ids=["no-answer", "another-number", "another-length"],
)
@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_a_receiver_that_speaks_nonsense_fails_the_transfer_and_loses_its_stream(
    here: Here, answers: bytes, opcode: Opcode, waiting: bool
) -> None:
    with silent_receiver(answers) as peer:
        local = here.offer(KIB)
        endpoint = here.transport.connect(peer)
        row = (local, 0, replace(local, id=0, generation=1), 0, KIB)
        done = work(endpoint, opcode, [row], timeout=5.0, waiting=waiting)
        assert done.status[0] == Status.FAILED
        assert "nonsense" in str(done.cause_of(0))
        assert endpoint.holdings()["streams"] == 0
