"""What can be cancelled of a first attempt, before and after there is a Carry for it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from tent_core.attempt import FirstAttempt, FirstWork
from tent_core.batch import Options
from tent_core.errors import TransportError
from tent_core.planning import Group
from tent_core.types import Opcode
from tent_core.work import Requests, Work


class FakeCarry:
    def __init__(self) -> None:
        self.cancels = 0

    def cancel(self) -> None:
        self.cancels += 1


class FakeEndpoint:
    def __init__(self) -> None:
        self.told: list[Work] = []

    def cancel(self, work: Work) -> None:
        self.told.append(work)


def _work() -> FirstWork:
    block = np.array([[0, 1]], np.uint64)
    ids = np.zeros(1, np.int32)
    requests = Requests(Opcode.WRITE, block, block, ids, ids, (0,), (0,), {0: 1}, 1)
    entry = SimpleNamespace(devices=(), qp_pool=None)
    group = Group(requests, None, SimpleNamespace(entry=entry, candidates=("t",)))
    dispatcher = SimpleNamespace(now=lambda: 5.0, log=None)
    work = FirstWork(dispatcher, None, None, group, Options(), 60.0, 0.0, False)
    work.on_finished = lambda _: None
    return work


def test_cancelling_interrupts_what_a_transport_has() -> None:
    work, endpoint = _work(), FakeEndpoint()
    attempt = FirstAttempt(work, endpoint)
    attempt.cancel()
    assert work.cancelled
    assert work.expires == 6.0
    assert endpoint.told == [work]


def test_cancelling_where_the_transport_cannot_only_says_so() -> None:
    work = _work()
    FirstAttempt(work, None).cancel()
    assert work.cancelled


def test_what_has_ended_is_not_interrupted() -> None:
    work, endpoint = _work(), FakeEndpoint()
    attempt = FirstAttempt(work, endpoint)
    work.complete()
    attempt.cancel()
    attempt.ended()
    attempt.cancel()
    assert not endpoint.told


def test_a_carry_that_goes_on_is_cancelled_whether_that_was_asked_before_or_after() -> None:
    for before in (True, False):
        work, carry = _work(), FakeCarry()
        attempt = FirstAttempt(work, None)
        if before:
            attempt.cancel()
        work.fail(TransportError("cut"))
        attempt.failed(carry)
        if not before:
            attempt.cancel()
        assert carry.cancels == 1
