"""Which rail is chosen, what is believed of its speed, and when it is left out."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tent_core import models
from tent_rdma.rails import Condition, Rails
from tent_rdma.settings import Settings

KIB, MIB = 1 << 10, 1 << 20


def rails(count: int = 2, penalties: Sequence[float] | None = None, **settings: Any) -> Rails:
    return Rails(count, penalties or [1.0] * count, models.make(Settings, **settings))


def carry(some: Rails, rail: int, length: int, began: float, seconds: float) -> None:
    some.posted(rail, length, began)
    some.completed(rail, length, began + seconds)


def pause(some: Rails, rail: int, now: float) -> None:
    while not some.failed(rail, now):
        pass


def condition(some: Rails, rail: int, now: float) -> Condition:
    return some.state(now)[rail].condition


def test_rails_of_which_nothing_is_known_take_turns() -> None:
    some = rails(3)
    assert [some.choose(1, 0.0) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_work_goes_where_it_would_end_first() -> None:
    some = rails()
    carry(some, 0, 4 * MIB, 0.0, 1.0)
    carry(some, 1, 1 * MIB, 0.0, 1.0)
    some.posted(0, 2 * MIB, 2.0)  # with one more 0.75 s, on the other rail 1 s
    assert some.choose(MIB, 2.0) == 0
    some.posted(0, 2 * MIB, 2.0)  # now 1.25 s
    assert some.choose(MIB, 2.0) == 1


def test_a_penalty_lengthens_the_time_that_is_expected() -> None:
    some = rails(2, [1.5, 1.0])
    carry(some, 0, 10, 0.0, 1.0)
    carry(some, 1, 8, 0.0, 1.0)
    assert some.choose(100, 2.0) == 1
    assert some.choose(100, 2.0, penalties=[1.0, 1.0]) == 0


def test_a_rail_that_has_completed_nothing_is_taken_for_as_fast_as_the_fastest() -> None:
    some = rails(3)
    carry(some, 0, 100, 0.0, 1.0)
    carry(some, 1, 50, 0.0, 1.0)
    some.posted(0, 1, 2.0)
    assert some.choose(100, 2.0) == 2


def test_a_queue_does_not_make_a_rail_look_slow() -> None:
    some = rails(1)
    for _ in range(20):
        some.posted(0, 100, 0.0)
    for ended in range(20):
        some.completed(0, 100, ended + 1.0)
    assert some.bandwidth(0) == pytest.approx(100)


def test_completions_that_were_polled_together_do_not_make_it_look_fast() -> None:
    some = rails(1)
    for second in range(20):
        for _ in range(4):
            some.posted(0, 25, float(second))
        for _ in range(4):
            some.completed(0, 25, second + 1.0)
    assert some.bandwidth(0) == pytest.approx(100)


def test_completions_polled_in_bursts_from_a_queue_that_never_empties_average_out() -> None:
    some = rails(1)
    for _ in range(4):
        some.posted(0, 100, 0.0)
    for second in range(1, 40):
        for _ in range(4):
            some.completed(0, 100, second * 4.0)
            some.posted(0, 100, second * 4.0)
    assert some.bandwidth(0) == pytest.approx(100, rel=0.01)


def test_time_in_which_a_rail_had_nothing_to_do_does_not_count() -> None:
    some = rails(1)
    for hour in range(5):
        carry(some, 0, 100, hour * 3600.0, 1.0)
    assert some.bandwidth(0) == pytest.approx(100)


def test_a_change_of_speed_is_believed_within_a_few_measurements() -> None:
    some = rails(1)
    for second in range(20):
        carry(some, 0, 100, float(second), 0.1)
    for second in range(20, 23):
        carry(some, 0, 100, float(second), 1.0)
    assert some.bandwidth(0) < 200
    for second in range(23, 43):
        carry(some, 0, 100, float(second), 0.1)
    assert some.bandwidth(0) > 800


def test_short_messages_do_not_hide_what_a_long_one_has_shown() -> None:
    some = rails(1)
    carry(some, 0, 1000 * MIB, 0.0, 1.0)
    for second in range(1, 4):
        carry(some, 0, 4 * KIB, float(second), 20e-6)  # 200 MB/s
    assert some.bandwidth(0) > 900 * MIB


def test_every_so_many_choices_the_one_that_was_used_the_longest_ago_is_tried() -> None:
    some = rails(2, probe_every=5)
    carry(some, 0, 1000, 0.0, 1.0)
    carry(some, 1, 1, 0.0, 1.0)
    assert [some.choose(10, 2.0) for _ in range(10)] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1]


def test_round_robin_looks_at_no_speed() -> None:
    some = rails(3, rail_choice="round_robin")
    carry(some, 1, 1, 0.0, 100.0)
    assert [some.choose(1, 200.0) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_what_is_excluded_or_not_usable_is_not_chosen() -> None:
    some = rails(3)
    assert some.choose(1, 0.0, exclude={0}) == 1
    assert some.choose(1, 0.0, lambda rail: rail == 2) == 2
    assert some.choose(1, 0.0, lambda rail: rail == 2, exclude=(2,)) is None


def test_failures_within_the_window_pause_a_rail_and_those_before_do_not_count() -> None:
    some = rails(2, error_threshold=3, error_window="10s", cooldown="1s")
    assert [some.failed(0, at) for at in (0.0, 1.0, 10.5)] == [False, False, False]
    assert some.failed(0, 10.9)
    assert condition(some, 0, 11.0) is Condition.PAUSED
    assert [some.choose(1, 11.0) for _ in range(3)] == [1, 1, 1]
    assert some.returns_at(11.0) == 11.0
    pause(some, 1, 11.0)
    assert some.choose(1, 11.0) is None
    assert some.returns_at(11.0) == pytest.approx(11.9)


def test_each_pause_is_twice_as_long_as_the_one_before_up_to_the_longest() -> None:
    some = rails(1, cooldown="1s", longest_cooldown="5s")
    pauses, now = [], 0.0
    for _ in range(5):
        pause(some, 0, now)
        back = some.returns_at(now)
        assert back is not None
        pauses.append(back - now)
        now = back
    assert pauses == [1, 2, 4, 5, 5]


def test_on_probation_a_rail_carries_one_piece_at_a_time_and_one_failure_is_enough() -> None:
    some = rails(1, error_threshold=3, cooldown="1s")
    pause(some, 0, 0.0)
    assert condition(some, 0, 1.0) is Condition.PROBATION
    assert some.choose(1, 1.0) == 0
    some.posted(0, 1, 1.0)
    assert some.choose(1, 1.0) is None
    some.abandoned(0, 1, 1.5)
    assert some.failed(0, 1.5)
    assert some.returns_at(1.5) == 3.5


def test_a_success_on_probation_makes_it_healthy() -> None:
    some = rails(1, cooldown="1s")
    pause(some, 0, 0.0)
    carry(some, 0, 1, 1.0, 0.1)
    assert condition(some, 0, 1.1) is Condition.HEALTHY
    assert not some.failed(0, 1.2)


def test_a_success_in_the_pause_ends_it_with_a_probation() -> None:
    some = rails(1, cooldown="10s")
    some.posted(0, 1, 0.0)
    pause(some, 0, 1.0)
    some.completed(0, 1, 2.0)
    assert condition(some, 0, 2.0) is Condition.PROBATION
    assert some.choose(1, 2.0) == 0
    assert some.failed(0, 3.0)
    assert some.returns_at(3.0) == 23.0


def test_all_that_was_posted_before_the_pause_does_not_make_it_healthy() -> None:
    some = rails(1, cooldown="10s")
    for _ in range(3):
        some.posted(0, 1, 0.0)
    pause(some, 0, 1.0)
    for now in (2.0, 3.0, 14.0):
        some.completed(0, 1, now)
        assert condition(some, 0, now) is Condition.PROBATION
    carry(some, 0, 1, 15.0, 0.1)
    assert condition(some, 0, 15.1) is Condition.HEALTHY


def test_failures_in_the_pause_are_those_of_what_was_under_way_and_do_not_prolong_it() -> None:
    some = rails(1, cooldown="1s")
    pause(some, 0, 0.0)
    assert not any(some.failed(0, 0.5) for _ in range(10))
    assert some.returns_at(0.5) == 1.0


def test_the_cooldown_is_halved_by_time_without_failure_and_not_forgotten_at_the_first_success() -> (
    None
):
    some = rails(1, cooldown="1s", error_window="10s")
    now = 0.0
    for _ in range(3):  # 1, 2, 4
        pause(some, 0, now)
        now = some.returns_at(now) or 0.0
    carry(some, 0, 1, now, 0.1)
    pause(some, 0, now + 1)
    assert some.returns_at(now + 1) == now + 9  # 8
    now += 9
    carry(some, 0, 1, now, 0.0)
    carry(some, 0, 1, now + 10, 0.0)  # 4
    carry(some, 0, 1, now + 11, 0.0)
    carry(some, 0, 1, now + 20, 0.0)  # 2
    pause(some, 0, now + 21)
    assert some.returns_at(now + 21) == now + 25


def test_a_port_that_goes_down_takes_its_rail_out_at_once_and_brings_it_back_at_once() -> None:
    some = rails(1)
    some.down(0)
    assert (some.choose(1, 0.0), some.returns_at(0.0)) == (None, None)
    pause(some, 0, 0.0)
    some.up(0)
    assert some.choose(1, 0.0) == 0
    assert condition(some, 0, 0.0) is Condition.HEALTHY


def test_as_many_penalties_as_rails() -> None:
    with pytest.raises(ValueError, match="2 rails and 1 penalties"):
        Rails(2, [1.0], Settings())


class Link:
    """A rail of the simulation: it serves in order, at its speed; a dead one fails after a second."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self.free = 0.0

    def ends(self, length: int, now: float) -> float:
        if not self.speed:
            return now + 1.0
        self.free = max(self.free, now) + length / self.speed
        return self.free


