"""Threads for what waits: as many as are needed, some at the most, and gone when they are told."""

from __future__ import annotations

import threading

import pytest

from tent_core.log import Logger
from tent_core.testing.waiting import wait_until
from tent_rdma import workers
from tent_rdma.workers import Workers, within


def test_calls_run_side_by_side_up_to_the_limit() -> None:
    made = Workers("worker-of-a-test", 3, Logger(lambda *_: None))
    barrier, gate = threading.Barrier(4), threading.Event()
    late = threading.Event()

    def call() -> None:
        barrier.wait(30)
        assert gate.wait(30)

    for _ in range(3):
        assert made.submit(call)
    barrier.wait(30)
    assert made.submit(late.set)
    assert not late.is_set()
    gate.set()
    assert late.wait(30)
    assert made.stop(30)


def test_a_call_that_raises_costs_nobody_a_thread() -> None:
    made = Workers("worker-of-a-test", 1, Logger(lambda *_: None))
    done = threading.Event()

    def fail() -> None:
        raise RuntimeError("a mistake")

    assert made.submit(fail)
    assert made.submit(done.set)
    assert done.wait(30)
    assert made.stop(30)


def test_stopping_drops_what_has_not_begun_and_does_not_wait_for_what_hangs() -> None:
    made = Workers("worker-of-a-test", 1, Logger(lambda *_: None))
    begun, gate, dropped = threading.Event(), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        assert gate.wait(30)

    made.submit(hang)
    made.submit(dropped.set)
    assert begun.wait(30)
    assert not made.stop(0.01)
    assert not made.submit(dropped.set)
    gate.set()
    assert made.stop(30)
    assert not dropped.is_set()


def test_threads_are_daemons_and_end_when_they_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "IDLE_S", 0.01)
    made = Workers("worker-of-a-test", 2, Logger(lambda *_: None))
    found: list[threading.Thread] = []
    made.submit(lambda: found.append(threading.current_thread()))
    wait_until(lambda: found and not found[0].is_alive())
    assert found[0].daemon
    again = threading.Event()
    made.submit(again.set)
    assert again.wait(30)
    assert made.stop(30)


def test_within_says_whether_a_call_has_ended_and_raises_what_it_raises() -> None:
    gate = threading.Event()
    assert within(30, "worker-of-a-test", lambda: None)

    def hang() -> None:
        assert gate.wait(30)

    assert not within(0.01, "worker-of-a-test", hang)
    gate.set()

    def fail() -> None:
        raise KeyError("a mistake")

    with pytest.raises(KeyError):
        within(30, "worker-of-a-test", fail)
