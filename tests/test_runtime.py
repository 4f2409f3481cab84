"""What becomes of tasks that wait, take too long, or that nobody wants any more; over mock transports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tent_core as tent
import tent_mock
from tent_core.plugins import Registry
from tent_core.testing import wait_until
from tent_core.types import Priority, Status
from tent_mock.controller import Controller

KIB = 1 << 10
SIZE = 64 * KIB
NEVER_S = 30.0


class World:
    """Two engines with the mock transports `first` and `second`, and a buffer of 64 KiB on each side."""

    def __init__(self, config: dict[str, Any] | None = None, **capabilities: Any) -> None:
        claimed = {"cancellation": True, **capabilities}
        self.registry = Registry.of(
            tent_mock.declare("first", 1001, **claimed),
            tent_mock.declare("second", 1002, **claimed),
        )
        base = {
            "transports": {"first": {"enable": True}, "second": {"enable": True}},
            "policy": [{"name": "both", "transports": ["first", "second"]}],
            "log": {"level": "error"},
        }
        self.there = tent.Engine(base, plugins=self.registry)
        self.here = tent.Engine({**base, **(config or {})}, plugins=self.registry)
        self.target = self.there.allocate(SIZE, name="target")
        self.source = self.here.allocate(SIZE, name="source")
        self.source.array[:] = np.random.default_rng(3).integers(0, 256, SIZE, np.uint8)
        self.segment = self.here.open_segment(self.there.segment_name)
        self.remote = self.segment.buffer("target")

    def mock(self, name: str = "first") -> Controller:
        return tent_mock.controller(self.here, name)

    def submit(self, start: int = 0, length: int = 256, **options: Any) -> tent.Batch:
        offset = np.array([start])
        return self.segment.submit(
            "write", self.source, offset, self.remote, offset, length, **options
        )

    def right(self) -> bool:
        return bool((self.target.array == self.source.array).all())

    def close(self) -> None:
        for name in ("first", "second"):
            self.mock(name).clear()
            self.mock(name).release()
        self.here.close()
        self.there.close()


Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    worlds: list[World] = []

    def made(config: dict[str, Any] | None = None, **capabilities: Any) -> World:
        worlds.append(World(config, **capabilities))
        worlds[-1].segment.write(worlds[-1].source[:1], worlds[-1].remote[:1])  # connected
        return worlds[-1]

    yield made
    for world in worlds:
        world.close()


def statuses(batch: tent.Batch) -> set[Status]:
    return {Status(s) for s in batch.status.tolist()}


# -------------------------------------------------------------------- cancellation


def test_a_cancelled_transfer_ends_as_cancelled_where_its_transport_can(make: Make) -> None:
    world = make()
    world.mock().plan("hang")
    batch = world.submit()
    world.mock().wait_held(1)
    batch.cancel()
    batch.cancel()
    batch.wait(NEVER_S, check=False)
    assert statuses(batch) == {Status.CANCELED}
    with pytest.raises(tent.TransferFailed, match="cancel"):
        batch.check()


def test_a_cancelled_transfer_ends_by_itself_where_its_transport_cannot(make: Make) -> None:
    world = make(cancellation=False)
    world.mock().plan("hang")
    batch = world.submit()
    world.mock().wait_held(1)
    batch.cancel()
    assert not batch.poll()
    world.mock().release()
    batch.wait(NEVER_S, check=False)
    assert statuses(batch) == {Status.COMPLETED}


def test_what_was_cancelled_does_not_move_on_when_its_transport_fails(make: Make) -> None:
    world = make(cancellation=False)
    world.mock().plan("hang")
    batch = world.submit()
    world.mock().wait_held(1)
    batch.cancel()
    world.mock().abandon(None, tent.TransportError("cut"))
    batch.wait(NEVER_S, check=False)
    assert statuses(batch) == {Status.CANCELED}
    assert world.mock("second").count("request") == 0


def test_memory_of_a_cancelled_transfer_is_held_until_it_has_ended(make: Make) -> None:
    world = make(cancellation=False)
    world.mock().plan("hang")
    batch = world.submit()
    world.mock().wait_held(1)
    batch.cancel()
    assert world.source.inflight.count == 1
    world.mock().release()
    batch.wait(NEVER_S, check=False)
    assert world.source.inflight.count == 0


LOW_TAKES_TURNS = {"scheduling": {"low": {"bytes": 1, "tasks": 1}, "promotion_timeout_s": 600}}


def test_what_waits_for_its_turn_is_cancelled_at_once_and_never_starts(make: Make) -> None:
    world = make(LOW_TAKES_TURNS)
    world.mock().plan("hang", at=1)
    running, waiting = (world.submit(priority=Priority.LOW) for _ in range(2))
    world.mock().wait_held(1)
    before = world.mock().count("request")
    waiting.cancel()
    waiting.wait(NEVER_S, check=False)
    assert statuses(waiting) == {Status.CANCELED}
    world.mock().release()
    running.wait(NEVER_S)
    assert world.mock().count("request") == before


# -------------------------------------------------------------------- priorities


def test_low_priority_takes_turns_and_higher_ones_do_not_wait_for_it(make: Make) -> None:
    world = make(LOW_TAKES_TURNS)
    world.mock().plan("hang", at=1)
    first = world.submit(0, priority=Priority.LOW)
    world.mock().wait_held(1)
    second = world.submit(256, priority=Priority.LOW)
    world.submit(512, priority=Priority.HIGH).wait(NEVER_S)
    world.submit(768).wait(NEVER_S)
    assert not second.poll()
    world.mock().release()
    first.wait(NEVER_S)
    second.wait(NEVER_S)


def test_a_thread_that_waits_for_its_turn_gets_it(make: Make) -> None:
    world = make(LOW_TAKES_TURNS)
    world.mock().plan("hang", at=1)
    running = world.submit(priority=Priority.LOW)
    world.mock().wait_held(1)
    waiter = threading.Thread(
        target=lambda: world.segment.write(
            world.source[256:512], world.remote[256:512], priority=Priority.LOW
        )
    )
    waiter.start()
    wait_until(
        lambda: (
            world.here.stats()["peers"][str(world.there.key)]["transports"]["first"].get("waiting")
            == 1
        )
    )
    world.mock().release()
    waiter.join(NEVER_S)
    assert not waiter.is_alive()
    running.wait(NEVER_S)
    assert (world.target.array[256:512] == world.source.array[256:512]).all()


def test_who_waits_long_enough_moves_up_and_starts(make: Make) -> None:
    world = make({"scheduling": {"low": {"bytes": 1, "tasks": 1}, "promotion_timeout_s": 0.02}})
    world.mock().plan("hang", at=1)
    running = world.submit(priority=Priority.LOW)
    world.mock().wait_held(1)
    world.submit(256, priority=Priority.LOW).wait(NEVER_S)
    world.mock().release()
    running.wait(NEVER_S)


def test_bulk_of_low_priority_goes_in_parts_and_its_requests_end_exactly(make: Make) -> None:
    world = make({"scheduling": {"slice": "4KiB"}})
    offsets = np.arange(4) * 16 * KIB
    before = world.mock().count("request")
    batch = world.segment.write_many(
        world.source, offsets, world.remote, offsets[::-1], 16 * KIB, priority=Priority.LOW
    )
    assert world.mock().count("request") - before == 16
    assert batch.moved.tolist() == [16 * KIB] * 4
    blocks = world.source.array.reshape(4, -1)
    assert (world.target.array.reshape(4, -1) == blocks[::-1]).all()
    assert world.here.stats()["transports"]["first"]["tasks"] == 4 + 1


def test_a_part_that_fails_moves_alone(make: Make) -> None:
    world = make({"scheduling": {"slice": "4KiB"}})
    world.mock().plan("refuse", at=3)
    batch = world.segment.write_many(
        world.source, [0], world.remote, [0], SIZE, priority=Priority.LOW
    )
    assert world.right()
    assert batch.moved.tolist() == [SIZE]
    assert world.mock("second").count("request") == 1


def test_a_transfer_whose_turn_does_not_come_by_its_deadline_times_out(make: Make) -> None:
    world = make(LOW_TAKES_TURNS)
    world.mock().plan("hang", at=1)
    running = world.submit(priority=Priority.LOW)
    world.mock().wait_held(1)
    with pytest.raises(tent.TransferFailed, match="waited its turn"):
        world.segment.write(
            world.source[:256], world.remote[:256], priority=Priority.LOW, timeout=0.05
        )
    world.mock().release()
    running.wait(NEVER_S)


# -------------------------------------------------------------------- slow is a failure too


def test_an_attempt_that_takes_too_long_moves_on(make: Make) -> None:
    world = make()
    world.mock().plan("hang")
    batch = world.submit(attempt_timeout=0.05)
    batch.wait(NEVER_S)
    assert batch.transports() == {"second": 256}
    assert world.here.stats()["failovers"] == 1


def test_the_policy_says_how_long_an_attempt_may_take(make: Make) -> None:
    policy = {"name": "both", "transports": ["first", "second"], "attempt_timeout_s": 0.05}
    world = make({"policy": [policy]})
    world.mock().plan("hang")
    batch = world.submit()
    batch.wait(NEVER_S)
    assert batch.transports() == {"second": 256}


def test_an_attempt_of_which_no_byte_moves_moves_on(make: Make) -> None:
    world = make(partial_progress=True)
    world.mock().plan("hang")
    batch = world.submit(stall=0.02)
    batch.wait(NEVER_S)
    assert batch.transports() == {"second": 256}


def test_a_stall_is_not_looked_for_where_the_transport_cannot_tell(make: Make) -> None:
    world = make(partial_progress=False)
    world.mock().plan("hang")
    batch = world.submit(stall=0.01, timeout=NEVER_S)
    world.mock().wait_held(1)
    world.mock().release()
    batch.wait(NEVER_S)
    assert batch.transports() == {"first": 256}


def test_a_deadline_that_has_passed_is_visible_at_once(make: Make) -> None:
    world = make()
    before = world.mock().count("request")
    batch = world.submit(deadline=time.monotonic() - 1)
    batch.wait(NEVER_S, check=False)
    assert statuses(batch) == {Status.TIMEOUT}
    assert world.mock().count("request") == before


# -------------------------------------------------------------------- polling


def _block_the_progress_thread(world: World) -> threading.Event:
    free = threading.Event()
    world.here.dispatcher.later(lambda: free.wait(NEVER_S))
    wait_until(lambda: world.here.dispatcher.progress.busy_for() > 0)
    return free


def test_polling_carries_on_what_has_failed(make: Make) -> None:
    world = make()
    world.mock().plan("hang")
    batch = world.submit()
    world.mock().wait_held(1)
    free = _block_the_progress_thread(world)
    world.mock().abandon(None, tent.TransportError("cut"))
    wait_until(batch.poll)
    assert batch.transports() == {"second": 256}
    free.set()


def test_polling_only_looks_where_the_settings_say_so(make: Make) -> None:
    world = make({"failover": {"on_poll": False}})
    world.mock().plan("hang")
    batch = world.submit()
    world.mock().wait_held(1)
    free = _block_the_progress_thread(world)
    world.mock().abandon(None, tent.TransportError("cut"))
    for _ in range(10):
        assert not batch.poll()
    free.set()
    batch.wait(NEVER_S)
    assert batch.transports() == {"second": 256}


# -------------------------------------------------------------------- failing transports


def test_a_transport_that_keeps_failing_is_passed_by_for_a_while_and_then_tried_again(
    make: Make,
) -> None:
    world = make({"failover": {"failures": 2, "pause_s": 0.2}})
    world.mock().plan("fail")
    for _ in range(2):
        world.submit().wait(NEVER_S)
    before = world.mock().count("request")
    world.mock().clear()
    world.submit().wait(NEVER_S)
    assert world.mock().count("request") == before
    wait_until(lambda: "first" in world.submit().wait(NEVER_S).transports())


def test_a_paused_transport_is_used_when_nothing_else_is_left(make: Make) -> None:
    world = make({"failover": {"failures": 1, "pause_s": 600}})
    world.mock().plan("fail", at=1)
    world.submit().wait(NEVER_S)
    world.mock("second").plan("refuse")
    batch = world.submit().wait(NEVER_S)
    assert batch.transports() == {"first": 256}


def test_a_callers_mistake_does_not_count_against_a_transport(make: Make) -> None:
    world = make({"failover": {"failures": 1, "pause_s": 600}})
    with pytest.raises(tent.UsageError):
        world.submit(length=SIZE + 1)
    assert world.submit().wait(NEVER_S).transports() == {"first": 256}


def test_a_write_of_unknown_outcome_stays_unless_the_caller_lets_it_move(make: Make) -> None:
    world = make()
    world.mock().plan("fail", fenced=False)
    stays = world.submit().wait(NEVER_S, check=False)
    assert statuses(stays) == {Status.FAILED}
    assert "outcome unknown" in stays.explain_failures()
    moves = world.submit(retry_unfenced=True).wait(NEVER_S)
    assert moves.transports() == {"second": 256}


def test_neighbours_travel_together_and_end_each_for_itself(make: Make) -> None:
    world = make({"failover": {"max_attempts": 0}})
    offsets = np.arange(8) * 256
    before = world.mock().count("request")
    world.mock().plan("short", moved=600)
    batch = world.segment.submit("write", world.source, offsets, world.remote, offsets, 256)
    batch.wait(NEVER_S, check=False)
    assert world.mock().calls[-1].detail == "write 1"
    assert world.mock().count("request") - before == 1
    assert batch.moved.tolist() == [256, 256, 88, 0, 0, 0, 0, 0]
    assert statuses(batch) == {Status.FAILED}
