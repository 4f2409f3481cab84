"""The verdict over what did not complete: settled, or free to move to the next candidate."""

from __future__ import annotations

import numpy as np
import pytest

from tent_core.errors import BufferRevoked, PeerDeparted, PermissionDenied, TransportError
from tent_core.failover import judge
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
