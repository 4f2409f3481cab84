"""Work: what transports report, and what the core makes of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tent_core.errors import TransportError
from tent_core.types import Opcode, Status
from tent_core.work import Requests, Work

BROKEN = TransportError("broken")


def requests_of(lengths: list[int]) -> Requests:
    pairs = np.array([[4096 * (i + 1), n] for i, n in enumerate(lengths)], np.uint64).reshape(-1, 2)
    ids = np.zeros(len(lengths), np.int32)
    return Requests(Opcode.WRITE, pairs, pairs.copy(), ids, ids, (0,), (0,), {0: 1}, sum(lengths))


def work_of(n: int) -> tuple[Work, list[Work]]:
    ended: list[Work] = []
    return Work(requests_of([10 + i for i in range(n)]), ended.append), ended


def test_a_completed_range_has_moved_all_its_bytes() -> None:
    work, ended = work_of(3)
    work.complete()
    assert ended == [work]
    assert work.status.tolist() == [Status.COMPLETED] * 3
    assert work.moved.tolist() == [10, 11, 12]


def test_the_end_is_told_once_when_the_last_request_is_reported() -> None:
    work, ended = work_of(3)
    work.complete(0, 1)
    work.fail(BROKEN, 2, 3)
    assert ended == []
    work.refuse(BROKEN, 1, 2)
    assert ended == [work]
    assert work.status.tolist() == [Status.COMPLETED, Status.INITIAL, Status.FAILED]


def test_a_second_report_changes_nothing_and_is_counted() -> None:
    work, ended = work_of(2)
    work.complete()
    work.fail(BROKEN)
    work.complete(0, 1)
    assert work.status.tolist() == [Status.COMPLETED] * 2
    assert work.causes == []
    assert work.surplus == 3
    assert ended == [work]


def test_a_failure_keeps_the_bytes_that_had_arrived_and_its_cause() -> None:
    work, _ = work_of(3)
    work.fail(BROKEN, 1, 3, moved=np.array([5, 0], np.uint64), fenced=False)
    assert work.moved.tolist() == [0, 5, 0]
    assert work.cause_of(1) is BROKEN
    assert work.cause_of(0) is None
    assert work.unfenced


def test_a_report_outside_the_batch_is_refused() -> None:
    work, _ = work_of(2)
    with pytest.raises(IndexError, match=r"\[1, 3\) of a batch of 2"):
        work.complete(1, 3)


@given(st.data())
def test_every_request_is_settled_by_its_first_report_whatever_the_order(
    data: st.DataObject,
) -> None:
    n = data.draw(st.integers(1, 12))
    work, ended = work_of(n)
    expected: list[Status | None] = [None] * n
    surplus = 0
    for _ in range(data.draw(st.integers(0, 12))):
        start = data.draw(st.integers(0, n))
        stop = data.draw(st.integers(start, n))
        kind = data.draw(st.sampled_from(["complete", "fail", "refuse"]))
        if kind == "complete":
            work.complete(start, stop)
        elif kind == "fail":
            work.fail(BROKEN, start, stop)
        else:
            work.refuse(BROKEN, start, stop)
        status = {"complete": Status.COMPLETED, "fail": Status.FAILED, "refuse": Status.INITIAL}[
            kind
        ]
        for i in range(start, stop):
            if expected[i] is None:
                expected[i] = status
            else:
                surplus += 1
    assert work.status.tolist() == [Status.PENDING if s is None else s for s in expected]
    assert work.surplus == surplus
    assert len(ended) == (None not in expected)
