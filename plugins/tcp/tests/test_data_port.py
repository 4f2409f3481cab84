"""What strangers and broken peers send to the data port costs them their connection, and nobody else."""

from __future__ import annotations

import itertools
import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest
from tcp_harness import Here, OwnerProcess, work
from tcp_stranger import Stranger, attribute_of, request

from tent_core.testing import wait_until
from tent_core.types import Opcode, Status
from tent_tcp.protocol import (
    ANSWER_SIZE,
    MAX_TOTAL,
    READ,
    SECRET_SIZE,
    WRITE,
    Verdict,
    build_request,
    parse_answer,
    request_words,
)

KIB = 1 << 10


@pytest.fixture(scope="module", autouse=True)
def served(owner: OwnerProcess) -> None:
    """Whichever test comes first, the receiver has started."""
    owner.offer(KIB)


@contextmanager
def a_good_peer(owner: OwnerProcess, here: Here) -> Iterator[Callable[[], None]]:
    """What is yielded has the good peer served, once; it is served before and after the block as well."""
    local, remote = here.offer(8 * KIB), owner.offer(8 * KIB)
    endpoint = here.transport.connect(owner.peer())
    values = itertools.cycle(range(1, 250))

    def serve() -> None:
        value = next(values)
        here.arrays[local.id][:] = value
        began = time.monotonic()
        done = work(endpoint, Opcode.WRITE, [(local, 0, remote, 0, 8 * KIB)])
        assert done.status[0] == Status.COMPLETED
        assert time.monotonic() - began < 5
        assert set(owner.content(remote).tolist()) == {value}

    serve()
    yield serve
    serve()
    endpoint.close("test")


def test_half_a_message_and_then_silence_costs_that_connection_only(
    owner: OwnerProcess, here: Here
) -> None:
    target = owner.offer(64 * KIB)
    whole = request(WRITE, target) + bytes(64 * KIB)
    with a_good_peer(owner, here) as serve, ExitStack() as stack:
        for size in (1, 63, 64, 65, 40 * KIB, len(whole) - 1):
            stranger = stack.enter_context(Stranger(owner)).enter()
            stranger.socket.sendall(whole[:size])
            serve()


def test_a_peer_that_asks_and_never_reads_costs_that_connection_only(
    owner: OwnerProcess, here: Here
) -> None:
    target = owner.offer(32 << 20)
    with a_good_peer(owner, here) as serve, Stranger(owner) as stranger:
        stranger.enter()
        stranger.socket.sendall(request(READ, target) * 20)
        for _ in range(5):
            serve()


def test_ten_thousand_random_strings_harm_nobody(owner: OwnerProcess, here: Here) -> None:
    generator = random.Random(42)
    before, attribute = owner.call("receiver"), attribute_of(owner)
    with a_good_peer(owner, here) as serve:
        for round_ in range(10_000):
            with Stranger(attribute) as stranger, suppress(ConnectionError):
                stranger.socket.sendall(generator.randbytes(generator.randrange(1, 300)))
            if round_ % 1000 == 0:
                serve()
    assert owner.call("receiver") == before


def test_mutations_of_valid_messages_harm_nobody(owner: OwnerProcess, here: Here) -> None:
    generator = random.Random(43)
    target, witness = owner.offer(4 * KIB), owner.offer(4 * KIB, value=77)
    before, attribute = owner.call("receiver"), attribute_of(owner)
    ids = np.array([target.id] * 8, np.int32)
    remote = np.array([(target.address + 512 * i, 512) for i in range(8)], np.uint64)
    many = build_request(WRITE, 9, 4 * KIB, ids, target.generation, remote).tobytes()
    one = request(WRITE, target)
    with a_good_peer(owner, here) as serve:
        for round_ in range(1500):
            with Stranger(attribute) as stranger:
                hello = stranger.hello()
                message = bytearray(hello + generator.choice((one, many)) + bytes(4 * KIB))
                start = generator.choice((0, len(hello)))
                for _ in range(generator.randrange(1, 4)):
                    position = generator.randrange(start, len(hello) + 9 * 32)
                    message[position] ^= 1 << generator.randrange(8)
                with suppress(ConnectionError):
                    stranger.socket.sendall(message[: generator.randrange(1, len(message) + 1)])
            if round_ % 300 == 0:
                serve()
    assert owner.call("receiver") == before
    assert set(owner.content(witness).tolist()) == {77}


def test_a_wrong_secret_gets_the_connection_closed_and_a_log_line(owner: OwnerProcess) -> None:
    with Stranger(owner) as stranger:
        stranger.socket.sendall(stranger.hello(os.urandom(SECRET_SIZE)) + bytes(100))
        assert stranger.is_turned_away()
    events = wait_until(
        lambda: [e for e in owner.call("events") if e["event"] == "tcp_stream_closed"]
    )
    assert all(e["level"] == "warning" for e in events)


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1, 2**64 - 1, 2**64 - 1)],
        [(0, 1, 0, 2**63), (0, 1, 0, 2**63)],
        [(0, 1, 0, 2**53), (0, 1, 0, 2**53 + 1)],
        [(0, 1, 0, 0), (0, 1, 0, 5)],
        [(0, 1, 0, MAX_TOTAL + 1)],
    ],
)
def test_lengths_that_overflow_get_the_connection_closed(
    owner: OwnerProcess, rows: list[tuple[int, int, int, int]]
) -> None:
    message = np.array([request_words(WRITE, 1, rows[0])[:4], *rows], np.uint64)
    message[0, 1] = len(rows)
    message[0, 3] = sum(r[3] for r in rows) % 2**64
    with Stranger(owner) as stranger:
        stranger.enter().socket.sendall(message.tobytes())
        assert stranger.is_turned_away()


