"""Pages that were filled are found right, and any byte that is not is found wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tent_core.replay.geometry import PAGES_PER_BLOCK, Geometry, Pages
from tent_core.replay.messages import hashes_of
from tent_core.replay.pattern import PoolView

GEOMETRY = Geometry("small", layers=3, token_bytes=8)
BLOCKS = 3
POOL_PAGES = (BLOCKS + 1) * PAGES_PER_BLOCK
HASHES = hashes_of([0, 1, 2**64 - 1])


def filled() -> tuple[np.ndarray, PoolView, Pages]:
    memory = np.zeros(POOL_PAGES * GEOMETRY.page_bytes + 40, np.uint8)
    view = PoolView(memory, GEOMETRY)
    pages = np.random.default_rng(1).permutation(POOL_PAGES)[: BLOCKS * PAGES_PER_BLOCK]
    pages = pages.reshape(BLOCKS, PAGES_PER_BLOCK)
    view.fill(HASHES, pages)
    return memory, view, pages


def test_what_was_filled_is_right() -> None:
    _, view, pages = filled()
    verdict = view.verify(HASHES, pages)
    assert (verdict.pieces, verdict.mismatches) == (BLOCKS * GEOMETRY.pieces_per_block, 0)
    assert verdict.first is None


def test_only_the_pages_of_the_blocks_are_written() -> None:
    memory, _, pages = filled()
    planes = memory[: POOL_PAGES * GEOMETRY.page_bytes].reshape(GEOMETRY.planes, POOL_PAGES, -1)
    others = np.setdiff1d(np.arange(POOL_PAGES), pages)
    assert not planes[:, others].any()
    assert planes[:, pages.reshape(-1)].any(axis=2).all()


@settings(max_examples=60, deadline=None)
@given(
    block=st.integers(0, BLOCKS - 1),
    place=st.integers(0, PAGES_PER_BLOCK - 1),
    plane=st.integers(0, GEOMETRY.planes - 1),
    byte=st.integers(0, GEOMETRY.piece_bytes - 1),
    bit=st.integers(0, 7),
)
def test_one_flipped_bit_anywhere_is_found_and_located(
    block: int, place: int, plane: int, byte: int, bit: int
) -> None:
    memory, view, pages = filled()
    page = int(pages[block, place])
    offset = (plane * POOL_PAGES + page) * GEOMETRY.piece_bytes + byte
    memory[offset] ^= 1 << bit
    verdict = view.verify(HASHES, pages)
    assert verdict.mismatches == 1
    first = verdict.first
    assert first is not None
    assert (first.block, first.page, first.byte) == (int(HASHES[block]), page, byte)
    assert (first.layer, first.part) == divmod(plane, 2)
    assert first.found == memory[offset] == first.expected ^ (1 << bit)
    assert f"byte {byte}: expected" in str(first)


def test_a_byte_outside_the_blocks_is_none_of_their_business() -> None:
    memory, view, pages = filled()
    memory[-40:] = 7
    spare = int(np.setdiff1d(np.arange(POOL_PAGES), pages)[0])
    memory[spare * GEOMETRY.piece_bytes] ^= 1
    assert view.verify(HASHES, pages).mismatches == 0


@pytest.mark.parametrize("swap", ["pages of a block", "pages of two blocks", "planes"])
def test_pieces_that_lie_in_each_others_place_are_found(swap: str) -> None:
    _, view, pages = filled()
    a, b = pages[0, 0], pages[0, 1] if swap == "pages of a block" else pages[1, 0]
    if swap == "planes":
        view.planes[[0, 1], a] = view.planes[[1, 0], a]
    else:
        view.planes[0, [a, b]] = view.planes[0, [b, a]]
    assert view.verify(HASHES, pages).mismatches == 2


def test_scrubbed_pages_hold_nothing_of_the_block_before() -> None:
    _, view, pages = filled()
    view.scrub(pages[1:])
    verdict = view.verify(HASHES, pages)
    assert verdict.mismatches == 2 * GEOMETRY.pieces_per_block
    assert verdict.first is not None
    assert verdict.first.block == 1


def test_two_hashes_differ_in_every_word() -> None:
    _, view, pages = filled()
    words = view.planes[:, pages]
    assert (words[:, 0] != words[:, 1]).all()


def test_pieces_larger_than_a_chunk_are_checked_whole() -> None:
    geometry = Geometry("large", layers=1, token_bytes=32 << 10)
    memory = np.zeros(PAGES_PER_BLOCK * geometry.page_bytes, np.uint8)
    view = PoolView(memory, geometry)
    pages = np.arange(PAGES_PER_BLOCK).reshape(1, -1)
    view.fill(hashes_of([5]), pages)
    memory[-1] ^= 128
    verdict = view.verify(hashes_of([5]), pages)
    assert (verdict.pieces, verdict.mismatches) == (64, 1)
