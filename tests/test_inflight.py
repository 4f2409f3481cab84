"""Marks of use, and the queue in which plugins' calls run."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tent_core.errors import ClosedError
from tent_core.inflight import InFlight, begin_all
from tent_core.serial import SerialQueue


def test_a_shut_gate_drains_with_its_last_use() -> None:
    gate, told = InFlight(), []
    assert gate.begin()
    assert gate.begin()
    gate.when_drained(lambda: told.append("drained"))
    gate.shut()
    assert not gate.begin()
    gate.end()
    assert told == []
    gate.end()
    assert told == ["drained"]


def test_an_open_gate_does_not_drain_although_nobody_uses_it() -> None:
    gate = InFlight()
    gate.begin()
    gate.end()
    assert not gate.wait_drained(0)
    gate.shut()
    assert gate.wait_drained(0)


def test_marking_several_marks_all_or_none() -> None:
    gates = [InFlight() for _ in range(3)]
    assert begin_all(gates) is None
    assert [g.count for g in gates] == [1, 1, 1]
    gates[1].shut()
    assert begin_all(gates) is gates[1]
    assert [g.count for g in gates] == [1, 1, 1]


@given(st.lists(st.sampled_from(["begin", "end", "shut"]), max_size=30))
def test_draining_is_told_exactly_once_and_only_when_shut_and_unused(steps: list[str]) -> None:
    gate, told, uses, shut = InFlight(), [], 0, False
    gate.when_drained(lambda: told.append(1))
    for step in steps:
        if step == "begin":
            assert gate.begin() is not shut
            uses += not shut
        elif step == "end" and uses:
            gate.end()
            uses -= 1
        elif step == "shut" and uses:  # a gate that is shut while unused drains at the next look
            gate.shut()
            shut = True
    if shut and not uses:
        assert told == [1]
    else:
        assert told == []


def test_calls_run_in_order_and_errors_reach_the_caller() -> None:
    calls, seen = SerialQueue("calls"), []
    futures = [calls.submit(lambda i=i: seen.append(i)) for i in range(100)]
    broken = calls.submit(lambda: 1 // 0)
    for future in futures:
        future.result(5)
    assert seen == list(range(100))
    assert isinstance(broken.exception(5), ZeroDivisionError)
    assert calls.close(5)


def test_a_queue_that_was_closed_takes_no_more_calls_but_ends_those_it_has() -> None:
    calls, entered, gate = SerialQueue("calls"), threading.Event(), threading.Event()
    blocked = calls.submit(lambda: (entered.set(), gate.wait(5))[1])
    assert entered.wait(5)
    queued = calls.submit(lambda: "done")
    assert not calls.close(0)
    with pytest.raises(ClosedError):
        calls.submit(lambda: None)
    assert calls.busy_for() > 0
    gate.set()
    assert blocked.result(5)
    assert queued.result(5) == "done"
    assert calls.close(5)
    assert calls.busy_for() == 0
