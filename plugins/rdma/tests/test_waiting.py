"""The order in which transfers that wait are posted."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from tent_core.errors import TransportError
from tent_rdma.transfer import Exclusion, Transfer
from tent_rdma.waiting import Waiting


def transfer(pool: str = "default", *, deadline: float = math.inf, devices: Any = ()) -> Transfer:
    """As far as is looked at here."""
    work = SimpleNamespace(deadline=deadline)
    made = object.__new__(Transfer)
    for name, value in {"pool": pool, "devices": devices, "excluded": {}, "work": work}.items():
        setattr(made, name, value)
    return made


def test_those_of_one_kind_keep_their_order_and_kinds_take_turns() -> None:
    waiting = Waiting()
    a, b, c = transfer(), transfer("fast"), transfer()
    for one in (a, b, c):
        waiting.add(one)
    assert waiting.heads() == [a, b]
    waiting.served(a)
    assert waiting.heads() == [b, a]
    waiting.discard(a)
    assert waiting.heads() == [b, c]
    assert waiting.is_head(c)
    assert a not in waiting


def test_what_failed_comes_before_the_others_of_its_kind() -> None:
    waiting = Waiting()
    a, b = transfer(), transfer()
    waiting.add(a)
    waiting.add(b)
    waiting.add_first(b)
    assert waiting.heads() == [b]
    assert waiting.all() == [b, a]


def test_a_rail_that_is_excluded_makes_another_kind() -> None:
    waiting = Waiting()
    a, b = transfer(), transfer()
    waiting.add(a)
    waiting.add(b)
    a.excluded[0] = Exclusion(TransportError("it failed"), 0)
    assert waiting.heads() == [a]
    waiting.sort_again()
    assert waiting.heads() == [a, b]


def test_the_earliest_deadline_is_known() -> None:
    waiting = Waiting()
    assert waiting.deadline() == math.inf
    late, soon = transfer(deadline=9.0), transfer("fast", deadline=3.0)
    waiting.add(late)
    waiting.add(soon)
    assert waiting.deadline() == 3.0
    waiting.discard(soon)
    assert waiting.deadline() == 9.0


@given(st.lists(st.tuples(st.sampled_from("afds"), st.integers(0, 7))))
def test_nothing_is_lost_or_there_twice(steps: list[tuple[str, int]]) -> None:
    waiting = Waiting()
    transfers = [transfer("ab"[i % 2], devices=("x",) if i % 3 else ()) for i in range(8)]
    there: list[Transfer] = []
    for what, index in steps:
        one = transfers[index]
        if what == "a" and one not in there:
            waiting.add(one)
            there.append(one)
        elif what == "f":
            waiting.add_first(one)
            there = [one, *(t for t in there if t is not one)]
        elif what == "d":
            waiting.discard(one)
            there = [t for t in there if t is not one]
        elif what == "s":
            waiting.sort_again()
        found = waiting.all()
        assert len(found) == len(there)
        assert set(map(id, found)) == set(map(id, there))
        assert bool(waiting) is bool(there)
        for head in cast("list[Any]", waiting.heads()):
            same = [t for t in there if (t.pool, t.devices) == (head.pool, head.devices)]
            assert same[0] is head
