"""Many blocks of one size between mappings of this process, without a system call that pins their pages.

To numpy, memory is an array of blocks that start one byte after another, so that an address less the lowest
is an index; blocks are gathered by such indexes into a portion that fits the second-level cache, and from
there scattered. For large blocks the second copy costs more than an assignment of a memoryview for each.
Microseconds, beside one call of process_vm_writev(2) on this process's own memory: 1,000 x 4 KiB 131 (436),
100 x 4 KiB 12 (46), 1,000 x 16 KiB 1,156 (2,472), 500 x 64 KiB 1,978 (4,756; by numpy 2,448).

So the GIL is kept. Where several threads copy at once it is given up: numpy does so for more than 500 blocks,
which is one portion then. That leaves the second-level cache, 160 microseconds for 1,000 x 4 KiB, but two
threads make one such copy every 86 (every 164 with the GIL kept), and from 8 MiB on the kernel is as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tent_core.work import Iovecs

LEAST = 16
"""With fewer blocks a system call is as fast."""

MOST_BYTES = 32 << 20
"""About 3 ms. The GIL is kept for a portion at a time, so others get it when they ask for it."""

LEAST_RELEASED = 512
"""numpy releases the GIL for more than 500 items (NPY_BEGIN_THREADS_THRESHOLDED, ndarraytypes.h)."""

MOST_BYTES_RELEASED = 8 << 20

LARGE_BLOCK = 32 << 10

_PORTION_BYTES = 256 << 10

_SPAN = 1 << 40
"""numpy multiplies the number of places by the size of a block, which must stay below 2^63."""


class _Raw:
    """Memory as numpy's array interface describes it: `count` items of a type, one byte after another."""

    def __init__(self, address: int, count: int, kind: str) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (count,),
            "strides": (1,),
            "typestr": kind,
            "version": 3,
        }


class _Side(NamedTuple):
    """Blocks at `indexes` of the bytes from `lowest` on, which are `span` places for a block."""

    lowest: int
    span: int
    indexes: NDArray[np.intp]

    def blocks(self, block: int) -> NDArray[Any]:
        return np.asarray(_Raw(self.lowest, self.span, f"|V{block}"))

    def memory(self, block: int) -> memoryview:
        return np.asarray(_Raw(self.lowest, self.span - 1 + block, "|u1")).data


def arranged(
    target: Iovecs, source: Iovecs, total: int, *, keep_gil: bool = True
) -> Callable[[], None] | None:
    """A call that copies row i of `source` to row i of `target`; None where a system call does as well.

    Addresses that are not mapped end the process, as with memmove.
    """
    n = len(source)
    if n < (LEAST if keep_gil else LEAST_RELEASED):
        return None
    if total > (MOST_BYTES if keep_gil else MOST_BYTES_RELEASED):
        return None
    block = int(source[:, 1].max())
    if total != n * block:  # the others are not as long as the longest
        return None
    to, from_ = _side(target), _side(source)
    if max(to.span, from_.span) > _SPAN:
        return None
    if block < LARGE_BLOCK:
        portion = _PORTION_BYTES // block if keep_gil else -(-n // (n // LEAST_RELEASED))
        return partial(
            _gather, to.blocks(block), to.indexes, from_.blocks(block), from_.indexes, portion
        )
    places = list(zip(to.indexes.tolist(), from_.indexes.tolist(), strict=True))
    return partial(_copy_each, to.memory(block), from_.memory(block), places, block)


def _side(iovecs: Iovecs) -> _Side:
    addresses = iovecs[:, 0]
    lowest = addresses.min()
    indexes = (addresses - lowest).view(np.intp)
    return _Side(int(lowest), int(indexes.max()) + 1, indexes)


def _gather(
    target: NDArray[Any],
    there: NDArray[np.intp],
    source: NDArray[Any],
    here: NDArray[np.intp],
    portion: int,
) -> None:
    for start in range(0, len(here), portion):
        rows = slice(start, start + portion)
        target[there[rows]] = source[here[rows]]


def _copy_each(
    target: memoryview, source: memoryview, places: list[tuple[int, int]], block: int
) -> None:
    for there, here in places:
        target[there : there + block] = source[here : here + block]
