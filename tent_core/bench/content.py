"""Bytes that tell every block of a batch, and every round, apart."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

_STARTS = 1 << 16


@functools.lru_cache(maxsize=1)
def _random_bytes(block: int) -> NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng(block).bytes(block + _STARTS), np.uint8)


def _content(index: int, block: int, key: int) -> NDArray[np.uint8]:
    """Block `index` of round `key`: a window into random bytes.

    The odd factor keeps the windows of up to 65,536 blocks apart.
    """
    start = (index * 40503 + key * 9973) % _STARTS
    return _random_bytes(block)[start : start + block]


def fill(memory: NDArray[np.uint8], offsets: NDArray[np.uint64], block: int, key: int) -> None:
    """Write the blocks of round `key` to these offsets."""
    for index, offset in enumerate(offsets.tolist()):
        memory[offset : offset + block] = _content(index, block, key)


def wrong(memory: NDArray[np.uint8], offsets: NDArray[np.uint64], block: int, key: int) -> int:
    """How many of these offsets do not hold the block of round `key`."""
    return sum(
        not np.array_equal(memory[offset : offset + block], _content(index, block, key))
        for index, offset in enumerate(offsets.tolist())
    )
