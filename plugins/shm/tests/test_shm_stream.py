"""Cutting and settling streams, against models that go byte by byte."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tent_core.types import Opcode
from tent_core.work import Iovecs
from tent_shm.stream import Ends, Gap, Stream, part, row_at, runs, runs_of, settle, shares, window

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A machine that does other things as well is no failure."""

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)
FAR = 1 << 62  # addresses near the top, where a float would lose bytes


def stream(lengths: list[int]) -> tuple[Iovecs, Ends]:
    """Iovecs with a hole behind each, and where they end in the stream."""
    sizes = np.array(lengths, np.uint64)
    iovecs = np.empty((len(lengths), 2), np.uint64)
    iovecs[:, 0] = FAR + np.cumsum([0, *[n + 7 for n in lengths[:-1]]])
    iovecs[:, 1] = sizes
    return iovecs, np.cumsum(sizes, dtype=np.uint64)


def addresses(iovecs: Iovecs) -> list[int]:
    """The address of every byte, in order."""
    return [int(a) + i for a, n in iovecs for i in range(int(n))]


@PATIENT
@given(LENGTHS, st.integers(1, 5), st.integers(1, 50), st.data())
def test_windows_cover_a_range_byte_by_byte_within_their_limits(
    lengths: list[int], pieces: int, size: int, data: st.DataObject
) -> None:
    iovecs, ends = stream(lengths)
    start = data.draw(st.integers(0, int(ends[-1]) - 1))
    stop = data.draw(st.integers(start + 1, int(ends[-1])))
    found: list[int] = []
    position = start
    while position < stop:
        first, last, until = window(ends, position, stop, pieces, size)
        cut = part(iovecs, ends, first, last, position, until)
        assert position < until <= stop
        assert len(cut) == last - first <= pieces
        assert int(cut[:, 1].sum()) == until - position <= size
        assert (cut[:, 1] > 0).all()
        found += addresses(cut)
        position = until
    assert found == addresses(iovecs)[start:stop]


@PATIENT
@given(LENGTHS)
def test_cutting_a_stream_does_not_change_it(lengths: list[int]) -> None:
    iovecs, ends = stream(lengths)
    before = iovecs.copy()
    part(iovecs, ends, 0, len(lengths), 0, int(ends[-1]))[:] = 0
    assert (iovecs == before).all()


@PATIENT
@given(LENGTHS, st.integers(1, 6), st.sampled_from([1, 4, 16]))
def test_shares_cover_the_whole_stream_in_order(lengths: list[int], count: int, align: int) -> None:
    _, ends = stream(lengths)
    found = shares(ends, count, align)
    assert 1 <= len(found) <= count
    assert [a for a, _ in found] == [0, *[b for _, b in found[:-1]]]
    assert found[-1][1] == int(ends[-1])
    assert all(a < b for a, b in found)


def test_shares_of_small_requests_are_cut_between_them_and_those_of_a_large_one_within_it() -> None:
    small, half = np.cumsum(np.full(1000, 4096, np.uint64)), 500 * 4096
    assert shares(small, 2) == [(0, half), (half, 2 * half)]
    assert shares(np.array([16 << 20], np.uint64), 2) == [(0, 8 << 20), (8 << 20, 16 << 20)]


@PATIENT
@given(LENGTHS, st.data())
def test_what_did_not_move_is_settled_per_request_byte_by_byte(
    lengths: list[int], data: st.DataObject
) -> None:
    _, ends = stream(lengths)
    edges = sorted(data.draw(st.sets(st.integers(0, int(ends[-1])), max_size=8)))
    ranges = list(itertools.pairwise(edges))[::2]
    gaps = [Gap(a, b, ValueError(f"{a}")) for a, b in ranges]
    outcome = settle(ends, gaps)
    owner = [row_at(ends, i) for i in range(int(ends[-1]))]
    for row, length in enumerate(lengths):
        lost = [i for a, b in ranges for i in range(a, b) if owner[i] == row]
        assert int(outcome.moved[row]) == length - len(lost)
        if lost:
            first = next(gap for gap in gaps if gap.start <= lost[0] < gap.stop)
            assert outcome.causes[outcome.failed[row]] is first.cause
        else:
            assert outcome.failed[row] == -1


@PATIENT
@given(st.lists(st.integers(-2, 3), max_size=30))
def test_runs_are_the_values_again(values: list[int]) -> None:
    found = runs(np.array(values, np.int32))
    assert [v for a, b, v in found for _ in range(b - a)] == values
    assert all(x[2] != y[2] for x, y in itertools.pairwise(found))


@PATIENT
@given(st.sets(st.integers(0, 40), min_size=1))
def test_runs_of_rows_are_the_rows_again(rows: set[int]) -> None:
    found = runs_of(np.array(sorted(rows)), 41)
    assert [i for a, b in found for i in range(a, b)] == sorted(rows)
    assert all(x[1] < y[0] for x, y in itertools.pairwise(found))


def test_no_rows_means_all_rows() -> None:
    assert runs_of(None, 5) == [(0, 5)]


def test_positions_beyond_2_to_the_53_are_exact() -> None:
    ends = np.array([(1 << 53) + 1, (1 << 53) + 2, 1 << 63], np.uint64)
    assert row_at(ends, 1 << 53) == 0
    assert row_at(ends, (1 << 53) + 1) == 1
    assert row_at(ends, (1 << 53) + 2) == 2
    iovecs = np.array([[1, (1 << 53) + 1], [9, 1], [20, (1 << 63) - (1 << 53) - 2]], np.uint64)
    cut = part(iovecs, ends, 0, 2, 1 << 53, (1 << 53) + 2)
    assert cut.tolist() == [[(1 << 53) + 1, 1], [9, 1]]


@pytest.mark.parametrize(
    ("n", "direct", "one"),
    [(1, True, True), (2, True, False), (1024, False, True), (1025, False, False)],
)
def test_one_call_takes_1024_blocks_or_one_by_memmove(n: int, direct: bool, one: bool) -> None:
    iovecs, ends = stream([8] * n)
    whole = Stream(Opcode.READ, iovecs, iovecs, int(ends[-1]), None, 1, direct).whole(keep_gil=True)
    assert (whole is not None) == one
