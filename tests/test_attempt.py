"""What can be cancelled of a first attempt, before and after there is a Carry for it."""

from __future__ import annotations

import numpy as np

from tent_core.attempt import FirstAttempt
from tent_core.errors import TransportError
from tent_core.types import Opcode
from tent_core.work import Requests, Work


class FakeCarry:
    def __init__(self) -> None:
        self.cancels = 0

    def cancel(self) -> None:
        self.cancels += 1


def _work() -> Work:
    block = np.array([[0, 1]], np.uint64)
    ids = np.zeros(1, np.int32)
    return Work(
        Requests(Opcode.WRITE, block, block, ids, ids, (0,), (0,), {0: 1}, 1), lambda _: None
    )


def test_cancelling_interrupts_what_a_transport_has() -> None:
    work, told = _work(), []
    attempt = FirstAttempt(work, told.append, lambda: 5.0)
    attempt.cancel()
    assert work.cancelled
    assert work.expires == 6.0
    assert told == [work]


def test_cancelling_where_the_transport_cannot_only_says_so() -> None:
    work = _work()
    FirstAttempt(work, None, lambda: 5.0).cancel()
    assert work.cancelled


def test_what_has_ended_is_not_interrupted() -> None:
    work, told = _work(), []
    attempt = FirstAttempt(work, told.append, lambda: 5.0)
    work.complete()
    attempt.cancel()
    attempt.ended()
    attempt.cancel()
    assert not told


def test_a_carry_that_goes_on_is_cancelled_whether_that_was_asked_before_or_after() -> None:
    for before in (True, False):
        work, carry = _work(), FakeCarry()
        attempt = FirstAttempt(work, None, lambda: 5.0)
        if before:
            attempt.cancel()
        work.fail(TransportError("cut"))
        attempt.failed(carry)
        if not before:
            attempt.cancel()
        assert carry.cancels == 1
