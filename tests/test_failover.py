"""The verdict over what did not complete: settled, or free to move to the next candidate."""

from __future__ import annotations

import numpy as np
import pytest

from tent_core.errors import (
    BufferRevoked,
    PeerDeparted,
    PermissionDenied,
    TransportError,
    Unreachable,
)
from tent_core.failover import judge, rest_s
from tent_core.types import Opcode, Status
from tent_core.work import Requests, Work


def work_of(opcode: Opcode, n: int = 4) -> Work:
    pairs = np.full((n, 2), 64, np.uint64)
    ids = np.zeros(n, np.int32)
    return Work(
        Requests(opcode, pairs, pairs, ids, ids, (0,), (0,), {0: 1}, 64 * n), lambda _: None
    )


def test_what_was_refused_at_submit_may_move() -> None:
    work = work_of(Opcode.WRITE)
    work.refuse(TransportError("busy"), 1, 3)
    work.complete(0, 1)
    work.complete(3, 4)
    (verdict,) = judge(work)
    assert verdict.rows.tolist() == [1, 2]
    assert verdict.movable


@pytest.mark.parametrize(
    "mistake", [BufferRevoked("gone"), PermissionDenied("no")], ids=["revoked", "permission"]
)
def test_a_mistake_of_the_caller_is_invalid_and_never_moves(mistake: Exception) -> None:
    work = work_of(Opcode.READ)
    work.fail(mistake)
    (verdict,) = judge(work)
    assert not verdict.movable
    assert verdict.status is Status.INVALID


def test_nothing_moves_when_the_peer_departed() -> None:
    work = work_of(Opcode.READ)
    work.refuse(PeerDeparted("goodbye"))
    (verdict,) = judge(work)
    assert (verdict.movable, verdict.status) == (False, Status.FAILED)


def test_a_write_that_may_still_write_does_not_leave_its_path() -> None:
    work = work_of(Opcode.WRITE)
    work.fail(TransportError("reset"), 0, 2, fenced=False)
    work.fail(TransportError("reset"), 2, 4, fenced=True)
    unknown, fenced = judge(work)
    assert not unknown.movable
    assert "outcome unknown" in str(unknown.cause)
    assert fenced.movable


def test_a_read_may_move_whatever_its_stream_did() -> None:
    work = work_of(Opcode.READ)
    work.fail(TransportError("reset"), fenced=False)
    (verdict,) = judge(work)
    assert verdict.movable


@pytest.mark.parametrize("status", [Status.CANCELED, Status.TIMEOUT])
def test_what_was_cancelled_or_out_of_time_keeps_its_status(status: Status) -> None:
    work = work_of(Opcode.WRITE)
    work.fail(TransportError("late"), status=status)
    (verdict,) = judge(work)
    assert (verdict.movable, verdict.status) == (False, status)


def test_every_failure_may_pass_but_that_of_a_transport_that_never_can() -> None:
    work = work_of(Opcode.WRITE)
    work.fail(TransportError("the stream broke"), 0, 1)
    work.refuse(TransportError("no room"), 1, 2)
    work.refuse(Unreachable("another host"), 2, 3)
    work.refuse(PermissionDenied("no"), 3, 4)
    assert [verdict.may_pass for verdict in judge(work)] == [True, True, False, False]
    assert [verdict.movable for verdict in judge(work)] == [True, True, True, False]


def test_each_rest_is_twice_as_long_as_the_one_before_up_to_a_second() -> None:
    assert [rest_s(tries) for tries in (1, 2, 3)] == [1 / 64, 1 / 32, 1 / 16]
    assert rest_s(7) == rest_s(10_000) == 1.0
