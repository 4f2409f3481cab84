"""Beside threads that compute a copy keeps the GIL, which else would come back a switch interval later."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import shm_owners as owners
from shm_harness import Pair, Row, blocks, pair, requests

from tent_core import gil
from tent_core.types import Opcode, Status
from tent_core.work import Requests, Work

KIB, MIB = 1 << 10, 1 << 20
INTERVAL_S = 0.5
"""Longer than a full machine takes a processor away for."""


@pytest.fixture(scope="module")
def made() -> Iterator[Pair]:
    with pair(owners.large, size=64 * MIB) as found:
        yield found


def asked(made: Pair, opcode: Opcode, rows: list[Row]) -> Requests:
    return requests(made.node, made.owner.peer, opcode, rows)


@contextmanager
def counting() -> Iterator[Callable[[], int]]:
    """A thread that counts whenever it has the GIL: it gets it within a switch interval only if somebody
    gives it up."""
    before, counted, stop = sys.getswitchinterval(), [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count, daemon=True)
    sys.setswitchinterval(INTERVAL_S)
    try:
        thread.start()  # returns when that thread has had its first interval
        yield lambda: counted[0]
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)


def counted_during(made: Pair, rows: list[Row]) -> int:
    """How far the thread counts while these rows are written; 0 if it never has the GIL meanwhile."""
    work = Work(asked(made, Opcode.WRITE, rows), lambda _: None, may_block=True)
    with counting() as counted:
        before = counted()
        made.endpoint.submit(work)
        after = counted()
    assert (work.status == Status.COMPLETED).all(), work.causes
    made.check(rows[:: max(1, len(rows) // 20)])
    return after - before


@pytest.mark.parametrize(
    ("remote", "count", "block"), [(0, 1, 12 * MIB), (1, 1, 12 * MIB), (1, 400, 32 * KIB)]
)
def test_no_other_thread_runs_during_a_copy_that_is_waited_for(
    made: Pair, remote: int, count: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gil, "contended", lambda: True)
    rows = blocks(count, block, 64 * MIB, (remote,))
    made.transfer(Opcode.WRITE, rows)  # to map memory takes calls that wait
    assert [counted_during(made, rows) for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("crowded", [True, False])
@pytest.mark.parametrize("remote", [0, 1], ids=["allocated", "registered"])
@pytest.mark.parametrize("block", [MIB, 12 * MIB, 40 * MIB])
def test_every_byte_arrives_whether_other_threads_compute_or_not(
    made: Pair, crowded: bool, remote: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gil, "contended", lambda: crowded)
    rows = blocks(1, block, 64 * MIB, (remote,))
    made.owner.ask(owners.fill, remote, 9)
    call = made.endpoint.bind(asked(made, Opcode.READ, rows))
    if call is None:
        made.transfer(Opcode.READ, rows)
    else:
        assert call() is True
    made.check(rows)