def simulate(
    some: Rails, links: list[Link], groups: int, outstanding: int, *, poll_every: float = 0.0
) -> Counter[int]:
    """Bytes that were posted on each rail, keeping `outstanding` groups under way."""
    ends: list[tuple[float, int, int, int]] = []
    order = itertools.count()
    shares: Counter[int] = Counter()
    now = 0.0
    for number in range(groups):
        length = MIB if number % 3 else 64 * KIB
        while len(ends) >= outstanding or (chosen := some.choose(length, now)) is None:
            now, _, rail, size = heapq.heappop(ends)
            if poll_every:
                now = -(-now // poll_every) * poll_every
            if links[rail].speed:
                some.completed(rail, size, now)
            else:
                some.abandoned(rail, size, now)
                some.failed(rail, now)
        some.posted(chosen, length, now)
        shares[chosen] += length
        heapq.heappush(ends, (links[chosen].ends(length, now), next(order), chosen, length))
    return shares


@pytest.mark.parametrize("poll_every", [0.0, 0.003])
@pytest.mark.parametrize("speeds", [(4e9, 1e9), (1e9, 4e9)])
def test_shares_are_as_the_speeds(speeds: tuple[float, float], poll_every: float) -> None:
    shares = simulate(rails(), [Link(speed) for speed in speeds], 4000, 24, poll_every=poll_every)
    assert shares[0] / shares[1] == pytest.approx(speeds[0] / speeds[1], rel=0.25)


def test_equal_rails_have_equal_shares() -> None:
    shares = simulate(rails(4), [Link(1e9) for _ in range(4)], 4000, 32)
    assert max(shares.values()) / min(shares.values()) < 1.2


def test_a_dead_rail_gets_nothing_but_what_finds_out_whether_it_lives() -> None:
    some = rails(2, cooldown="1s", longest_cooldown="4s")
    shares = simulate(some, [Link(1e7), Link(0)], 2000, 8)
    seconds = 2000 * 0.7e6 / 1e7  # that the simulation takes, about; the longest pause is 4
    assert shares[1] < (seconds / 4 + 16) * MIB
    assert shares[1] < shares[0] / 20


def test_a_rail_that_becomes_slow_loses_its_share_and_gets_it_back() -> None:
    some, links = rails(), [Link(1e9), Link(1e9)]
    simulate(some, links, 500, 16)
    for link in links:
        link.free = 0.0
    links[1].speed = 1e8
    shares = simulate(some, links, 2000, 16)
    assert shares[1] < shares[0] / 5


class Health(RuleBasedStateMachine):
    """Whatever happens: nothing is chosen that may not be, and something is wherever something may be."""

    @initialize(
        count=st.integers(1, 4),
        threshold=st.integers(1, 3),
        choice=st.sampled_from(["predicted", "round_robin"]),
    )
    def make(self, count: int, threshold: int, choice: Any) -> None:
        settings = Settings(
            rail_choice=choice,
            error_threshold=threshold,
            error_window=10.0,
            cooldown=1.0,
            longest_cooldown=8.0,
            probe_every=3,
        )
        self.rails = Rails(count, [1.0] * count, settings)
        self.now = 0.0
        self.flight: dict[int, list[int]] = {rail: [] for rail in range(count)}
        self.trials: set[int] = set()
        """Rails whose work under way was posted on probation."""
        self.down: set[int] = set()

    @rule(seconds=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 7.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(length=st.integers(1, 1 << 40), exclude=st.sets(st.integers(0, 3)))
    def choose(self, length: int, exclude: set[int]) -> None:
        states = self.rails.state(self.now)
        open_ = [
            rail
            for rail, state in enumerate(states)
            if rail not in exclude
            and (
                state.condition is Condition.HEALTHY
                or (state.condition is Condition.PROBATION and not self.flight[rail])
            )
        ]
        chosen = self.rails.choose(length, self.now, exclude=exclude)
        if chosen is None:
            assert not open_
            return
        assert chosen in open_
        assert chosen not in self.down
        if not self.flight[chosen]:
            self.trials.discard(chosen)
        if states[chosen].condition is Condition.PROBATION:
            self.trials.add(chosen)
        self.rails.posted(chosen, length, self.now)
        self.flight[chosen].append(length)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        busy = [rail for rail, lengths in self.flight.items() if lengths]
        if not busy:
            return
        rail = data.draw(st.sampled_from(busy))
        length = self.flight[rail].pop(0)
        if data.draw(st.booleans()):
            before = self.rails.state(self.now)[rail].condition
            self.rails.completed(rail, length, self.now)
            if before is Condition.PROBATION:
                after = Condition.HEALTHY if rail in self.trials else Condition.PROBATION
                assert self.rails.state(self.now)[rail].condition is after
            return
        self.rails.abandoned(rail, length, self.now)
        before = self.rails.state(self.now)[rail]
        paused = self.rails.failed(rail, self.now)
        after = self.rails.state(self.now)[rail]
        if paused:
            assert 0.999 <= after.returns_in <= 8.001
            assert before.condition is not Condition.PAUSED
        else:
            assert after.condition is before.condition
            assert before.condition is not Condition.PROBATION

    @rule(rail=st.integers(0, 3), up=st.booleans())
    def port(self, rail: int, up: bool) -> None:
        if rail >= len(self.rails):
            return
        if up:
            self.rails.up(rail)
            self.down.discard(rail)
            assert self.rails.state(self.now)[rail].condition is Condition.HEALTHY
        else:
            self.rails.down(rail)
            self.down.add(rail)
            assert self.rails.state(self.now)[rail].condition is Condition.DOWN

    @invariant()
    def accounts(self) -> None:
        if not hasattr(self, "rails"):
            return
        for rail, state in enumerate(self.rails.state(self.now)):
            assert state.in_flight == sum(self.flight[rail])
            assert state.bandwidth >= 0
            assert (state.condition is Condition.DOWN) == (rail in self.down)
        back = self.rails.returns_at(self.now)
        if back is None:
            assert len(self.down) == len(self.rails)
        else:
            assert self.now <= back <= self.now + 8.001


TestHealth = Health.TestCase
