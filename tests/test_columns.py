"""What an application passes becomes exact uint64 columns inside registered buffers, or a clear error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tent_core import columns
from tent_core.errors import RangeError, UsageError
from tent_core.types import Opcode


@dataclass(frozen=True)
class Range:
    id: int
    name: str
    address: int
    length: int


KV = Range(3, "kv", 1 << 40, 1000)


@pytest.mark.parametrize(
    "values",
    [[0.5], [1e3], [-1], [2**64], [[1], [2]], ["1"], [None], [True, 2**64], np.array([1.0])],
)
def test_what_is_not_an_exact_unsigned_integer_column_is_refused(values: object) -> None:
    with pytest.raises(UsageError):
        columns.column(values, "offsets")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [2**53 - 1, 2**53 + 1, 2**63 - 1, 2**63 + 1, 2**64 - 1])
def test_numbers_near_the_limits_stay_exact(value: int) -> None:
    assert columns.column([value], "offsets").tolist() == [value]


def test_a_range_that_ends_at_the_end_of_the_buffer_is_inside() -> None:
    side = columns.side(KV, [0, 999, 0], columns.lengths_of([1000, 1, 1], 3), None, "local")
    assert side.iovecs[:, 0].tolist() == [KV.address, KV.address + 999, KV.address]
    assert side.used == (KV,)


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (0, 1001),
        (999, 2),
        (1000, 1),
        (1001, 1),
        (2**64 - 1, 1),
        (2**64 - 1, 2**64 - 1),
        (1, 2**64 - 1),
    ],
)
def test_a_range_outside_the_buffer_or_one_that_overflows_names_request_and_buffer(
    offset: int, length: int
) -> None:
    sizes = columns.lengths_of(np.array([1, length], np.uint64), 2)
    with pytest.raises(RangeError, match=r"request 1: .* 'kv', which has 1000 bytes"):
        columns.side(KV, np.array([0, offset], np.uint64), sizes, None, "remote")


def test_a_zero_length_is_refused() -> None:
    with pytest.raises(RangeError, match="request 1 has length 0"):
        columns.lengths_of([4, 0], 2)


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(UsageError, match="3 lengths, but 2 requests"):
        columns.lengths_of([1, 2, 3], 2)
    with pytest.raises(UsageError, match="shape"):
        columns.side(KV, [0], columns.lengths_of([1, 1], 2), None, "local")


def test_a_sequence_of_buffers_needs_an_index_that_stays_inside_it() -> None:
    sizes = columns.lengths_of([1, 1], 2)
    with pytest.raises(UsageError, match="local_index"):
        columns.side([KV], [0, 0], sizes, None, "local")
    with pytest.raises(UsageError, match="goes up to 1, but there are 1 buffers"):
        columns.side([KV], [0, 0], sizes, [0, 1], "local")
    with pytest.raises(UsageError, match="needs a sequence"):
        columns.side(KV, [0, 0], sizes, [0, 0], "local")


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.one_of(
                st.integers(0, 40),
                st.integers(2**64 - 40, 2**64 - 1),
                st.integers(2**53 - 2, 2**53 + 2),
            ),
            st.one_of(st.integers(1, 40), st.integers(2**64 - 40, 2**64 - 1)),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_rows_pass_exactly_when_python_integers_say_that_they_lie_inside(
    rows: list[tuple[int, int, int]],
) -> None:
    buffers = [Range(7, "a", 4096, 32), Range(1, "b", 2**63, 16), Range(5, "c", 2**64 - 64, 64)]
    which, offsets, lengths = zip(*rows, strict=True)
    inside = all(o + n <= buffers[w].length for w, o, n in rows)
    sizes = columns.lengths_of(np.array(lengths, np.uint64), len(rows))
    try:
        side = columns.side(buffers, np.array(offsets, np.uint64), sizes, which, "remote")
    except RangeError:
        assert not inside
        return
    assert inside
    assert side.iovecs[:, 0].tolist() == [buffers[w].address + o for w, o, _ in rows]
    assert side.ids.tolist() == [buffers[w].id for w in which]
    assert {b.id for b in side.used} == {buffers[w].id for w in which}


def test_one_direction_given_as_a_column_is_one_direction() -> None:
    assert columns.opcodes([1, 1], 2) is Opcode.WRITE
    assert columns.opcodes("read", 2) is Opcode.READ
    mixed = columns.opcodes([1, 0], 2)
    assert not isinstance(mixed, Opcode)
    assert mixed.tolist() == [1, 0]
    for wrong in ("copy", [2, 0], [1]):
        with pytest.raises(UsageError):
            columns.opcodes(wrong, 2)


def test_lengths_whose_sum_would_wrap_are_refused() -> None:
    everything = Range(0, "everything", 4096, 2**64 - 8192)
    for half in (columns.lengths_of(2**63, 2), columns.lengths_of([2**63, 2**63], 2)):
        assert len(columns.side(everything, [0, 0], half, None, "local").iovecs) == 2
        with pytest.raises(RangeError, match=f"2 requests of {2**64} bytes together"):
            columns.total_of(half)
    assert columns.total_of(columns.lengths_of([2**62, 1, 2**61], 3)) == 2**62 + 2**61 + 1
    assert columns.total_of(columns.lengths_of(5, 3)) == 15
    assert columns.total_of(columns.lengths_of(5, 0)) == 0


@pytest.mark.parametrize("wrong", [True, 4096.0, 2**64, -1, "4096", None])
def test_one_length_for_all_is_an_exact_unsigned_integer_as_well(wrong: object) -> None:
    with pytest.raises(UsageError):
        columns.lengths_of(wrong, 2)  # type: ignore[arg-type]
    with pytest.raises(RangeError, match="request 0 has length 0"):
        columns.lengths_of(0, 2)
