"""Bad addresses, short counts, deadlines: the request concerned fails, with its address, and no other."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
import shm_owners as owners
from shm_harness import Pair, Row, pair, requests

from tent_core.errors import PeerDeparted, TransportError
from tent_core.types import Opcode, Status
from tent_core.work import Work
from tent_shm import stream, syscalls, task

MIB, PAGE = owners.MIB, owners.PAGE
HOLE = MIB // 2
DIRECTIONS = pytest.mark.parametrize("opcode", Opcode)


def spaced(number: int, count: int, size: int = 1000) -> list[Row]:
    return [(0, i * 4096, number, i * 4096, size) for i in range(count)]


@DIRECTIONS
@pytest.mark.parametrize("settings", [{}, {"copy_threads": 3, "split_bytes": "64KiB"}])
def test_a_page_missing_at_the_owner_fails_the_requests_that_touch_it_and_no_others(
    opcode: Opcode, settings: dict[str, Any]
) -> None:
    with pair(owners.with_a_hole, **settings) as made:
        rows = [
            (0, 0, 1, 0, 5000),
            (0, 8192, 1, HOLE - 2 * PAGE, 3 * PAGE),  # two pages are there, the third is not
            (0, 32768, 1, HOLE + 16, 32),
            (0, 65536, 1, HOLE + PAGE, 7000),
            (0, 131072, 1, 8192, MIB // 4),
        ]
        work = made.transfer(opcode, rows)
        assert work.status.tolist() == [4, 6, 6, 4, 4]
        assert work.moved.tolist() == [5000, 2 * PAGE, 0, 7000, MIB // 4]
        assert f"{owners.FIXED_ADDRESS + HOLE:#x}" in str(work.cause_of(1))
        assert f"{owners.FIXED_ADDRESS + HOLE + 16:#x}" in str(work.cause_of(2))
        assert not work.unfenced
        made.check([rows[0], rows[3], rows[4]])


@DIRECTIONS
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("count", [1, 3])
def test_a_page_missing_here_is_an_error_and_no_crash(
    opcode: Opcode, number: int, count: int
) -> None:
    with pair(owners.at_fixed_address) as made:
        made.node.register(owners.anonymous(0x3100_0000_0000, MIB))
        owners.punch(made.node.arrays[2], 0, MIB)
        rows = [
            (2, 100, number, 100, 1000),
            (0, 0, number, 8192, 1000),
            (0, 4096, number, 16384, 1000),
        ]
        work = made.transfer(opcode, rows[:count])
        assert work.status.tolist() == [6, 4, 4][:count]
        assert f"{0x3100_0000_0000 + 100:#x}" in str(work.cause_of(0))


def test_a_batch_of_nothing_but_bad_addresses_ends() -> None:
    with pair(owners.with_a_hole) as made:
        rows = [(0, i, 1, HOLE + i, 1) for i in range(0, PAGE, 2)]
        work = made.transfer(Opcode.WRITE, rows)
        assert (work.status == Status.FAILED).all()
        assert int(work.moved.sum()) == 0


@DIRECTIONS
@pytest.mark.parametrize("number", [0, 1])
def test_short_counts_are_carried_over(
    opcode: Opcode, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = dict(syscalls._VECTOR_CALLS)
    calls: list[int] = []

    def short(call: Any) -> Any:
        def moved(pid: int, local: int, n: int, remote: int, m: int, flags: int) -> int:
            """At most two pieces, and 700 bytes of the second."""
            calls.append(n)
            vectors = [
                np.frombuffer(
                    (owners.ctypes.c_uint64 * (2 * n)).from_address(a), np.uint64
                ).reshape(n, 2)[:2]
                for a in (local, remote)
            ]
            here, there = (vector.copy() for vector in vectors)
            here[1:, 1] = there[1:, 1] = np.minimum(here[1:, 1], np.uint64(700))
            k = len(here)
            return int(call(pid, here.ctypes.data, k, there.ctypes.data, k, flags))

        return moved

    with pair(owners.allocated_and_registered) as made:
        monkeypatch.setattr(
            syscalls, "_VECTOR_CALLS", {key: short(call) for key, call in real.items()}
        )
        rows = spaced(number, 30)
        *where, size = rows[-1]
        rows[-1] = (*where, size - 1)  # of one size they would need no call between mappings
        work = made.transfer(opcode, rows)
        assert (work.status == Status.COMPLETED).all(), work.causes
        assert len(calls) > 15
        monkeypatch.undo()
        made.check(rows)


def test_a_passed_deadline_ends_what_has_not_moved_as_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of 64 KiB, and the deadline passes during the third."""
    steps: list[int] = []
    real = stream.Stream.step
    monkeypatch.setattr(stream, "STEP_BYTES", 1 << 16)
    now = time.monotonic()

    def step(self: stream.Stream, start: int, stop: int) -> int:
        steps.append(start)
        return real(self, start, min(stop, start + (1 << 16)))

    with pair(owners.allocated_and_registered) as made:
        monkeypatch.setattr(stream.Stream, "step", step)
        monkeypatch.setattr(task.time, "monotonic", lambda: now + len(steps))
        work = made.transfer(
            Opcode.WRITE,
            [(0, 0, 1, 0, 200_000), (0, 200_000, 1, 200_000, 500_000)],
            deadline=now + 2.5,
        )
        assert work.status.tolist() == [Status.TIMEOUT, Status.TIMEOUT]
        assert work.moved.tolist() == [3 << 16, 0]
        assert "deadline" in str(work.cause_of(0))


