"""The owner ends, executes another program, or stops: nothing lands in the wrong place or counts as done."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import shm_owners as owners
from shm_harness import TIMEOUT, Pair, Row, pair, requests, submit

from tent_core.errors import PeerDeparted
from tent_core.testing import wait_until
from tent_core.types import Opcode, Status
from tent_core.work import Work
from tent_shm import stream, syscalls
from tent_shm.attribute import ProcessAttribute

MIB = owners.MIB
KEEP_GIL = pytest.mark.parametrize(
    "settings", [{}, {"keep_gil_bytes": 0}], ids=["quick", "not_quick"]
)
NUMBERS = pytest.mark.parametrize("number", [0, 1], ids=["allocated", "registered"])


Outcomes = list[tuple[float, int, Exception | None]]
"""When a write was submitted, its status, its cause."""


def hammer(made: Pair, rows: list[Row], stop: threading.Event, outcomes: Outcomes) -> None:
    """Write without pause."""
    what = requests(made.node, made.owner.peer, Opcode.WRITE, rows, reused=True)
    while not stop.is_set():
        began = time.monotonic()
        work, _ = submit(made.endpoint, what)
        outcomes.append((began, int(work.status[0]), work.cause_of(0)))


@KEEP_GIL
@NUMBERS
@pytest.mark.parametrize(
    "by_a_thread", [False, True], ids=["by_the_main_thread", "by_another_thread"]
)
def test_no_byte_reaches_the_program_that_the_owner_executes(
    number: int, by_a_thread: bool, settings: dict[str, Any]
) -> None:
    """The new program has the process's pid, start time and pidfd, and memory at the very same address."""
    with pair(owners.at_fixed_address, **settings) as made:
        stop = threading.Event()
        outcomes: list[Outcomes] = [[], []]
        rows: list[Row] = [(0, 0, number, 0, 4096), (0, 8192, number, 8192, 4096)]
        threads = [
            threading.Thread(target=hammer, args=(made, rows, stop, found), daemon=True)
            for found in outcomes
        ]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: all(len(found) > 20 for found in outcomes))
            made.owner.tell(owners.execute_another_program, by_a_thread)
            assert made.owner.read_line() == b"ready"
            executed = time.monotonic()
            assert made.owner.read_line() == b"0", "bytes landed in the new program"
            wait_until(lambda: all(found[-1][0] >= executed for found in outcomes))
        finally:
            stop.set()
        for thread in threads:
            thread.join(TIMEOUT)
        assert made.owner.process.exitcode is None or made.owner.process.exitcode == 0
        for found in outcomes:
            late = [(status, cause) for began, status, cause in found if began >= executed]
            assert all(status != Status.COMPLETED for status, _ in late)
            assert all(isinstance(cause, PeerDeparted) for _, cause in late)
            assert Status.COMPLETED in {status for _, status, _ in found}
        assert len(made.owner.peer.suspicions) == 1


def raw_writes(target: int, until: threading.Event, answers: set[int]) -> None:
    """process_vm_writev to `target` at the fixed address without any check: errno of each, 0 for success."""
    source = np.ones(4096, np.uint8)
    local = np.array([[source.ctypes.data, 4096]], np.uint64)
    remote = np.array([[owners.FIXED_ADDRESS, 4096]], np.uint64)
    write = syscalls.vector_call(Opcode.WRITE, keep_gil=False)
    while not until.is_set():
        moved = write(target, local.ctypes.data, 1, remote.ctypes.data, 1, 0)
        answers.add(0 if moved == 4096 else (syscalls.last_error().errno or -1))


@pytest.mark.parametrize(
    "by_a_thread", [False, True], ids=["by_the_main_thread", "by_another_thread"]
)
@pytest.mark.parametrize("name", ["keeper", "pid"])
def test_a_call_that_names_the_keeper_never_finds_the_new_program_and_one_that_names_the_process_does(
    name: str, by_a_thread: bool
) -> None:
    """Why the keeper is there. Without any check before or after: the kernel alone keeps the bytes away."""
    with pair(owners.at_fixed_address) as made:
        process = ProcessAttribute.decode(made.owner.peer.segment.attributes["shm"].payload)
        stop, answers = threading.Event(), set[int]()
        arguments = (getattr(process, name), stop, answers)
        thread = threading.Thread(target=raw_writes, args=arguments, daemon=True)
        thread.start()
        try:
            wait_until(lambda: 0 in answers)
            made.owner.tell(owners.execute_another_program, by_a_thread)
            assert made.owner.read_line() == b"ready"
            landed = int(made.owner.read_line())
        finally:
            stop.set()
            thread.join(TIMEOUT)
        if name == "keeper":
            assert landed == 0
            assert answers == {0, errno.ESRCH}
        else:
            assert landed == 4096


