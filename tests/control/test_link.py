"""The state machine of a connection, stepped with a clock of its own."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tent_core.control.link import REFUSED_S, Link, LinkState


def test_a_link_that_never_comes_up_departs_after_the_grace() -> None:
    link = Link(100.0, 5.0)
    link.broken(101.0, "refused")
    assert link.overdue(104.9) is None
    assert "within 5 s: refused" in str(link.overdue(105.0))


def test_a_link_that_comes_back_begins_a_new_grace_when_it_breaks_again() -> None:
    link = Link(0.0, 5.0)
    link.up()
    assert link.overdue(1000.0) is None
    link.broken(1000.0, "cut")
    link.broken(1004.0, "refused")
    assert link.ends == 1005.0
    assert link.overdue(1005.0)


def test_a_refusal_that_lasts_is_the_end_of_an_engine_on_this_machine() -> None:
    link = Link(0.0, 60.0)
    link.up()
    assert link.refused(1.0, True) is None  # it is up: what was looked at is past
    link.broken(2.0, "cut")
    assert link.refused(3.0, True) is None
    assert link.refused(3.0 + REFUSED_S / 2, False) is None  # somebody listens again
    assert link.refused(4.0, True) is None
    link.up()
    link.broken(4.5, "cut")
    assert link.refused(5.0, True) is None
    assert "nobody listens" in str(link.refused(5.0 + REFUSED_S, True))


def test_nothing_follows_a_departure() -> None:
    link = Link(0.0, 5.0)
    assert link.depart("it said goodbye", owes_goodbye=False)
    assert not link.depart("its process ended")
    link.up()
    link.broken(1.0, "cut")
    assert link.overdue(100.0) is None
    assert (link.state, link.reason, link.owes_goodbye) == (
        LinkState.DEPARTED,
        "it said goodbye",
        False,
    )


@settings(deadline=None)
@given(st.lists(st.sampled_from(["up", "broken", "wait", "depart"]), max_size=30))
def test_a_link_departs_once_and_only_after_a_whole_grace_without_being_up(
    steps: list[str],
) -> None:
    link, now, down_since = Link(0.0, 5.0), 0.0, 0.0
    departures = 0
    for step in steps:
        if step == "wait":
            now += 2.0
        elif step == "up" and not departures:
            link.up()
            down_since = float("inf")
        elif step == "broken":
            link.broken(now, "cut")
            down_since = min(down_since, now)
        elif step == "depart":
            departures += link.depart("told")
        overdue = link.overdue(now)
        assert (overdue is not None) == (not departures and now >= down_since + 5.0)
        if overdue:
            departures += link.depart(overdue)
        assert departures <= 1
