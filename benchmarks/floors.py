"""How fast TENT has to be beside each peer and each limit, as data, and what of a result keeps to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from figures import Figure
from results import FAST, IDLE, Case, Result, Spread

KIB, MIB = 1 << 10, 1 << 20
Shape = tuple[int, int]
"""Bytes of a block, and blocks of a call."""

SINGLES = ((4 * KIB, 1), (64 * KIB, 1), (MIB, 1), (16 * MIB, 1), (64 * MIB, 1))
BATCHES = ((4 * KIB, 1000), (16 * KIB, 1000), (64 * KIB, 500))


def _rows(*floors: float) -> Mapping[Shape, float]:
    """Floors for 1 x 4 KiB, 64 KiB, 1 MiB, 16 and 64 MiB, then the three batches."""
    four, sixty_four, one, large, *batches = floors
    singles = (four, sixty_four, one, large, large)
    return dict(zip((*SINGLES, *BATCHES), (*singles, *batches), strict=True))


@dataclass(frozen=True)
class Column:
    """One way to use TENT: its contender, the floors for peer's time / TENT's by peer, and the limit.

    `beside` are shown and have no floors. Batches take at most `most_over` times the limit.
    """

    title: str
    tent: str
    peers: Mapping[str, Mapping[Shape, float]]
    limit: str
    most_over: float
    beside: tuple[str, ...] = ()


COLUMNS = (
    Column(
        "shm, registered memory",
        "tent shm registered",
        {"nixl": _rows(1.0, 0.9, 0.9, 1.2, 3, 2.2, 2)},
        "cma",
        1.25,
        ("nixl-prepped", "memmove"),
    ),
    Column(
        "shm, allocated memory",
        "tent shm allocated",
        {"nixl": _rows(2.2, 1.5, 1.0, 2.0, 3, 2.2, 2)},
        "cma",
        1.25,
        ("nixl-prepped", "memmove"),
    ),
    Column(
        "tcp",
        "tent tcp allocated",
        {
            "mooncake": _rows(2.0, 1.3, 1.15, 1.2, 10, 2.5, 1.15),
            "nixl-tcp": _rows(1.0, 1.0, 0.8, 1.2, 6, 2.5, 1.5),
        },
        "tcp",
        1.5,
    ),
)

# With a thread that computes in the target, tcp beside the faster peer in the same state.
BUSY_TARGET = "target"
LEAST_BUSY = 1.0
"""For batches, and for single blocks from BUSY_LARGE bytes: peer's time / TENT's."""

BUSY_LARGE = MIB
MOST_BUSY_SMALL = 4.0
"""For smaller single blocks: TENT's time / the peer's."""

BUSY_OWN = (4 * KIB, 1000)
MOST_BUSY_OWN = 2.5
"""For this batch: TENT's time / its own when idle."""


def peer(result: Result, name: str, case: Case, state: str = IDLE) -> Spread | None:
    """A peer's times; those of its fast kind if its processes come in two."""
    kind = FAST if result.kinds(name, state) else None
    return result.spread(name, case, state, kind)


def judge(result: Result) -> list[Figure]:
    """All that the result says of floors and limits."""
    figures: list[Figure] = []
    for column in COLUMNS:
        for case in result.cases():
            figures += _beside_peers(result, column, case)
            figures += _beside_limit(result, column, case)
            figures += _busy(result, column, case)
    return figures


def _beside_peers(result: Result, column: Column, case: Case) -> Iterator[Figure]:
    own = result.spread(column.tent, case)
    for name, floors in column.peers.items():
        other, floor = peer(result, name, case), floors.get((case.block, case.batch))
        if own and other and floor is not None:
            what = f"{column.title} to {name}, {case.op} {case.what}"
            yield Figure(what, other.median / own.median, floor, "times as fast", at_least=True)


def _beside_limit(result: Result, column: Column, case: Case) -> Iterator[Figure]:
    own, limit = result.spread(column.tent, case), result.spread(column.limit, case)
    if own and limit and (case.block, case.batch) in BATCHES:
        what = f"{column.title} over {column.limit}, {case.op} {case.what}"
        yield Figure(what, own.median / limit.median, column.most_over, "times the limit")


def _busy(result: Result, column: Column, case: Case) -> Iterator[Figure]:
    own = result.spread(column.tent, case, BUSY_TARGET)
    if own is None or column.limit != "tcp":
        return
    where = f"{column.title}, busy target, {case.op} {case.what}"
    others = [peer(result, name, case, BUSY_TARGET) for name in column.peers]
    times = [other.median for other in others if other]
    if times and (case.batch > 1 or case.block >= BUSY_LARGE):
        ratio = min(times) / own.median
        yield Figure(f"{where}, faster peer", ratio, LEAST_BUSY, "times as fast", at_least=True)
    elif times:
        ratio = own.median / min(times)
        yield Figure(f"{where}, faster peer", ratio, MOST_BUSY_SMALL, "times its time")
    idle = result.spread(column.tent, case)
    if idle and (case.block, case.batch) == BUSY_OWN:
        ratio = own.median / idle.median
        yield Figure(f"{where}, when idle", ratio, MOST_BUSY_OWN, "times its time")
