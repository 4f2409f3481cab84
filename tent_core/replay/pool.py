"""Which block lies on which pages: free pages, and least recently used blocks that make room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tent_core.replay.errors import PoolTooSmall


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the blocks of one request lie. All of them are pinned until the placement is released.

    `hashes` are the blocks in the order asked for, `pages` int64 of shape (blocks, pages per block), and
    `fresh` a bool column: True where the block was not held before, so that its pages hold nothing of it yet.
    """

    hashes: tuple[int, ...]
    pages: NDArray[np.int64]
    fresh: NDArray[np.bool_]
    evicted: tuple[int, ...] = ()


@dataclass(slots=True)
class _Block:
    pages: NDArray[np.int64]
    pins: int = 0


class PagedPool:
    """`pages` pages, of which each block takes `pages_per_block` at random places. Not thread-safe.

    A page belongs to at most one block. Pinned blocks are never evicted.
    """

    def __init__(self, pages: int, pages_per_block: int, seed: int = 0) -> None:
        self.pages = pages
        self.pages_per_block = pages_per_block
        self._random = np.random.default_rng(seed)
        self._free = np.arange(pages, dtype=np.int64)
        self._blocks: OrderedDict[int, _Block] = OrderedDict()  # least recently used first

    @property
    def free_pages(self) -> int:
        """Pages that no block lies on."""
        return len(self._free)

    @property
    def capacity(self) -> int:
        """How many blocks fit."""
        return self.pages // self.pages_per_block

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def acquire(self, hashes: Sequence[int]) -> Placement:
        """Pin these distinct blocks; those not held get random pages, and the least recently used make room.

        Raises PoolTooSmall, and changes nothing, when they do not fit beside the blocks pinned by others.
        """
        wanted = dict.fromkeys(hashes)
        if len(wanted) != len(hashes):
            raise ValueError("a block is named twice")
        fresh = np.fromiter((h not in self._blocks for h in hashes), np.bool_, len(hashes))
        missing = int(np.count_nonzero(fresh))
        evicted = self._victims(missing * self.pages_per_block - self.free_pages, wanted)
        for block in evicted:
            self._drop(block)
        pages = self._take(missing)
        for block, own in zip((h for h in hashes if h not in self._blocks), pages, strict=True):
            self._blocks[block] = _Block(own)
        for block in hashes:
            self._blocks[block].pins += 1
            self._blocks.move_to_end(block)
        placed = [self._blocks[block].pages for block in hashes]
        table = np.array(placed, np.int64).reshape(len(hashes), self.pages_per_block)
        return Placement(tuple(hashes), table, fresh, evicted)

    def release(self, placement: Placement, keep: bool = True) -> None:
        """Unpin what `acquire` pinned. Without `keep`, forget its fresh blocks: they never arrived."""
        for block, fresh in zip(placement.hashes, placement.fresh, strict=True):
            held = self._blocks[block]
            held.pins -= 1
            if fresh and not keep:
                if held.pins:
                    raise ValueError(f"block {block} is used by another placement")
                self._drop(block)

    def _victims(self, pages: int, wanted: dict[int, None]) -> tuple[int, ...]:
        """The least recently used blocks that free at least so many pages."""
        count = max(0, -(-pages // self.pages_per_block))
        victims: list[int] = []
        for block, held in self._blocks.items():
            if len(victims) == count:
                break
            if not held.pins and block not in wanted:
                victims.append(block)
        if len(victims) < count:
            raise PoolTooSmall(
                f"{len(wanted)} blocks do not fit into a pool of {self.capacity}, "
                f"of which {sum(1 for b in self._blocks.values() if b.pins)} are in use"
            )
        return tuple(victims)

    def _take(self, blocks: int) -> NDArray[np.int64]:
        picked = self._random.choice(len(self._free), blocks * self.pages_per_block, replace=False)
        pages = self._free[picked]
        self._free = np.delete(self._free, picked)
        return pages.reshape(blocks, self.pages_per_block)

    def _drop(self, block: int) -> None:
        self._free = np.concatenate((self._free, self._blocks.pop(block).pages))
