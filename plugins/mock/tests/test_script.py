"""Steps and clocks: which of many events a step acts on, and when."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tent_core import models
from tent_core.errors import ConfigError
from tent_core.types import Opcode
from tent_mock import Do, ManualClock, On, Settings, Step, ThreadClock
from tent_mock.script import Script


def acted(step: Step, events: int) -> list[int]:
    """The numbers, from 1, of the events on which the step acts."""
    script = Script([step])
    return [n for n in range(1, events + 1) if script.decide(On.REQUEST, "p", Opcode.READ)]


@given(at=st.integers(1, 20), every=st.integers(1, 7), times=st.none() | st.integers(1, 5))
def test_a_step_acts_at_its_number_then_at_every_kth_so_many_times(
    at: int, every: int, times: int | None
) -> None:
    due = list(range(at, 61, every))
    expected = due[: times or 1]
    assert acted(Step(do=Do.FAIL, at=at, every=every, times=times), 60) == expected


def test_the_first_step_that_acts_has_the_event_and_the_others_count_it() -> None:
    script = Script([Step(do=Do.FAIL, at=2), Step(do=Do.REFUSE, at=2), Step(do=Do.HANG, at=3)])
    found = [script.decide(On.REQUEST, "p", Opcode.READ) for _ in range(4)]
    assert [v and v.step.do for v in found] == [None, Do.FAIL, Do.HANG, None]


@given(st.integers(), st.lists(st.booleans(), max_size=40))
def test_what_is_drawn_depends_on_the_number_of_the_match_not_on_other_events(
    seed: int, others: list[bool]
) -> None:
    step = Step(do=Do.DELAY, chance=0.5, seconds=1, jitter=2, opcode="read")
    alone, mixed = Script([step], seed), Script([step], seed)
    for other in others:
        if other:
            assert mixed.decide(On.REQUEST, "p", Opcode.WRITE) is None
        else:
            verdict = alone.decide(On.REQUEST, "p", Opcode.READ)
            assert mixed.decide(On.REQUEST, "p", Opcode.READ) == verdict
            assert verdict is None or 1 <= verdict.seconds < 3


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"do": "explode"}, "refuse"),
        ({"do": "refuse", "on": "close"}, "no meaning"),
        ({"do": "unreachable"}, "no meaning"),
        ({"do": "fail", "on": "stop", "opcode": "read"}, "of requests"),
        ({"do": "fail", "at": 0}, "at least 1"),
        ({"do": "fail", "when": 3}, "an unknown key"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused_with_the_reason(
    fields: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        models.make(Settings, script=[fields])


def test_a_manual_clock_makes_the_calls_that_fall_due_in_order() -> None:
    clock = ManualClock(start=100.0)
    seen: list[tuple[str, float]] = []

    def note(name: str) -> None:
        seen.append((name, clock.now()))
        if name == "b":
            clock.call_later(0.5, lambda: note("after b"))

    for name, seconds in (("c", 3.0), ("b", 1.0), ("a", 1.0)):
        clock.call_later(seconds, lambda name=name: note(name))
    assert clock.advance(2.0) == 3
    assert seen == [("b", 101.0), ("a", 101.0), ("after b", 101.5)]
    assert clock.now() == 102.0
    assert clock.advance(1.0) == 1


def test_a_stopped_clock_makes_no_more_calls_and_leaves_no_thread() -> None:
    clock = ThreadClock("clock-under-test")
    called = threading.Event()
    clock.call_later(0.001, called.set)
    assert called.wait(5)
    clock.call_later(30, called.set)
    clock.stop()
    clock.call_later(0, called.clear)
    assert called.is_set()
    assert "clock-under-test" not in {thread.name for thread in threading.enumerate()}
