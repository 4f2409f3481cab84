"""Several threads that copy at once give up the GIL meanwhile, and leave the processors to one another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import shm_owners as owners
from shm_harness import Pair, blocks, pair, requests, submit

from tent_core.types import Opcode, Status
from tent_shm import crowd, gather, plan
from tent_shm.crowd import Crowd

KIB, MIB = 1 << 10, 1 << 20
LONG, SHORT = (600, KIB), (400, KIB)


@pytest.fixture(scope="module")
def two() -> Iterator[Pair]:
    with pair(owners.allocated_and_registered) as made:
        yield made


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each copy that numpy was asked for: whether it keeps the GIL. From 512 KiB on it is long."""
    found: list[bool] = []
    arranged = gather.arranged

    def watched(*args: Any, keep_gil: bool) -> Any:
        found.append(keep_gil)
        return arranged(*args, keep_gil=keep_gil)

    monkeypatch.setattr(gather, "arranged", watched)
    monkeypatch.setattr(plan, "LONG_BYTES", 512 * KIB)
    monkeypatch.setattr(crowd, "LINGER_S", 0.0)
    return found


def crowd_of(made: Pair) -> Crowd:
    tools = made.node.transport._tools
    assert tools is not None
    return tools.crowd


def carry(made: Pair, what: Any, others: int) -> None:
    """Have it carried beside so many others, and look at its bytes."""
    with ExitStack() as stack:
        for _ in range(others):
            stack.enter_context(crowd_of(made))
        work, _ = submit(made.endpoint, what)
    assert (work.status == Status.COMPLETED).all()


def test_whoever_copies_alone_keeps_the_gil_and_one_of_several_gives_it_up(
    two: Pair, kept: list[bool]
) -> None:
    for others in (0, 1, 0):
        rows = blocks(*LONG, MIB, (0,), seed=others)
        two.owner.ask(owners.fill, 0, 9)
        carry(two, requests(two.node, two.owner.peer, Opcode.WRITE, rows), others)
        two.check(rows[::50])
    assert kept == [True, False, True]


def test_a_short_copy_keeps_the_gil_among_several(two: Pair, kept: list[bool]) -> None:
    rows = blocks(*SHORT, MIB, (0,))
    carry(two, requests(two.node, two.owner.peer, Opcode.WRITE, rows), 3)
    assert kept == [True]


def test_what_is_posted_again_is_planned_anew_only_when_it_meets_others_or_is_alone_again(
    two: Pair, kept: list[bool]
) -> None:
    rows = blocks(*LONG, MIB, (0,))
    what = requests(two.node, two.owner.peer, Opcode.WRITE, rows, reused=True)
    for others in (0, 0, 1, 2, 0):
        carry(two, what, others)
    assert kept == [True, False, True]


def test_who_has_met_others_expects_them_again_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 5.0
    monkeypatch.setattr("tent_shm.crowd.time.monotonic", lambda: now)
    several = Crowd()
    with several as first, several as second:
        assert (first, second) == (1, 2)
    with several as again:
        assert again == 2
    now += crowd.LINGER_S
    with several as alone:
        assert alone == 1


def test_one_thread_is_helped_and_several_only_where_processors_are_left(two: Pair) -> None:
    ways = replace(two.endpoint._ways, split_bytes=MIB, threads=2, processors=2)
    assert ways.split(MIB, crowd=1)
    assert not ways.split(MIB - 1, crowd=1)
    assert not ways.split(MIB, crowd=2)
    many = replace(ways, processors=8)
    assert many.split(MIB, crowd=4)
    assert not many.split(MIB, crowd=5)
    assert replace(ways, processors=1).split(MIB, crowd=1)