@pytest.mark.parametrize("may_block", [True, False])
def test_what_is_cancelled_ends_after_the_step_that_is_under_way(
    monkeypatch: pytest.MonkeyPatch, may_block: bool
) -> None:
    """Steps of 64 KiB, and nobody wants the rest after the second: nothing is written there later."""
    steps: list[int] = []
    real = stream.Stream.step
    monkeypatch.setattr(stream, "STEP_BYTES", 1 << 16)
    asked = threading.Event()
    cancelled = threading.Event()

    def step(self: stream.Stream, start: int, stop: int) -> int:
        steps.append(start)
        if len(steps) == 2:
            asked.set()
            assert cancelled.wait(10)
        return real(self, start, min(stop, start + (1 << 16)))

    with pair(owners.allocated_and_registered) as made:
        monkeypatch.setattr(stream.Stream, "step", step)
        what = requests(
            made.node,
            made.owner.peer,
            Opcode.WRITE,
            [(0, 0, 1, 0, 200_000), (0, 200_000, 1, 200_000, 500_000)],
        )
        ended = threading.Event()
        work = Work(what, lambda _: ended.set(), may_block=may_block)
        thread = threading.Thread(target=made.endpoint.submit, args=[work], daemon=True)
        thread.start()
        assert asked.wait(10)
        work.cancelled = True
        made.endpoint.cancel(work)
        cancelled.set()
        assert ended.wait(10)
        thread.join(10)
        assert work.status.tolist() == [Status.CANCELED, Status.CANCELED]
        assert work.moved.tolist() == [2 << 16, 0]
        assert len(steps) == 2
        assert not work.unfenced


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EPERM, TransportError), (errno.ESRCH, PeerDeparted), (errno.ENOMEM, TransportError)],
)
def test_an_error_of_the_kernel_fails_all_that_is_left(
    number: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(owners.allocated_and_registered) as made:

        def refuse(*_: int) -> int:
            owners.ctypes.set_errno(number)
            return -1

        monkeypatch.setattr(
            syscalls, "_VECTOR_CALLS", dict.fromkeys(syscalls._VECTOR_CALLS, refuse)
        )
        work = made.transfer(Opcode.WRITE, spaced(1, 5))
        assert (work.status == Status.FAILED).all()
        assert isinstance(work.cause_of(4), kind)
        assert os.strerror(number) in str(work.cause_of(0)) or number == errno.ESRCH


def test_a_mistake_in_a_step_leaves_nothing_unreported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise ZeroDivisionError("a mistake")

    with pair(owners.allocated_and_registered) as made:
        monkeypatch.setattr(stream.Stream, "step", broken)
        work = made.transfer(Opcode.WRITE, spaced(1, 250), may_block=False)
        assert (work.status == Status.FAILED).all()
        assert "a mistake" in str(work.cause_of(0))


def test_blocks_are_copied_one_by_one_where_the_kernels_vectors_are_forbidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tent_shm import transport

    monkeypatch.setattr(transport, "_may_copy_within_this_process", lambda: False)
    with pair(owners.allocated_and_registered) as made:
        made_without_vectors(made)


def made_without_vectors(made: Pair) -> None:
    rows = spaced(0, 200)
    for opcode in Opcode:
        work = made.transfer(opcode, rows)
        assert (work.status == Status.COMPLETED).all()
        made.check(rows[::50])
