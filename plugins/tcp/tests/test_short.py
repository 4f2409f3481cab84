"""A short block alone: one call sends it, and one or two take its answer, however that arrives."""

from __future__ import annotations

import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from tcp_harness import Here, OwnerProcess, work

from tent_core.errors import BufferRevoked
from tent_core.testing.harness import requests
from tent_core.transport import BoundCall, Endpoint, LocalBuffer
from tent_core.types import Opcode, Status
from tent_core.work import Work
from tent_tcp.messages import SHORT_BYTES, Message, messages_of
from tent_tcp.patience import Patience, StreamFailed
from tent_tcp.protocol import ANSWER_SIZE, REQUEST_SIZE, Verdict, pack_answer, pack_ok
from tent_tcp.streams import Stream

KIB = 1 << 10
READ, WRITE = Opcode.READ, Opcode.WRITE
SIZE = 4 * KIB

both = pytest.mark.parametrize("opcode", [READ, WRITE], ids=["read", "write"])


def buffer_of(array: np.ndarray) -> LocalBuffer:
    from tent_core.types import Permission

    address = array.__array_interface__["data"][0]
    return LocalBuffer(0, 1, "b", address, array.nbytes, "cpu", Permission.GLOBAL_READ_WRITE)


@contextmanager
def conversation(
    opcode: Opcode, array: np.ndarray
) -> Iterator[tuple[Stream, socket.socket, Message]]:
    """A stream, its other end, and a message of all of `array`."""
    near, far = socket.socketpair()
    stream = Stream(near, "there", b"i" * 16)
    buffer = buffer_of(array)
    (message,) = messages_of(requests(opcode, [(buffer, 0, buffer, 0, array.nbytes)]))
    with far:
        yield stream, far, message
        stream.close()


def answer_to(message: Message, payload: bytes) -> bytes:
    verdict = pack_ok(message.number, message.total)
    return verdict if message.opcode == WRITE else pack_ok(message.number, 0) + payload + verdict


def patience() -> Patience:
    return Patience(float("inf"), 5.0, lambda: None)


def converse(stream: Stream, message: Message) -> bool:
    assert message.short is not None
    return stream.converse(message, message.short, 0.0)


@both
def test_an_answer_that_is_there_ends_the_conversation(opcode: Opcode) -> None:
    array = np.full(SIZE, 7, np.uint8)
    with conversation(opcode, array) as (stream, far, message):
        for value in (1, 2):  # the stream is in step afterwards
            far.sendall(answer_to(message, bytes([value]) * SIZE))
            assert converse(stream, message)
            assert not stream.waiting
            assert stream.pushed
            sent = far.recv(2 * SIZE)
            if opcode is WRITE:
                assert sent[REQUEST_SIZE:] == b"\7" * SIZE
            else:
                assert len(sent) == REQUEST_SIZE
                assert (array == value).all()


@both
@pytest.mark.parametrize("cut", [0, 1, ANSWER_SIZE - 1, ANSWER_SIZE, 100, SIZE + 40, SIZE + 63])
def test_an_answer_in_two_pieces_is_put_together(opcode: Opcode, cut: int) -> None:
    array = np.zeros(SIZE, np.uint8)
    with conversation(opcode, array) as (stream, far, message):
        answer = answer_to(message, b"\5" * SIZE)
        far.sendall(answer[:cut])
        if cut >= len(answer):
            assert converse(stream, message)
            return
        assert not converse(stream, message)
        assert list(stream.waiting) == [message]
        far.sendall(answer[cut:])
        found, verdict, _ = stream.pull_wait(patience())
        assert (found, verdict.verdict) == (message, Verdict.OK)
        assert opcode is WRITE or (array == 5).all()
        assert not stream.waiting


@both
def test_a_refusal_is_left_to_who_reads_step_by_step(opcode: Opcode) -> None:
    array = np.zeros(SIZE, np.uint8)
    with conversation(opcode, array) as (stream, far, message):
        far.sendall(pack_answer(Verdict.DENIED, message.number, text="no"))
        assert not converse(stream, message)
        _, answer, text = stream.pull_wait(patience())
        assert (answer.verdict, text) == (Verdict.DENIED, "no")
        assert not array.any()


@both
@pytest.mark.parametrize(
    "sent",
    [
        b"x" * ANSWER_SIZE,
        pack_ok(2**63, SIZE),
        struct.pack("<4Q", 0x41544E54, 0, 0, 0),
    ],
    ids=["noise", "another number", "no number"],
)
def test_what_is_no_answer_breaks_the_stream(opcode: Opcode, sent: bytes) -> None:
    with conversation(opcode, np.zeros(SIZE, np.uint8)) as (stream, far, message):
        far.sendall(sent)
        assert not converse(stream, message)
        with pytest.raises(StreamFailed, match="nonsense"):
            stream.pull_wait(patience())


