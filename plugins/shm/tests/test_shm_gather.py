"""Blocks of one size are copied by numpy where that is faster, each to its place and nothing beside them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from shm_harness import Array, noise

from tent_shm import gather

MIB = 1 << 20

NAMED = 1 << 46
"""Where the iovecs say that memory is, wherever it is mapped."""


def side(array: Array, offsets: NDArray[np.intp], lengths: int | list[int]) -> gather.Side:
    made = np.empty((len(offsets), 2), np.uint64)
    made[:, 0] = NAMED + offsets
    made[:, 1] = lengths
    return gather.Side(made, gather.Region(NAMED, array.ctypes.data, array.nbytes))


@pytest.mark.parametrize(
    ("count", "block", "keep_gil"),
    [
        (16, 1, True),
        (17, 300_001, True),
        (100, 4096, True),
        (1000, 4097, True),
        (700, 8, True),
        (16, 2 * MIB, True),
        (512, 4096, False),
        (1023, 33, False),
        (1600, 4097, False),
    ],
)
def test_every_block_is_copied_to_its_place_and_nothing_beside_them(
    count: int, block: int, keep_gil: bool
) -> None:
    rng = np.random.default_rng(count)
    size = (count + 20) * block
    source, target, expected = noise(size, 1), noise(size, 2), noise(size, 2)
    here = rng.permutation(count + 20)[:count] * block
    there = rng.permutation(count + 20)[:count] * block
    sides = (side(target, there, block), side(source, here, block))
    call = gather.arranged(*sides, count * block, keep_gil=keep_gil)
    assert call is not None
    call()
    for a, b in zip(here.tolist(), there.tolist(), strict=True):
        expected[b : b + block] = source[a : a + block]
    assert np.array_equal(target, expected)


def test_few_blocks_and_large_sums_and_blocks_of_several_sizes_are_left_to_the_kernel() -> None:
    memory = np.zeros(MIB, np.uint8)

    def arranged(count: int, lengths: int | list[int], total: int) -> object:
        rows = side(memory, np.arange(count) * 256, lengths)
        return gather.arranged(rows, rows, total)

    assert arranged(gather.LEAST, 256, 256 * gather.LEAST) is not None
    assert arranged(gather.LEAST - 1, 256, 256 * (gather.LEAST - 1)) is None
    assert arranged(20, [256] * 19 + [255], 20 * 256 - 1) is None
    assert arranged(20, [256] * 18 + [255, 257], 20 * 256) is None
    block = gather.MOST_BYTES // 16 + 1
    assert arranged(16, block, 16 * block) is None


def test_without_the_gil_few_blocks_and_large_sums_are_left_to_the_kernel() -> None:
    memory = np.zeros(MIB, np.uint8)

    def arranged(count: int, block: int) -> object:
        rows = side(memory, np.arange(count), block)
        return gather.arranged(rows, rows, count * block, keep_gil=False)

    assert arranged(gather.LEAST_RELEASED, 16) is not None
    assert arranged(gather.LEAST_RELEASED - 1, 16) is None
    assert arranged(1024, gather.MOST_BYTES_RELEASED // 1024) is not None
    assert arranged(1024, gather.MOST_BYTES_RELEASED // 1024 + 1) is None


def test_an_address_outside_of_its_region_is_an_error_before_anything_is_copied() -> None:
    source, target = noise(20 * 4096, 1), noise(20 * 4096, 2)
    before = target.copy()
    good = side(target, np.arange(20) * 4096, 4096)
    beyond = side(source, np.arange(20) * 4096, 4096)
    beyond.iovecs[19, 0] += 1
    for sides in ((good, beyond), (beyond, good)):
        call = gather.arranged(*sides, 20 * 4096)
        assert call is not None
        with pytest.raises(IndexError):
            call()
    assert np.array_equal(target, before)


def test_regions_too_large_for_one_array_are_left_to_the_kernel() -> None:
    near = side(np.zeros(MIB, np.uint8), np.arange(20) * 4096, 4096)
    far = near._replace(region=near.region._replace(length=1 << 41))
    assert gather.arranged(near, far, 20 * 4096) is None
    assert gather.arranged(far, near, 20 * 4096) is None


def test_a_region_around_blocks_begins_with_the_first_and_ends_with_the_last() -> None:
    blocks = side(np.zeros(MIB, np.uint8), np.array([4096, 65536, 100]), [10, 20, 30]).iovecs
    assert gather.around(blocks) == gather.Region(NAMED + 100, NAMED + 100, 65536 + 20 - 100)
