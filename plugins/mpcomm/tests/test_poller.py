"""The one thread that finds the end of what nobody waits for."""

from __future__ import annotations

import threading
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tent_core.log import Logger
from tent_core.testing.waiting import wait_until
from tent_mpcomm.poller import Pace, Poller


class Posting:
    """Is over after so many steps; remembers which threads took them."""

    def __init__(self, steps: int, fails: bool = False) -> None:
        self.left = steps
        self.fails = fails
        self.threads: set[str] = set()

    @property
    def over(self) -> bool:
        return self.left <= 0

    def step(self) -> bool:
        self.threads.add(threading.current_thread().name)
        self.left -= 1
        if self.fails:
            raise RuntimeError("a callback of the application's")
        return self.over


class Log:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def error(self, event: str, **_: Any) -> None:
        self.events.append(event)


def test_a_thousand_postings_are_driven_to_their_end_by_one_thread() -> None:
    poller = Poller(0.0, 1e-3, Logger(lambda *_: None))
    poller.start()
    postings = [Posting(1 + n % 7) for n in range(1000)]
    for posting in postings:
        poller.add(posting)  # type: ignore[arg-type]
    wait_until(lambda: all(posting.over for posting in postings))
    assert {name for posting in postings for name in posting.threads} == {"tent-mpcomm-poller"}
    assert poller.stop(5.0) == []


def test_one_that_raises_does_not_end_the_others() -> None:
    log = Log()
    poller = Poller(0.0, 1e-3, log)
    poller.start()
    broken, sound = Posting(1, fails=True), Posting(50)
    poller.add(broken)  # type: ignore[arg-type]
    poller.add(sound)  # type: ignore[arg-type]
    wait_until(lambda: sound.over)
    assert log.events == ["mpcomm_poller_raised"]
    poller.stop(5.0)


def test_stopping_hands_back_what_is_not_over() -> None:
    poller = Poller(0.0, 1e-3, Logger(lambda *_: None))
    endless = Posting(10**9)
    poller.add(endless)  # type: ignore[arg-type]
    poller.start()
    wait_until(lambda: bool(endless.threads))
    assert poller.stop(5.0) == [endless]


@given(st.floats(1e-6, 1.0), st.integers(1, 60))
def test_pauses_grow_to_their_bound_and_begin_anew_when_something_has_ended(
    longest: float, looks: int
) -> None:
    pace = Pace(0.0, longest)
    pauses = [pace.next() for _ in range(looks)]
    assert pauses == sorted(pauses)
    assert all(0 < pause <= longest for pause in pauses)
    pace.moved()
    assert pace.next() == pauses[0]


def test_there_is_no_pause_while_it_spins() -> None:
    assert Pace(1000.0, 1.0).next() == 0.0