@both
def test_the_end_of_the_stream_is_noticed(opcode: Opcode) -> None:
    with conversation(opcode, np.zeros(SIZE, np.uint8)) as (stream, far, message):
        far.shutdown(socket.SHUT_WR)
        assert not converse(stream, message)
        with pytest.raises(StreamFailed, match="closed the connection"):
            stream.pull_wait(patience())


# ------------------------------------------------------------------------- bound calls, over a real receiver


def bound(endpoint: Endpoint, opcode: Opcode, ours: LocalBuffer, theirs: LocalBuffer) -> BoundCall:
    call = endpoint.bind(requests(opcode, [(ours, 0, theirs, 0, ours.length)]))
    assert call is not None
    return call


def go_on(endpoint: Endpoint, opcode: Opcode, ours: LocalBuffer, theirs: LocalBuffer) -> Work:
    """Call it, and if it takes longer give it a work."""
    again = requests(opcode, [(ours, 0, theirs, 0, ours.length)])
    done = bound(endpoint, opcode, ours, theirs)()
    made = Work(again, lambda _: None, may_block=True)
    if done is True:
        made.complete()
    else:
        assert done is not False
        done(made)
    assert made.finished
    return made


@both
@pytest.mark.parametrize("allocated", [True, False], ids=["allocated", "registered"])
@pytest.mark.parametrize("size", [1, SIZE, SHORT_BYTES])
def test_a_bound_call_moves_every_byte_each_time(
    owner: OwnerProcess, here: Here, opcode: Opcode, allocated: bool, size: int
) -> None:
    ours, theirs = here.offer(size, value=3), owner.offer(size, allocated=allocated, value=4)
    endpoint = here.transport.connect(owner.peer())
    for _ in range(50):
        assert go_on(endpoint, opcode, ours, theirs).status[0] == Status.COMPLETED
    expected = 3 if opcode is WRITE else 4
    assert (owner.content(theirs) == expected).all()
    assert (here.arrays[ours.id] == expected).all()


def test_what_is_long_or_many_is_not_bound(owner: OwnerProcess, here: Here) -> None:
    ours, theirs = here.offer(SHORT_BYTES + 1), owner.offer(SHORT_BYTES + 1)
    endpoint = here.transport.connect(owner.peer())
    assert endpoint.bind(requests(WRITE, [(ours, 0, theirs, 0, ours.length)])) is None
    assert endpoint.bind(requests(WRITE, [(ours, 0, theirs, 0, 1)] * 2)) is None


@both
def test_a_peer_that_is_slow_to_answer_is_waited_for_with_a_work(
    owner: OwnerProcess, here: Here, opcode: Opcode
) -> None:
    ours, theirs = here.offer(SIZE, value=3), owner.offer(SIZE, value=4)
    endpoint = here.transport.connect(owner.peer())
    go_on(endpoint, opcode, ours, theirs)
    call = bound(endpoint, opcode, ours, theirs)
    owner.signal_receiver(signal.SIGSTOP)
    try:
        resume = call()
        assert callable(resume)
    finally:
        owner.signal_receiver(signal.SIGCONT)
    made = Work(requests(opcode, [(ours, 0, theirs, 0, SIZE)]), lambda _: None, may_block=True)
    resume(made)
    assert made.status[0] == Status.COMPLETED
    assert (owner.content(theirs) == (3 if opcode is WRITE else 4)).all()
    assert endpoint.holdings() == {"streams": 1}


@both
def test_a_bound_call_to_a_withdrawn_buffer_is_refused(
    owner: OwnerProcess, here: Here, opcode: Opcode
) -> None:
    ours, theirs, kept = here.offer(SIZE), owner.offer(SIZE), owner.offer(SIZE)
    endpoint = here.transport.connect(owner.peer())
    go_on(endpoint, opcode, ours, theirs)
    owner.call("remove", theirs.id)
    refused = go_on(endpoint, opcode, ours, theirs)
    assert refused.status[0] == Status.FAILED
    assert isinstance(refused.cause_of(0), BufferRevoked)
    assert not refused.unfenced
    assert work(endpoint, opcode, [(ours, 0, kept, 0, SIZE)]).status[0] == Status.COMPLETED
    assert endpoint.holdings() == {"streams": 1}


def test_a_closed_endpoint_makes_no_bound_calls(owner: OwnerProcess, here: Here) -> None:
    ours, theirs = here.offer(SIZE), owner.offer(SIZE)
    endpoint = here.transport.connect(owner.peer())
    go_on(endpoint, WRITE, ours, theirs)
    call = bound(endpoint, WRITE, ours, theirs)
    endpoint.close("test")
    assert call() is False
