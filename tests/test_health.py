"""A transport that keeps failing goes last for a while, and is tried again."""

from __future__ import annotations

from tent_core.health import Health, HealthRules

RULES = HealthRules(failures=3, window=10, pause=1, longest=8)
NAMES = ("shm", "tcp")


def fail(health: Health, times: int, now: float) -> float | None:
    pause = None
    for _ in range(times):
        pause = health.failed("shm", now)
    return pause


def test_nothing_changes_before_a_transport_has_failed_often_enough_in_a_short_time() -> None:
    health = Health(RULES)
    for now in (0, 6, 12, 18):
        assert health.failed("shm", now) is None
    assert health.order(NAMES, 18) == NAMES


def test_a_failing_transport_goes_last_and_is_still_there() -> None:
    health = Health(RULES)
    assert fail(health, 3, 0) == 1
    assert health.order(NAMES, 0.5) == ("tcp", "shm")
    assert health.paused(0.5) == {"shm": 0.5}


def test_after_the_pause_one_is_sent_to_try_it_and_the_others_follow_when_that_succeeds() -> None:
    health = Health(RULES)
    fail(health, 3, 0)
    assert health.order(NAMES, 1) == NAMES
    assert health.order(NAMES, 1) == ("tcp", "shm")
    health.succeeded("shm", 1.1)
    assert health.order(NAMES, 1.1) == NAMES


def test_a_probe_that_nobody_reports_is_sent_again_later() -> None:
    health = Health(RULES)
    fail(health, 3, 0)
    health.order(NAMES, 1)
    assert health.order(NAMES, 2) == NAMES


def test_each_pause_is_twice_as_long_up_to_the_longest() -> None:
    health = Health(RULES)
    now, pauses = 0.0, [fail(health, 3, 0.0)]
    for _ in range(5):
        now += pauses[-1] or 0
        pauses.append(health.failed("shm", now))
    assert pauses == [1, 2, 4, 8, 8, 8]


def test_what_was_under_way_when_the_pause_began_does_not_prolong_it() -> None:
    health = Health(RULES)
    fail(health, 3, 0)
    assert fail(health, 5, 0.5) is None
    assert health.order(NAMES, 1) == NAMES


def test_a_pause_that_is_to_come_decays_and_is_not_forgotten_at_once() -> None:
    health = Health(RULES)
    fail(health, 3, 0)
    health.failed("shm", 1)
    health.failed("shm", 3)
    health.succeeded("shm", 7)
    assert fail(health, 3, 7.5) == 8
    health.succeeded("shm", 15.5)
    health.succeeded("shm", 26)
    assert fail(health, 3, 26) == 8  # halved once, and doubled
    for now in (100, 200, 300, 400, 500):
        health.succeeded("shm", now)
    assert not health.troubled
    assert fail(health, 3, 500) == 1
