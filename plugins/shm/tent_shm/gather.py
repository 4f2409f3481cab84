"""Many blocks of one size between mappings of this process, without a system call that pins their pages.

To numpy, the whole address space is an array of blocks that start one byte after another, so that an address
is an index; blocks are gathered by such indexes into a portion that fits the second-level cache, and from
there scattered. For large blocks the second copy costs more than an assignment of a memoryview for each.
Microseconds, beside one call of process_vm_writev(2) on this process's own memory: 1,000 x 4 KiB 131 (436),
100 x 4 KiB 12 (46), 1,000 x 16 KiB 1,156 (2,472), 500 x 64 KiB 1,978 (4,756; by numpy 2,448).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tent_core.work import Iovecs

LEAST = 16
"""With fewer blocks a system call is as fast."""

MOST_BYTES = 32 << 20
"""About 3 ms. The GIL is kept for a portion at a time, so others get it when they ask for it."""

LARGE_BLOCK = 32 << 10

_PORTION_BYTES = 256 << 10

_FIRST = 1
"""The address of index 0 of all memory: numpy takes address 0 for none."""

_END = 1 << 48
"""No kernel maps memory beyond, unless it is asked to (47 bits on x86-64 and riscv64, 48 on arm64, says
`Documentation/arch` of Linux); numpy would raise IndexError, before it copies anything. It multiplies the
number of places by the size of a block, below LARGE_BLOCK, which must stay below 2^63."""


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


_first = np.uint64(_FIRST)
_memory = np.asarray(_Raw(_FIRST, _END - _FIRST, "|u1")).data
"""All of the address space; only what is mapped may be touched."""


@lru_cache(maxsize=64)
def _blocks(size: int) -> NDArray[Any]:
    """The same, as blocks of that size at every address."""
    return np.asarray(_Raw(_FIRST, _END - _FIRST - size, f"|V{size}"))


def arranged(target: Iovecs, source: Iovecs, total: int) -> Callable[[], None] | None:
    """A call that copies row i of `source` to row i of `target`; None where a system call does as well.

    Addresses that are not mapped end the process, as with memmove.
    """
    n = len(source)
    if n < LEAST or total > MOST_BYTES:
        return None
    block = int(np.maximum.reduce(source[:, 1]))
    if total != n * block:  # the others are not as long as the longest
        return None
    here = np.subtract(source[:, 0], _first).view(np.intp)
    if block >= LARGE_BLOCK:
        there = np.subtract(target[:, 0], _first)
        return partial(_copy_each, list(zip(there.tolist(), here.tolist(), strict=True)), block)
    # The target has bounds: numpy copies what it is about to assign once more where that may lie within.
    addresses = target[:, 0]
    lowest = np.minimum.reduce(addresses)
    span = int(np.maximum.reduce(addresses) - lowest) + 1
    places = np.asarray(_Raw(int(lowest), span, f"|V{block}"))
    there = np.subtract(addresses, lowest).view(np.intp)
    return partial(_gather, places, there, _blocks(block), here, _PORTION_BYTES // block)


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


def _copy_each(places: list[tuple[int, int]], block: int) -> None:
    for there, here in places:
        _memory[there : there + block] = _memory[here : here + block]
