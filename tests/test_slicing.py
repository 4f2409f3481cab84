"""How requests are cut into work requests, and when they are finished."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tent_core.slicing import Chunks, Progress, Rule, Slices, cut

KIB, MIB = 1 << 10, 1 << 20
LOCAL, REMOTE = 0x7F00_0000_1000, 0xFFFF_8000_0000_0000
"""Where test memory is said to be; the remote one beyond 2^63, where signed or float columns would break."""


def iovecs(rows: list[tuple[int, int]]) -> np.ndarray:
    return np.array(rows, np.uint64).reshape(-1, 2)


def requests(*lengths: int) -> tuple[np.ndarray, np.ndarray]:
    places = np.cumsum([0, *lengths])[:-1].tolist()
    return (
        iovecs([(LOCAL + place, length) for place, length in zip(places, lengths, strict=True)]),
        iovecs([(REMOTE + place, length) for place, length in zip(places, lengths, strict=True)]),
    )


def chunks(start: int, length: int) -> Chunks:
    return Chunks(np.array([start], np.uint64), np.array([length], np.uint64))


def rows(slices: Slices) -> list[tuple[int, int, int, int]]:
    return list(
        zip(
            slices.request.tolist(),
            slices.local.tolist(),
            slices.remote.tolist(),
            slices.length.tolist(),
            strict=True,
        )
    )


def test_requests_up_to_the_slice_size_stay_whole_and_are_not_copied() -> None:
    local, remote = requests(64 * KIB, 1, 4 * KIB)
    slices = cut(local, remote, Rule(64 * KIB, MIB, 2))
    assert not slices.cut
    assert np.shares_memory(slices.local, local)
    assert np.shares_memory(slices.remote, remote)
    assert np.shares_memory(slices.length, local)
    assert slices.request.tolist() == [0, 1, 2]


def test_no_column_can_be_written_and_the_requests_still_can() -> None:
    for lengths in ((5,), (100,), (5, 100), (5, 6)):
        local, remote = requests(*lengths)
        for grid in (None, chunks(LOCAL, 3)):
            slices = cut(local, remote, Rule(10, 10, 1), grid)
            for column in (slices.local, slices.remote, slices.length, slices.request):
                with pytest.raises(ValueError, match="read-only"):
                    column[0] = 0
        assert local.flags.writeable
        assert remote.flags.writeable


@pytest.mark.parametrize(
    ("length", "rails", "expected"),
    [
        (64 * KIB + 1, 1, [64 * KIB, 1]),
        (256 * KIB, 1, [64 * KIB] * 4),
        (512 * KIB, 1, [128 * KIB] * 4),
        (512 * KIB, 2, [64 * KIB] * 8),
        (600 * KIB, 2, [128 * KIB] * 4 + [88 * KIB]),
        (64 * MIB, 2, [MIB] * 64),
    ],
)
def test_pieces_grow_with_the_request_between_the_two_sizes_while_every_rail_gets_some(
    length: int, rails: int, expected: list[int]
) -> None:
    slices = cut(*requests(length), Rule(64 * KIB, MIB, rails))
    assert slices.length.tolist() == expected


def test_an_empty_batch_has_no_slices() -> None:
    slices = cut(iovecs([]), iovecs([]), Rule(10, 10, 1), chunks(0, 5), chunks(0, 5))
    assert (len(slices), slices.cut, slices.request.tolist()) == (0, False, [])


def test_a_piece_ends_where_the_memory_of_a_side_goes_on_in_another_registration() -> None:
    local, remote = iovecs([(1000, 50)]), iovecs([(2005, 50)])
    whole = Rule(100, 100, 1)
    assert rows(cut(local, remote, whole, chunks(1000, 50), chunks(2005, 50))) == [
        (0, 1000, 2005, 50)
    ]
    assert rows(cut(local, remote, whole, chunks(980, 30), chunks(2000, 20))) == [
        (0, 1000, 2005, 10),
        (0, 1010, 2015, 5),
        (0, 1015, 2020, 20),
        (0, 1035, 2040, 5),
        (0, 1040, 2045, 10),
    ]


lengths_ = st.integers(1, 300)
rules = st.tuples(st.integers(1, 40), st.integers(0, 60), st.integers(1, 4)).map(
    lambda t: Rule(t[0], t[0] + t[1], t[2])
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    n = draw(st.integers(0, 6))
    offsets = st.integers(0, 500)
    local, remote = [], []
    for _ in range(n):
        length = draw(lengths_)
        local.append((LOCAL + draw(offsets), length))
        remote.append((REMOTE + draw(offsets), length))
    return local, remote


grids = st.none() | st.integers(1, 200)


def naive_cuts(address: int, length: int, start: int, chunk: int | None) -> set[int]:
    """Offsets in the request at which another chunk begins."""
    return (
        set()
        if chunk is None
        else {k for k in range(1, length) if (address - start + k) % chunk == 0}
    )


@given(batches(), rules, grids, grids)
def test_slices_cover_every_request_once_and_in_order_within_sizes_and_registrations(
    batch: tuple[list[tuple[int, int]], list[tuple[int, int]]],
    rule: Rule,
    local_chunk: int | None,
    remote_chunk: int | None,
) -> None:
    local, remote = batch
    slices = cut(
        iovecs(local),
        iovecs(remote),
        rule,
        None if local_chunk is None else chunks(LOCAL, local_chunk),
        None if remote_chunk is None else chunks(REMOTE, remote_chunk),
    )
    expected = []
    for request, ((here, length), (there, _)) in enumerate(zip(local, remote, strict=True)):
        piece = length if length <= rule.slice else rule.piece(length)
        begins = {0, *range(0, length, piece)}
        begins |= naive_cuts(here, length, LOCAL, local_chunk)
        begins |= naive_cuts(there, length, REMOTE, remote_chunk)
        edges = [*sorted(begins), length]
        expected += [(request, here + a, there + a, b - a) for a, b in itertools.pairwise(edges)]
    assert rows(slices) == expected
    assert slices.cut == (len(expected) > len(local))
    for column in (slices.local, slices.remote, slices.length):
        assert column.dtype == np.uint64
    assert slices.request.dtype == np.intp


@given(st.lists(st.integers(1, 2**40), max_size=20), rules)
def test_pieces_of_a_request_that_is_cut_lie_between_the_two_sizes_but_for_the_last(
    lengths: list[int], rule: Rule
) -> None:
    rule = Rule(rule.slice << 30, rule.largest_slice << 30, rule.rails)
    slices = cut(*requests(*lengths), rule)
    for request, length in enumerate(lengths):
        pieces = slices.length[slices.request == request].tolist()
        assert sum(pieces) == length
        assert (len(pieces) == 1) if length <= rule.slice else len(pieces) >= 1
        assert all(rule.slice <= piece <= rule.largest_slice for piece in pieces[:-1])
        assert pieces[-1] <= rule.largest_slice
        if length > rule.slice:
            enough = min(rule.rails, -(-length // rule.largest_slice))
            assert len(pieces) >= min(enough, -(-length // rule.slice))


def test_where_nothing_was_cut_the_requests_finish_as_their_slices_do() -> None:
    progress = Progress(cut(*requests(1, 2, 3, 4), Rule(10, 10, 1)))
    assert progress.done(1, 3) == ([(1, 3)], [])
    assert progress.failed(3, 4) == ([], [(3, 4)])
    assert progress.done(2, 2) == ([], [])
    assert progress.remaining == 1
    with pytest.raises(IndexError, match=r"slices \[0, 5\) of 4"):
        progress.done(0, 5)


def test_a_request_is_told_failed_when_its_last_slice_has_ended_and_not_before() -> None:
    progress = Progress(cut(*requests(30, 10), Rule(10, 10, 1)))
    assert progress.failed(1, 2) == ([], [])
    assert progress.done(2, 4) == ([(1, 2)], [])
    assert progress.done(0, 1) == ([], [(0, 1)])
    assert progress.remaining == 0


@given(st.lists(st.integers(1, 60), max_size=12), st.randoms(use_true_random=False))
def test_every_request_is_told_once_when_its_last_slice_ends_whatever_the_order(
    lengths: list[int], seeded: random.Random
) -> None:
    slices = cut(*requests(*lengths), Rule(10, 10, 1))
    owner = slices.request.tolist()
    progress = Progress(slices)
    edges = sorted({0, len(slices), *(seeded.randrange(len(slices) + 1) for _ in range(6))})
    groups = list(itertools.pairwise(edges))
    seeded.shuffle(groups)
    left = {request: owner.count(request) for request in owner}
    broken = set()
    for start, stop in groups:
        fails = seeded.random() < 0.3
        told = progress.failed(start, stop) if fails else progress.done(start, stop)
        good, bad = [], []
        for request in owner[start:stop]:
            left[request] -= 1
            if fails:
                broken.add(request)
        for request in sorted(set(owner[start:stop])):
            if left[request] == 0:
                (bad if request in broken else good).append(request)
        assert [r for a, b in told.completed for r in range(a, b)] == good
        assert [r for a, b in told.failed for r in range(a, b)] == bad
        for ranges in told:
            assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))
    assert progress.remaining == 0