@pytest.mark.parametrize("start", [2**53 + 1, 2**63, 2**64 - 8, 0, 1])
def test_addresses_far_away_are_refused_and_the_stream_goes_on(
    owner: OwnerProcess, start: int
) -> None:
    target = owner.offer(KIB, value=3)
    with Stranger(owner) as stranger:
        stranger.enter()
        row = (target.id, target.generation, start, 16)
        for _ in range(2):
            message = np.array(request_words(WRITE, 8, row), np.uint64).tobytes()
            stranger.socket.sendall(message + bytes(16))
            answer = parse_answer(stranger.exactly(ANSWER_SIZE))
            assert answer.verdict is Verdict.OUT_OF_RANGE
            stranger.exactly(answer.text_size)
        stranger.socket.sendall(request(READ, target))
        assert parse_answer(stranger.exactly(ANSWER_SIZE)).verdict is Verdict.OK
        assert set(stranger.exactly(KIB)) == {3}
        assert parse_answer(stranger.exactly(ANSWER_SIZE)).moved == KIB
    assert set(owner.content(target).tolist()) == {3}


def test_messages_may_arrive_byte_by_byte_and_many_at_once(owner: OwnerProcess) -> None:
    target = owner.offer(KIB)
    with Stranger(owner) as stranger:
        stranger.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = stranger.hello() + request(WRITE, target) + bytes([5]) * KIB
        for position in range(0, len(hello), 13):
            stranger.socket.sendall(hello[position : position + 13])
        assert parse_answer(stranger.exactly(ANSWER_SIZE)).verdict is Verdict.OK
        assert parse_answer(stranger.exactly(ANSWER_SIZE)).moved == KIB
        assert set(owner.content(target).tolist()) == {5}
        stranger.socket.sendall((request(WRITE, target) + bytes([6]) * KIB) * 50)
        for _ in range(50):
            assert parse_answer(stranger.exactly(ANSWER_SIZE)).moved == KIB
    assert set(owner.content(target).tolist()) == {6}


@pytest.fixture(scope="module")
def strict() -> Iterator[OwnerProcess]:
    """An owner whose receiver allows little."""
    with OwnerProcess(max_streams=8, handshake_timeout=0.5, stall_timeout=1.0) as process:
        process.offer(KIB)  # before which there is no receiver
        yield process


def test_a_slow_loris_is_closed_and_takes_no_room(strict: OwnerProcess, here: Here) -> None:
    with a_good_peer(strict, here) as serve, ExitStack() as stack:
        crowd = [stack.enter_context(Stranger(strict)) for _ in range(30)]
        for stranger in crowd:
            stranger.socket.sendall(b"T")
        assert strict.call("counters")["streams"] <= 8
        serve()
        assert all(stranger.is_turned_away() for stranger in crowd)


def test_a_peer_that_stalls_within_a_message_is_closed(strict: OwnerProcess, here: Here) -> None:
    target = strict.offer(KIB)
    with a_good_peer(strict, here), Stranger(strict) as stranger:
        stranger.enter().socket.sendall(request(WRITE, target)[:40])
        assert stranger.is_turned_away()


def test_a_peer_that_is_silent_between_messages_is_kept(strict: OwnerProcess) -> None:
    target = strict.offer(KIB)
    with Stranger(strict) as stranger:
        stranger.enter()
        time.sleep(1.6)  # longer than both deadlines: this is what is tested
        stranger.socket.sendall(request(READ, target))
        assert parse_answer(stranger.exactly(ANSWER_SIZE)).verdict is Verdict.OK


def test_streams_beyond_the_limit_are_turned_away_with_a_reason(strict: OwnerProcess) -> None:
    with ExitStack() as stack:
        peers = [stack.enter_context(Stranger(strict)).enter() for _ in range(8)]
        late = stack.enter_context(Stranger(strict))
        with suppress(ConnectionError):
            late.socket.sendall(late.hello())
        assert late.is_turned_away()
        target = strict.offer(KIB)
        peers[0].socket.sendall(request(READ, target))
        assert parse_answer(peers[0].exactly(ANSWER_SIZE)).verdict is Verdict.OK
    wait_until(lambda: strict.call("counters")["streams"] == 0)


def test_the_receiver_stays_small(owner: OwnerProcess) -> None:
    owner.offer(KIB)  # before which there is none
    with open(f"/proc/{owner.call('receiver')}/status") as status:
        own = [line.split()[1] for line in status if line.startswith(("RssAnon", "RssFile"))]
    assert sum(map(int, own)) < 40 * KIB  # in KiB


def test_reset_connections_are_nothing_special(owner: OwnerProcess, here: Here) -> None:
    with a_good_peer(owner, here) as serve:
        for _ in range(20):
            with Stranger(owner) as stranger:
                stranger.enter()
                target = owner.offer(KIB)
                stranger.socket.sendall(request(WRITE, target)[:60])
                linger = struct.pack("ii", 1, 0)
                stranger.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        serve()
