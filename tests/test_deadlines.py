"""Deadlines: what cannot be done in time is said at once; how much of their time transfers use is counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tent_core as tent
import tent_mock
from tent_core.pace import BULK, Pace
from tent_core.plugins import Registry
from tent_core.testing import wait_until
from tent_core.types import Priority, Reach, Status

MIB = 1 << 20
NEVER_S = 30.0


class World:
    """Two engines with a mock transport, and a buffer of 1 MiB on each side."""

    def __init__(self, config: dict[str, Any]) -> None:
        registry = Registry.of(
            tent_mock.declare("mock", 1000, cancellation=True, reach=Reach.NETWORK)
        )
        base = {
            "transports": {"mock": {"enable": True}},
            "policy": [{"name": "all", "transports": ["mock"]}],
            "log": {"level": "error"},
        }
        self.there = tent.Engine(base, plugins=registry)
        self.here = tent.Engine({**base, **config}, plugins=registry)
        self.mock = tent_mock.controller(self.here, "mock")
        self.there.allocate(MIB, name="target")
        self.source = self.here.allocate(MIB)
        self.segment = self.here.open_segment(self.there.segment_name)
        self.remote = self.segment.buffer("target")
        self.segment.write(self.source[:1], self.remote[:1])  # connected
        self.segment.peer.traffic.pacing = True  # as after the first transfer with a deadline

    def submit(self, length: int = BULK, start: int = 0, **options: Any) -> tent.Batch:
        where = ([start], self.remote, [start], length)
        return self.segment.submit("write", self.source, *where, **options)

    def pace(self, bytes_a_second: int) -> None:
        """So fast has the transport been."""
        traffic = self.segment.peer.traffic
        traffic.began("mock", bytes_a_second)
        traffic.ended("mock", bytes_a_second, bytes_a_second, time.monotonic() - 1.0)

    def counted(self, priority: str = "medium") -> dict[str, float]:
        return self.here.stats()["deadlines"].get(priority, {})  # type: ignore[no-any-return]

    def close(self) -> None:
        self.mock.clear()
        self.mock.release()
        self.here.close()
        self.there.close()


Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    worlds: list[World] = []

    def made(**config: Any) -> World:
        worlds.append(World(config))
        return worlds[-1]

    yield made
    for world in worlds:
        world.close()


@pytest.fixture
def world(make: Make) -> World:
    return make()


# -------------------------------------------------------------------- feasible


def test_nothing_is_said_of_a_batch_without_a_deadline(world: World) -> None:
    world.pace(MIB)
    assert world.submit().wait(NEVER_S).feasible is None
    assert world.here.stats()["deadlines"] == {}


def test_nothing_is_said_while_no_pace_is_known(world: World) -> None:
    assert world.submit(timeout=NEVER_S).wait(NEVER_S).feasible is None


def test_what_the_pace_of_its_transport_allows_is_feasible(world: World) -> None:
    world.pace(MIB)
    assert world.submit(MIB, timeout=20.0).wait(NEVER_S).feasible is True
    assert world.counted()["infeasible"] == 0


def test_what_it_does_not_allow_is_said_to_be_infeasible_and_carried_out_all_the_same(
    world: World,
) -> None:
    world.pace(1000)
    batch = world.submit(MIB, deadline=time.monotonic() + 20.0)
    assert batch.feasible is False
    assert set(batch.wait(NEVER_S).status.tolist()) == {int(Status.COMPLETED)}
    assert world.counted()["infeasible"] == 1


def test_a_deadline_that_has_passed_is_infeasible_and_ends_as_a_timeout(world: World) -> None:
    batch = world.submit(deadline=time.monotonic() - 1.0)
    assert batch.feasible is False
    batch.wait(NEVER_S, check=False)
    assert set(batch.status.tolist()) == {int(Status.TIMEOUT)}
    assert world.counted() == {"count": 1, "missed": 1, "infeasible": 1, "mean": 0.0, "max": 0.0}


def test_bytes_that_are_under_way_go_before(world: World) -> None:
    world.mock.plan("hang", at=1)
    ahead = world.submit(MIB)
    world.mock.wait_held(1)
    world.pace(MIB)  # a second for what is ahead, and a sixteenth for what comes
    assert world.submit(timeout=0.5).feasible is False
    assert world.submit(timeout=20.0).feasible is True
    world.mock.release()
    ahead.wait(NEVER_S)
    assert world.submit(timeout=0.5).feasible is True


def test_bytes_that_wait_their_turn_go_before_those_that_will_wait_behind_them(make: Make) -> None:
    one = {"low": {"bytes": 1, "tasks": 1}, "slice": MIB, "promotion_timeout_s": 600}
    world = make(scheduling=one)
    world.mock.plan("hang", at=1)
    running = world.submit(priority=Priority.LOW)
    world.mock.wait_held(1)
    waiting = world.submit(MIB, priority=Priority.LOW)
    world.pace(MIB)
    low = world.submit(timeout=0.9, priority=Priority.LOW)
    high = world.submit(timeout=0.9, priority=Priority.HIGH)
    assert (low.feasible, high.feasible) == (False, True)
    world.mock.release()
    for batch in (running, waiting, low, high):
        batch.wait(NEVER_S)


def test_nothing_is_said_while_transports_have_been_failing(world: World) -> None:
    world.pace(MIB)
    world.mock.plan("fail", at=1)
    world.submit().wait(NEVER_S, check=False)
    assert world.submit(timeout=NEVER_S).wait(NEVER_S).feasible is None


def test_nothing_is_measured_before_the_first_deadline_to_a_peer(world: World) -> None:
    traffic = world.segment.peer.traffic
    traffic.pacing = False
    world.submit().wait(NEVER_S)
    assert traffic._paces == {}
    assert world.submit(timeout=NEVER_S).wait(NEVER_S).feasible is None
    assert world.submit(timeout=NEVER_S).wait(NEVER_S).feasible is True


def test_small_transfers_say_nothing_about_the_pace(world: World) -> None:
    for _ in range(20):
        world.submit(BULK - 1).wait(NEVER_S)
    assert world.submit(timeout=NEVER_S).wait(NEVER_S).feasible is None
    assert world.submit(timeout=NEVER_S).wait(NEVER_S).feasible is True


def test_failed_attempts_leave_nothing_under_way(world: World) -> None:
    world.mock.plan("fail", at=1)
    world.submit(MIB).wait(NEVER_S, check=False)
    world.mock.plan("refuse", at=1)
    world.submit(MIB).wait(NEVER_S, check=False)
    world.mock.plan("hang", at=1)
    batch = world.submit(MIB)
    world.mock.wait_held(1)
    batch.cancel()
    batch.wait(NEVER_S, check=False)
    assert world.segment.peer.traffic._paces["mock"].under_way == 0


# -------------------------------------------------------------------- how much of their time they use


def test_the_time_used_of_the_time_allowed_is_counted_by_priority(world: World) -> None:
    world.submit(timeout=NEVER_S).wait(NEVER_S)
    world.segment.write(world.source[:64], world.remote[:64], timeout=NEVER_S)
    world.submit(timeout=NEVER_S, priority=Priority.HIGH).wait(NEVER_S)
    medium, high = world.counted("medium"), world.counted("high")
    assert (medium["count"], medium["missed"], high["count"]) == (2, 0, 1)
    assert 0.0 < medium["mean"] <= medium["max"] < 1.0


def test_one_that_its_deadline_ended_was_missed(world: World) -> None:
    world.mock.plan("delay", at=1, seconds=0.2)
    world.submit(timeout=0.02).wait(NEVER_S, check=False)
    assert (world.counted()["count"], world.counted()["missed"]) == (1, 1)


def test_one_that_failed_or_was_cancelled_says_nothing_about_time(world: World) -> None:
    world.mock.plan("fail", at=1, fenced=False)
    world.submit(timeout=NEVER_S).wait(NEVER_S, check=False)
    world.mock.plan("hang", at=1)
    batch = world.submit(timeout=NEVER_S)
    world.mock.wait_held(1)
    batch.cancel()
    batch.wait(NEVER_S, check=False)
    assert world.counted().get("count", 0) == 0


def test_the_notification_of_a_batch_is_not_part_of_the_time_of_its_data(world: World) -> None:
    world.submit(timeout=NEVER_S, notify="n").wait(NEVER_S)
    wait_until(lambda: world.counted()["count"] == 1)
    assert world.there.next_notification(NEVER_S).ok


# -------------------------------------------------------------------- the pace itself


def test_what_shares_the_way_does_not_look_slow() -> None:
    pace = Pace()
    for _ in range(4):
        pace.began(MIB)
    for _ in range(4):
        pace.ended(MIB, MIB, 0.0, 1.0)  # all at once, after a second
    assert pace.under_way == 0
    assert pace.rate is not None
    assert pace.rate > 2 * MIB


def test_what_moved_nothing_does_not_change_the_pace() -> None:
    pace = Pace()
    pace.began(MIB)
    pace.ended(MIB, 0, 0.0, 60.0)
    assert pace.rate is None


@given(st.lists(st.tuples(st.integers(BULK, 1 << 30), st.floats(0.001, 10)), min_size=1))
def test_the_pace_lies_between_the_slowest_and_the_fastest(runs: list[tuple[int, float]]) -> None:
    pace, now = Pace(), 0.0
    for size, seconds in runs:
        pace.began(size)
        pace.ended(size, size, now, now + seconds)
        now += seconds
    rates = [size / seconds for size, seconds in runs]
    assert pace.rate is not None
    assert min(rates) * 0.99 <= pace.rate <= max(rates) * 1.01
