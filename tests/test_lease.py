"""The standing use of several things, and what shutting one of them does to a use under way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tent_core.inflight import InFlight
from tent_core.lease import Lease
from tent_core.stats import Stats


def lease() -> Lease:
    return Lease(Stats().tally("t", {}, 1))


def test_a_use_of_a_lease_keeps_what_is_shut_from_draining_and_its_end_lets_it() -> None:
    thing, used, told = InFlight(), lease(), []
    assert thing.lend(used)
    thing.when_drained(lambda: told.append(1))
    assert used.begin()
    thing.shut()
    assert told == []
    assert thing.count == 1
    assert not used.begin()
    used.succeeded()
    assert told == [1]
    assert thing.count == 0


def test_a_lease_that_is_not_in_use_keeps_nothing() -> None:
    thing, used = InFlight(), lease()
    thing.lend(used)
    thing.shut()
    assert thing.wait_drained(0)
    assert not used.begin()


def test_what_is_shut_lends_nothing() -> None:
    thing = InFlight()
    thing.shut()
    assert not thing.lend(lease())


def test_a_lease_that_nobody_knows_any_more_is_forgotten() -> None:
    thing, used = InFlight(), lease()
    thing.lend(used)
    del used
    assert not thing._lent


STEP = st.sampled_from(
    ["begin", "end", "succeeded", "shut 0", "shut 1", "shut 2", "use 0", "unuse 0"]
)


@given(st.lists(STEP, max_size=40))
def test_each_thing_drains_exactly_once_when_it_is_shut_and_neither_used_nor_leased(
    steps: list[str],
) -> None:
    things, used, told = [InFlight() for _ in range(3)], lease(), [0, 0, 0]
    for i, thing in enumerate(things):
        thing.lend(used)
        thing.when_drained(lambda i=i: told.__setitem__(i, told[i] + 1))
    leased, own, calls, shut = 0, 0, 0, set()
    for step in steps:
        what, _, index = step.partition(" ")
        if what == "begin":
            assert used.begin() is not bool(shut)
            leased += not shut
        elif what in ("end", "succeeded") and leased:
            getattr(used, what)()
            leased -= 1
            calls += what == "succeeded"
        elif what == "shut":
            things[int(index)].shut()
            shut.add(int(index))
        elif what == "use":
            own += things[0].begin()
        elif what == "unuse" and own:
            things[0].end()
            own -= 1
        for i, thing in enumerate(things):
            idle = not leased and not (own and i == 0)
            assert thing.wait_drained(0) is (i in shut and idle)
            assert told[i] <= 1
    assert used.tally.calls == calls


def test_calls_are_counted_with_the_rest_and_once_however_often_they_are_read() -> None:
    stats, peer = Stats(), {}
    stats.count("t", peer, 2, 20, 0, None)
    kept, dropped = (Lease(stats.tally("t", peer, 5)) for _ in range(2))
    for used in (kept, dropped):
        assert used.begin()
        used.succeeded()
    del used, dropped
    for _ in range(2):
        assert stats.totals() == {"t": {"bytes": 30, "tasks": 4, "failures": 0}}
        assert stats.of_peer(peer) == stats.totals()
    kept.begin()
    kept.succeeded()
    assert stats.totals()["t"]["tasks"] == 5
    assert len(stats._tallies) == 1


def test_tallies_of_leases_that_came_and_went_do_not_pile_up() -> None:
    stats = Stats()
    for _ in range(1000):
        used = Lease(stats.tally("t", {}, 1))
        used.begin()
        used.succeeded()
    assert len(stats._tallies) < 200
    assert stats.totals()["t"]["tasks"] == 1000