@KEEP_GIL
def test_an_owner_that_executes_between_our_check_and_our_call_gets_no_byte(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = dict(syscalls._VECTOR_CALLS)
    with pair(owners.at_fixed_address, **settings) as made:

        def late(call: Any) -> Any:
            def vector_call(*arguments: int) -> int:
                made.owner.tell(owners.execute_another_program, False)
                assert made.owner.read_line() == b"ready"
                return int(call(*arguments))

            return vector_call

        calls = {key: late(call) for key, call in real.items()}
        monkeypatch.setattr(syscalls, "_VECTOR_CALLS", calls)
        work = made.transfer(Opcode.WRITE, [(0, 0, 1, 0, 4096)])
        assert made.owner.read_line() == b"0"
        assert work.status.tolist() == [Status.FAILED]
        assert isinstance(work.cause_of(0), PeerDeparted)


@NUMBERS
def test_an_owner_killed_while_a_quick_copy_runs_makes_it_fail(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(owners.allocated_and_registered) as made:

        def fatal(call: Any) -> Any:
            def copy(*arguments: int) -> Any:
                answer = call(*arguments)
                made.owner.kill()
                made.owner.process.join(TIMEOUT)
                return answer

            return copy

        for name in ("_VECTOR_CALLS", "_MEMMOVES"):
            calls = {key: fatal(call) for key, call in getattr(syscalls, name).items()}
            monkeypatch.setattr(syscalls, name, calls)
        work = made.transfer(Opcode.WRITE, [(0, 0, number, 0, 4096)])
        assert work.status.tolist() == [Status.FAILED]
        assert isinstance(work.cause_of(0), PeerDeparted)


@NUMBERS
def test_an_owner_killed_in_the_middle_of_a_copy_makes_it_fail(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte is copied, into a mapping that nobody looks at any more: not COMPLETED."""
    real = stream.Stream.step
    with pair(owners.allocated_and_registered, keep_gil_bytes=0) as made:

        def step(self: stream.Stream, start: int, stop: int) -> int:
            moved = real(self, start, stop)
            made.owner.kill()
            made.owner.process.join(TIMEOUT)
            return moved

        monkeypatch.setattr(stream.Stream, "step", step)
        rows: list[Row] = [(0, 0, number, 0, MIB // 2), (0, MIB // 2, number, MIB // 2, 5)]
        work = made.transfer(Opcode.WRITE, rows, may_block=False)
        assert work.status.tolist() == [Status.FAILED, Status.FAILED]
        assert work.moved.tolist() == [0, 0]
        cause = work.cause_of(0)
        assert isinstance(cause, PeerDeparted)
        assert str(made.owner.pid) in str(cause)
        assert not work.unfenced
        wait_until(lambda: made.owner.peer.suspicions)
        assert made.owner.peer.suspicions == [cause]


@NUMBERS
@pytest.mark.parametrize("opcode", Opcode)
def test_a_large_copy_under_way_when_its_owner_is_killed_never_completes(
    number: int, opcode: Opcode
) -> None:
    with pair(owners.large, size=64 * MIB) as made:
        rows = [(0, 0, number, 0, 64 * MIB)] * 64
        done = threading.Event()
        what = requests(made.node, made.owner.peer, opcode, rows)
        work = Work(what, lambda _: done.set(), may_block=False)
        made.endpoint.submit(work)
        wait_until(lambda: made.endpoint.holdings()["tasks"])
        made.owner.kill()
        assert done.wait(3), "a killed owner must end transfers within 3 s"
        assert work.surplus == 0
        assert work.status.tolist() == [Status.FAILED] * 64
        assert isinstance(work.cause_of(63), PeerDeparted)


@KEEP_GIL
@NUMBERS
def test_nothing_is_accepted_after_the_owner_has_ended_and_the_engine_is_told_once(
    number: int, settings: dict[str, Any]
) -> None:
    with pair(owners.allocated_and_registered, **settings) as made:
        rows: list[Row] = [(0, 0, number, 0, 4096)]
        what = requests(made.node, made.owner.peer, Opcode.WRITE, rows, reused=True)
        assert submit(made.endpoint, what)[0].status.tolist() == [Status.COMPLETED]
        made.owner.kill()
        wait_until(lambda: made.owner.peer.suspicions)
        for _ in range(3):
            work, _ = submit(made.endpoint, what)
            assert work.status.tolist() == [Status.FAILED]
            assert isinstance(work.cause_of(0), PeerDeparted)
        assert len(made.owner.peer.suspicions) == 1
        with pytest.raises(PeerDeparted):
            made.node.transport.connect(made.owner.peer)


@NUMBERS
def test_a_forked_child_that_outlives_the_owner_does_not_stand_for_it(number: int) -> None:
    """The child has the owner's memory, its page and its descriptors."""
    with pair(owners.allocated_and_registered) as made:
        child = made.owner.ask(owners.fork_a_child)
        try:
            made.owner.kill()
            wait_until(lambda: made.owner.peer.suspicions)
            work = made.transfer(Opcode.WRITE, [(0, 0, number, 0, 4096)])
            assert work.status.tolist() == [Status.FAILED]
        finally:
            os.kill(child, signal.SIGKILL)


@NUMBERS
def test_a_peer_that_has_stopped_its_transport_serves_no_more(number: int) -> None:
    with pair(owners.allocated_and_registered) as made:
        assert made.transfer(Opcode.WRITE, [(0, 0, number, 0, 10)]).status.tolist() == [4]
        made.owner.ask(owners.stop_transport)
        work = made.transfer(Opcode.WRITE, [(0, 0, number, 0, 10)])
        assert work.status.tolist() == [Status.FAILED]
        assert "has stopped its shm transport" in str(work.cause_of(0))


def test_a_stopped_owner_is_alive_and_its_memory_can_be_used() -> None:
    """SIGSTOP: one-sided transfers need nothing of the owner's threads."""
    with pair(owners.allocated_and_registered) as made:
        os.kill(made.owner.pid, signal.SIGSTOP)
        try:
            for number in (0, 1):
                work = made.transfer(Opcode.WRITE, [(0, 0, number, 0, 5000)])
                assert work.status.tolist() == [Status.COMPLETED]
            assert made.owner.peer.suspicions == []
        finally:
            os.kill(made.owner.pid, signal.SIGCONT)
        made.check([(0, 0, 0, 0, 5000), (0, 0, 1, 0, 5000)])
