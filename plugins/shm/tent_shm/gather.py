"""Many blocks of one size between mappings of this process, without a system call that pins their pages.

To numpy, memory is an array of blocks that start one byte after another, so that an address less the first
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
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tent_core.work import Iovecs
from tent_shm.syscalls import memory

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


class Region(NamedTuple):
    """Memory in which all blocks of a side lie: its first address as their iovecs have it, where that is
    mapped here, and its bytes."""

    start: int
    address: int
    length: int


def around(iovecs: Iovecs) -> Region:
    """The smallest region of these blocks, which are mapped where they say."""
    lowest = int(iovecs[:, 0].min())
    return Region(lowest, lowest, int((iovecs[:, 0] + iovecs[:, 1]).max()) - lowest)


class Side(NamedTuple):
    """Blocks, and the region that they lie in."""

    iovecs: Iovecs
    region: Region

    @property
    def indexes(self) -> NDArray[np.intp]:
        """The blocks' places within the region."""
        return np.subtract(self.iovecs[:, 0], np.uint64(self.region.start)).view(np.intp)


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


@lru_cache(maxsize=256)
def _blocks(address: int, length: int, block: int) -> NDArray[Any]:
    """A region as blocks. Only a description: it may outlive the memory."""
    return np.asarray(_Raw(address, length - block + 1, f"|V{block}"))


def arranged(
    target: Side, source: Side, total: int, *, keep_gil: bool = True
) -> Callable[[], None] | None:
    """A call that copies row i of `source` to row i of `target`; None where a system call does as well.

    Addresses that are not mapped end the process, as with memmove.
    """
    lengths = source.iovecs[:, 1]
    n = len(lengths)
    least, most = (LEAST, MOST_BYTES) if keep_gil else (LEAST_RELEASED, MOST_BYTES_RELEASED)
    if n < least or total > most or max(target.region.length, source.region.length) > _SPAN:
        return None
    block = int(np.maximum.reduce(lengths))
    if total != n * block:  # the others are not as long as the longest
        return None
    _, to, to_size = target.region
    _, from_, from_size = source.region
    there, here = target.indexes, source.indexes
    if block >= LARGE_BLOCK:
        places = list(zip(there.tolist(), here.tolist(), strict=True))
        return partial(_copy_each, memory(to, to_size), memory(from_, from_size), places, block)
    portion = _PORTION_BYTES // block if keep_gil else -(-n // (n // LEAST_RELEASED))
    return partial(
        _gather, _blocks(to, to_size, block), there, _blocks(from_, from_size, block), here, portion
    )


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
