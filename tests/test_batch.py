"""Batches end once, tell everybody who waits, and say what failed and what was tried."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from tent_core.batch import Batch, Try
from tent_core.errors import (
    BufferRevoked,
    StaleHandle,
    TransferFailed,
    TransportError,
    WaitTimeout,
)
from tent_core.inflight import InFlight
from tent_core.types import Status


def batch_of(n: int, *marks: InFlight) -> Batch:
    for mark in marks:
        mark.begin()
    batch = Batch(n, "there", 0.0)
    batch.hold(marks)
    return batch


def moved(n: int) -> np.ndarray:
    return np.full(n, 8, np.uint64)


def test_an_empty_batch_has_ended() -> None:
    assert batch_of(0).wait(0).done


def test_a_batch_ends_with_its_last_row_and_lets_go_of_its_buffers() -> None:
    mark = InFlight()
    batch = batch_of(3, mark)
    batch.settle(np.array([0, 2]), Status.COMPLETED, moved(2), "shm")
    assert not batch.poll()
    assert mark.count == 1
    batch.settle(np.array([1]), Status.COMPLETED, moved(1), "tcp")
    assert batch.poll()
    assert mark.count == 0
    assert batch.transports() == {"shm": 16, "tcp": 8}
    assert batch.status.tolist() == [Status.COMPLETED] * 3


def test_waiting_is_bounded_and_says_what_is_under_way() -> None:
    batch = batch_of(2)
    batch.settle(np.array([0]), Status.COMPLETED, moved(1), "shm")
    with pytest.raises(WaitTimeout, match="1 requests are under way"):
        batch.wait(0.01)


def test_everybody_who_waits_is_woken() -> None:
    batch = batch_of(1)
    waiting = [threading.Thread(target=batch.wait, args=(10,)) for _ in range(4)]
    for thread in waiting:
        thread.start()
    batch.settle(None, Status.COMPLETED, moved(1), "shm")
    for thread in waiting:
        thread.join(10)
    assert not any(thread.is_alive() for thread in waiting)


def test_failures_name_the_request_and_every_attempt() -> None:
    batch = batch_of(5)
    tries = (Try("shm", TransportError("no room"), 0.5), Try("tcp", TransportError("refused"), 1.0))
    batch.settle_failed(np.array([3, 4]), Status.FAILED, None, tries)
    batch.settle(np.arange(3), Status.COMPLETED, moved(3), "shm")
    with pytest.raises(TransferFailed) as raised:
        batch.wait(0)
    text = str(raised.value)
    assert "2 of 5 requests failed" in text
    assert "request 3 and 1 more: shm after 0.500 s: no room; tcp after 1.000 s: refused" in text
    assert batch.wait(0, check=False) is batch


def test_callbacks_run_once_before_and_after_the_end() -> None:
    batch, called = batch_of(1), []
    batch.add_done_callback(called.append)
    batch.settle(None, Status.COMPLETED, moved(1), "shm")
    batch.add_done_callback(called.append)
    assert called == [batch, batch]


async def test_a_batch_can_be_awaited_also_when_another_thread_ends_it() -> None:
    batch = batch_of(1)
    threading.Timer(0.01, batch.settle, (None, Status.COMPLETED, moved(1), "shm")).start()
    assert await asyncio.wait_for(batch, 10) is batch


async def test_cancelling_the_coroutine_leaves_the_batch_under_way() -> None:
    batch = batch_of(1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(batch, 0.01)
    assert not batch.done
    batch.settle(None, Status.COMPLETED, moved(1), "shm")
    assert await batch is batch


async def test_awaiting_a_batch_that_failed_raises() -> None:
    batch = batch_of(1)
    batch.settle_failed(None, Status.FAILED, None, (Try("tcp", TransportError("cut"), 0.0),))
    with pytest.raises(TransferFailed, match="cut"):
        await batch


@pytest.mark.parametrize(
    ("causes", "raised"),
    [
        ([BufferRevoked("a")], BufferRevoked),
        ([BufferRevoked("a"), StaleHandle("b")], StaleHandle),
        ([StaleHandle("a"), TransportError("b")], TransferFailed),
    ],
)
def test_buffers_that_were_taken_away_under_way_are_the_same_error_as_before_the_start(
    causes: list[Exception], raised: type[Exception]
) -> None:
    batch = batch_of(len(causes))
    for i, cause in enumerate(causes):
        batch.settle_failed(np.array([i]), Status.INVALID, None, (Try("tcp", cause, 0.1),))
    with pytest.raises(raised, match="tcp after") as caught:
        batch.wait(1)
    assert type(caught.value) is raised
    assert caught.value.__cause__ is causes[0]
