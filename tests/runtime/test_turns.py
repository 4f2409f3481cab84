"""Bulk of several processes takes turns, whoever dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tent_core as tent
import tent_mock
from tent_core import slotfile
from tent_core.errors import TentError
from tent_core.plugins import Registry
from tent_core.slotfile import SIZE, SlotFile
from tent_core.testing import wait_until
from tent_core.testing.steps import StepAlarm
from tent_core.turns import LOOK_S, QUANTUM_S, Turn, Turns
from tent_core.types import Priority

NEVER_S = 30.0
HOLDER = """
    import sys
    from pathlib import Path
    from tent_core.slotfile import SlotFile
    slots = SlotFile(Path(sys.argv[1]))
    print(slots.take("me", int(sys.argv[2])), flush=True)
    if "wait" in sys.argv:
        slots.wait("me", True)
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the slots, for this process and those that it starts."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return slotfile.default_path()


@pytest.fixture
def holders(path: Path) -> Iterator[Any]:
    """Start processes that take a slot."""
    started: list[subprocess.Popen[str]] = []

    def start(count: int = 1, *args: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(HOLDER), str(path), str(count), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        got = process.stdout.readline().strip()
        assert process.stdout.readline().strip() == "ready"
        return process, got

    yield start
    for process in started:
        process.kill()
        process.communicate()


# -------------------------------------------------------------------- the file


def test_no_two_processes_have_one_slot_and_death_gives_it_back(path: Path, holders: Any) -> None:
    first, got = holders(2)
    assert got == "0"
    _, got = holders(2)
    assert got == "1"
    slots = SlotFile(path)
    assert slots.take("me", 2) is None
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert slots.take("me", 2) == 0
    assert slots.take("me", 2) is None
    slots.close()


def test_a_stopped_process_keeps_its_slot_and_a_killed_one_does_not(
    path: Path, holders: Any
) -> None:
    process, _ = holders()
    os.kill(process.pid, signal.SIGSTOP)
    slots = SlotFile(path)
    assert slots.take("me", 1) is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert slots.take("me", 1) == 0
    slots.close()


def test_it_is_known_whether_another_process_waits_until_that_one_is_dead(
    path: Path, holders: Any
) -> None:
    slots = SlotFile(path)
    assert slots.take("me", 1) == 0
    assert not slots.others_wait("me")
    process, got = holders(1, "wait")
    assert got == "None"
    assert slots.others_wait("me")
    process.kill()
    process.wait()
    assert not slots.others_wait("me")
    slots.close()


def test_engines_of_one_process_share_the_file_and_not_the_slots(path: Path) -> None:
    first, second = slotfile.join(), slotfile.join()
    assert first is second
    assert first.take("a", 1) == 0
    assert second.take("b", 1) is None
    slotfile.leave(first)
    assert second.take("b", 1) is None
    second.give_back(0)
    assert second.take("b", 1) == 0
    slotfile.leave(second)
    third = slotfile.join()
    assert third is not first
    assert third.take("c", 1) == 0
    slotfile.leave(third)


def test_the_file_has_a_fixed_size_and_is_the_users_alone(path: Path) -> None:
    SlotFile(path).close()
    found = path.stat()
    assert (found.st_size, found.st_mode & 0o777) == (SIZE, 0o600)


def test_a_file_that_is_not_the_users_alone_or_no_file_is_refused(path: Path) -> None:
    path.touch()
    path.chmod(0o666)
    with pytest.raises(TentError, match="only this user"):
        SlotFile(path)
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(TentError, match="cannot open"):
        SlotFile(path)


# -------------------------------------------------------------------- whose turn it is


class Fake:
    """Slots of one process in a test, `free` of which there are."""

    def __init__(self, free: int = 1) -> None:
        self.free = free
        self.others = False
        self.waits = False

    def take(self, owner: object, count: int) -> int | None:
        if not self.free:
            return None
        self.free -= 1
        return self.free

    def give_back(self, slot: int) -> None:
        self.free += 1

    def wait(self, owner: object, waits: bool) -> None:
        self.waits = waits

    def others_wait(self, owner: object) -> bool:
        return self.others


class Gone:
    def __init__(self) -> None:
        self.turns: list[int] = []

    def turn(self, number: int) -> Turn:
        return Turn(lambda: self.turns.append(number))


def test_all_bulk_of_an_engine_shares_its_slot_and_gives_it_back_at_the_end() -> None:
    slots, gone = Fake(), Gone()
    turns = Turns(slots, 1, 1.0, StepAlarm())
    first, second = gone.turn(1), gone.turn(2)
    assert turns.enter(first)
    assert turns.enter(second)
    assert slots.free == 0
    turns.leave(first)
    turns.leave(first)
    assert slots.free == 0
    turns.leave(second)
    assert slots.free == 1


def test_who_has_had_a_slot_for_long_yields_it_to_who_waits() -> None:
    slots, gone, alarm = Fake(), Gone(), StepAlarm()
    turns = Turns(slots, 1, 1.0, alarm)
    first, second = gone.turn(1), gone.turn(2)
    assert turns.enter(first)
    alarm.advance(1.5 * QUANTUM_S)
    slots.others = True
    assert not turns.enter(second)
    assert slots.waits
    turns.leave(first)
    assert slots.free == 1
    slots.free = 0  # the other took it
    alarm.advance(10 * LOOK_S)
    assert gone.turns == []
    slots.free, slots.others = 1, False
    alarm.advance(2 * LOOK_S)
    assert gone.turns == [2]
    assert not slots.waits


def test_one_piece_after_another_is_no_longer_turn_than_all_at_once() -> None:
    slots, gone, alarm = Fake(), Gone(), StepAlarm()
    turns = Turns(slots, 1, 1.0, alarm)
    slots.others = True
    for number in range(1000):
        turn = gone.turn(number)
        if not turns.enter(turn):
            break
        alarm.advance(LOOK_S)
        turns.leave(turn)
    assert alarm.now() - 1024 <= 1.2 * QUANTUM_S
    assert slots.free == 1


def test_who_waits_long_enough_starts_without_a_slot() -> None:
    slots, gone, alarm = Fake(0), Gone(), StepAlarm()
    turns = Turns(slots, 1, 0.5, alarm)
    waiting = gone.turn(1)
    assert not turns.enter(waiting)
    alarm.advance(0.25)
    assert not turns.enter(gone.turn(2))
    alarm.advance(0.26)
    assert gone.turns == [1]
    turns.leave(waiting)
    alarm.advance(0.25)
    assert gone.turns == [1, 2]


def test_who_does_not_want_its_turn_any_more_is_passed_over() -> None:
    slots, gone, alarm = Fake(0), Gone(), StepAlarm()
    turns = Turns(slots, 1, 5.0, alarm)
    first, second = gone.turn(1), gone.turn(2)
    turns.enter(first)
    turns.enter(second)
    assert turns.withdraw(first)
    assert not turns.withdraw(first)
    slots.free = 1
    alarm.advance(2 * LOOK_S)
    assert gone.turns == [2]
    assert not turns.withdraw(second)


def test_nothing_waits_for_a_turn_of_an_engine_that_closes() -> None:
    slots, gone = Fake(0), Gone()
    turns = Turns(slots, 1, 600.0, StepAlarm())
    turns.enter(gone.turn(1))
    turns.shut()
    assert gone.turns == [1]
    assert turns.enter(gone.turn(2))


# -------------------------------------------------------------------- engines


class World:
    def __init__(self, **qos: Any) -> None:
        registry = Registry.of(tent_mock.declare("mock", cancellation=True))
        base = {
            "transports": {"mock": {"enable": True}},
            "policy": [{"name": "all", "transports": ["mock"]}],
            "log": {"level": "error"},
        }
        mine = {"qos": qos, "scheduling": {"promotion_timeout_s": 600}}
        self.there = tent.Engine(base, plugins=registry)
        self.here = tent.Engine({**base, **mine}, plugins=registry)
        self.there.allocate(4096, name="target")
        self.source = self.here.allocate(4096)
        self.segment = self.here.open_segment(self.there.segment_name)

    def submit(self, priority: Priority) -> tent.Batch:
        where = np.array([0])
        return self.segment.submit(
            "write",
            self.source,
            where,
            self.segment.buffer("target"),
            where,
            64,
            priority=priority,
        )

    def waiting(self) -> int:
        turns = self.here.dispatcher.turns
        assert turns is not None
        return turns.waiting

    def close(self) -> None:
        self.here.close()
        self.there.close()


def test_bulk_waits_for_another_process_until_that_one_is_killed_and_urgent_work_does_not(
    path: Path, holders: Any
) -> None:
    process, _ = holders()
    world = World(shared_slots=1)
    low = world.submit(Priority.LOW)
    world.submit(Priority.HIGH).wait(NEVER_S)
    world.submit(Priority.MEDIUM).wait(NEVER_S)
    wait_until(lambda: world.waiting() == 1)
    assert not low.poll()
    os.kill(process.pid, signal.SIGKILL)
    low.wait(NEVER_S)
    world.close()


def test_a_blocking_call_waits_for_its_turn_as_well(path: Path, holders: Any) -> None:
    process, _ = holders()
    world = World(shared_slots=1)
    remote = world.segment.buffer("target")
    writer = threading.Thread(
        target=lambda: world.segment.write(world.source, remote, priority=Priority.LOW)
    )
    writer.start()
    wait_until(lambda: world.waiting() == 1)
    process.kill()
    writer.join(NEVER_S)
    assert not writer.is_alive()
    world.close()


def test_medium_priority_takes_turns_if_the_settings_say_so(path: Path, holders: Any) -> None:
    process, _ = holders()
    world = World(shared_slots=1, turns="medium")
    medium = world.submit(Priority.MEDIUM)
    world.submit(Priority.HIGH).wait(NEVER_S)
    wait_until(lambda: world.waiting() == 1)
    process.kill()
    medium.wait(NEVER_S)
    world.close()


def test_what_waits_for_its_turn_is_cancelled_at_once(path: Path, holders: Any) -> None:
    holders()
    world = World(shared_slots=1)
    low = world.submit(Priority.LOW)
    wait_until(lambda: world.waiting() == 1)
    low.cancel()
    low.wait(NEVER_S, check=False)
    assert low.status.tolist() == [tent.Status.CANCELED]
    assert world.waiting() == 0
    world.close()


def test_closing_an_engine_ends_what_waits_for_a_turn_and_gives_its_slot_back(
    path: Path, holders: Any
) -> None:
    process, _ = holders()
    world = World(shared_slots=1)
    low = world.submit(Priority.LOW)
    wait_until(lambda: world.waiting() == 1)
    world.close()
    assert low.done
    process.kill()
    process.wait()
    slots = SlotFile(path)
    assert slots.take("me", 1) == 0
    slots.close()


def test_by_default_there_is_no_file_and_nobody_takes_turns(path: Path) -> None:
    world = World()
    world.submit(Priority.LOW).wait(NEVER_S)
    world.close()
    assert not path.exists()
