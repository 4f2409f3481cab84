"""A paged pool never puts two blocks on one page, and never evicts what is in use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tent_core.replay.errors import PoolTooSmall
from tent_core.replay.pool import PagedPool, Placement

PER_BLOCK = 4
CAPACITY = 6


def pool(blocks: int = CAPACITY, spare: int = 0) -> PagedPool:
    return PagedPool(blocks * PER_BLOCK + spare, PER_BLOCK, seed=3)


def test_blocks_that_are_held_are_reused_on_the_same_pages() -> None:
    pages = pool()
    first = pages.acquire([1, 2])
    pages.release(first)
    second = pages.acquire([2, 3])
    assert second.fresh.tolist() == [False, True]
    assert (second.pages[0] == first.pages[1]).all()
    assert second.evicted == ()


def test_the_least_recently_used_block_makes_room() -> None:
    pages = pool(3)
    pages.release(pages.acquire([1, 2, 3]))
    pages.release(pages.acquire([1]))
    placed = pages.acquire([4])
    assert placed.evicted == (2,)
    assert 2 not in pages
    assert 1 in pages


def test_what_a_request_reuses_is_not_evicted_for_its_other_blocks() -> None:
    pages = pool(3)
    pages.release(pages.acquire([1, 2, 3]))
    placed = pages.acquire([1, 4])  # 1 is the least recently used
    assert placed.evicted == (2,)


def test_blocks_in_use_are_not_evicted_and_a_refused_request_changes_nothing() -> None:
    pages = pool(3)
    held = pages.acquire([1, 2])
    pages.release(pages.acquire([3]))
    with pytest.raises(
        PoolTooSmall, match="2 blocks do not fit into a pool of 3, of which 2 are in use"
    ):
        pages.acquire([4, 5])
    assert all(block in pages for block in (1, 2, 3))
    pages.release(held)
    assert pages.acquire([4, 5]).fresh.all()


def test_fresh_blocks_that_never_arrived_are_forgotten() -> None:
    pages = pool()
    pages.release(pages.acquire([1]))
    failed = pages.acquire([1, 2])
    pages.release(failed, keep=False)
    assert 1 in pages
    assert 2 not in pages
    assert pages.free_pages == (CAPACITY - 1) * PER_BLOCK


def test_a_block_lands_on_pages_that_depend_on_the_seed_alone() -> None:
    one, same, other = (PagedPool(400, PER_BLOCK, seed) for seed in (1, 1, 2))
    placed = [p.acquire([7]).pages for p in (one, same, other)]
    assert (placed[0] == placed[1]).all()
    assert (placed[0] != placed[2]).any()
    assert (np.diff(placed[0][0]) != 1).any()  # not simply one page after the other


class Pool(RuleBasedStateMachine):
    """Random requests, overlapping in time, against the two promises and a model of what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool(spare=3)
        self.active: list[Placement] = []

    @rule(blocks=st.lists(st.integers(0, 12), unique=True, max_size=CAPACITY + 1))
    def acquire(self, blocks: list[int]) -> None:
        pinned = {h for p in self.active for h in p.hashes}
        held = {b for b in range(13) if b in self.pool}
        fits = len(pinned | set(blocks)) <= CAPACITY
        try:
            placed = self.pool.acquire(blocks)
        except PoolTooSmall:
            assert not fits
            assert {b for b in range(13) if b in self.pool} == held
            return
        assert fits
        assert placed.fresh.tolist() == [b not in held for b in blocks]
        assert not pinned & set(placed.evicted)
        assert not set(blocks) & set(placed.evicted)
        self.active.append(placed)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.active.pop(data.draw(st.integers(0, len(self.active) - 1))))

    @invariant()
    def pages_in_use_belong_to_one_block_each(self) -> None:
        where = {
            h: tuple(row)
            for p in self.active
            for h, row in zip(p.hashes, p.pages.tolist(), strict=True)
        }
        for placement in self.active:
            for block, row in zip(placement.hashes, placement.pages.tolist(), strict=True):
                assert where[block] == tuple(row)
        used = [page for row in where.values() for page in row]
        assert len(used) == len(set(used))
        assert all(0 <= page < self.pool.pages for page in used)

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        assert self.pool.free_pages + len(self.pool) * PER_BLOCK == self.pool.pages


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
