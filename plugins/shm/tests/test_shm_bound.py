"""A bound request moves what `submit` would move, under the same conditions, or says that it did not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import shm_owners as owners
from shm_harness import TIMEOUT, Pair, Row, pair, requests, submit

from tent_core.errors import PeerDeparted
from tent_core.testing import wait_until
from tent_core.transport import BoundCall
from tent_core.types import Opcode, Status
from tent_shm import bound
from tent_shm.stream import Stream, Whole

MIB = owners.MIB
NUMBERS = pytest.mark.parametrize("number", [0, 1], ids=["allocated", "registered"])


@pytest.fixture(scope="module")
def six() -> Iterator[Pair]:
    with pair(owners.six_buffers) as made:
        yield made


def bind(made: Pair, opcode: Opcode, rows: list[Row]) -> BoundCall | None:
    return made.endpoint.bind(requests(made.node, made.owner.peer, opcode, rows, reused=True))


def bound_write(made: Pair, number: int, size: int = 4096) -> BoundCall:
    carry_out = bind(made, Opcode.WRITE, [(0, 0, number, 0, size)])
    assert carry_out is not None
    return carry_out


@pytest.mark.parametrize("opcode", Opcode)
@pytest.mark.parametrize("here", [0, 1])
@NUMBERS
@pytest.mark.parametrize("size", [1, 4096, 65_537, 1_000_001])
def test_every_byte_of_a_bound_request_arrives_each_time(
    six: Pair, opcode: Opcode, here: int, number: int, size: int
) -> None:
    rows: list[Row] = [(here, 7, number, 12_345, size)]
    carry_out = bind(six, opcode, rows)
    assert carry_out is not None
    for seed in (number, 60):
        six.owner.ask(owners.fill, number, seed)
        assert carry_out()
        six.check(rows)


def test_what_several_threads_move_faster_is_left_to_submit() -> None:
    with pair(owners.allocated_and_registered, split_bytes="64KiB") as made:
        assert bind(made, Opcode.WRITE, [(0, 0, 0, 0, 1 << 18)]) is None


def test_what_is_refused_is_left_to_submit(six: Pair) -> None:
    peer = six.owner.peer
    what = requests(six.node, peer, Opcode.WRITE, [(0, 0, 0, 0, 10)], reused=True)
    before, peer.segment = peer.segment, peer.without(0)
    try:
        six.endpoint.refresh(before, peer.segment)
        assert six.endpoint.bind(what) is None
    finally:
        peer.segment = before


@NUMBERS
def test_a_buffer_that_is_gone_gets_no_byte(number: int) -> None:
    with pair(owners.allocated_and_registered) as made:
        carry_out = bound_write(made, number)
        assert carry_out()
        made.owner.ask(owners.fill, number, 5)
        before = made.owner.ask(owners.digest, number)
        peer = made.owner.peer
        made.endpoint.refresh(peer.segment, peer.without(number))
        assert not carry_out()
        assert made.owner.ask(owners.digest, number) == before


@NUMBERS
def test_nothing_moves_once_the_connection_is_closed_or_the_owner_has_ended(number: int) -> None:
    with pair(owners.allocated_and_registered) as made:
        carry_out = bound_write(made, number)
        made.owner.kill()
        wait_until(lambda: made.owner.peer.suspicions)
        assert not carry_out()
        made.endpoint.close("the test ends")
        assert not carry_out()


@pytest.mark.parametrize("size", [4096, MIB // 2], ids=["quick", "not_quick"])
@NUMBERS
def test_an_owner_killed_during_a_bound_copy_has_not_received_it(
    number: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bound._arranged

    def fatal(stream: Stream, whole: Whole, quick: bool) -> Whole:
        move, answer = real(stream, whole, quick)

        def copy() -> Any:
            moved = move()
            made.owner.kill()
            made.owner.process.join(TIMEOUT)
            return moved

        return Whole(copy, answer)

    with pair(owners.allocated_and_registered) as made:
        monkeypatch.setattr(bound, "_arranged", fatal)
        assert not bound_write(made, number, size)()
        what = requests(
            made.node, made.owner.peer, Opcode.WRITE, [(0, 0, number, 0, size)], reused=True
        )
        work, _ = submit(made.endpoint, what)
        assert work.status.tolist() == [Status.FAILED]
        assert isinstance(work.cause_of(0), PeerDeparted)


def test_a_buffer_stays_mapped_until_the_bound_copy_has_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = bound._arranged
    copying, go_on = threading.Event(), threading.Event()

    def slow(stream: Stream, whole: Whole, quick: bool) -> Whole:
        move, answer = real(stream, whole, quick)

        def copy() -> Any:
            copying.set()
            assert go_on.wait(TIMEOUT)
            return move()

        return Whole(copy, answer)

    with pair(owners.allocated_and_registered) as made:
        monkeypatch.setattr(bound, "_arranged", slow)
        carry_out = bound_write(made, 0)
        answers: list[object] = []
        thread = threading.Thread(target=lambda: answers.append(carry_out()), daemon=True)
        thread.start()
        assert copying.wait(TIMEOUT)
        peer = made.owner.peer
        made.endpoint.refresh(peer.segment, peer.without(0))
        assert made.endpoint.holdings()["mappings"] == 1
        go_on.set()
        thread.join(TIMEOUT)
        assert answers == [False]
        assert made.endpoint.holdings()["mappings"] == 0


def test_a_short_copy_to_a_bad_address_is_left_to_submit_which_says_which(six: Pair) -> None:
    what = requests(six.node, six.owner.peer, Opcode.WRITE, [(1, 0, 1, 0, 4096)], reused=True)
    what.local = np.array([[1 << 40, 4096]], np.uint64)
    carry_out = six.endpoint.bind(what)
    assert carry_out is not None
    assert not carry_out()
    work, _ = submit(six.endpoint, what)
    assert "bad address" in str(work.cause_of(0))
