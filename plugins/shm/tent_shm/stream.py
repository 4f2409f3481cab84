"""Requests seen as one run of bytes, and the ways to cut and move it.

The bytes of n requests, one after the other, are the stream [0, total). What one call moves, what one thread
takes, what a short count leaves over and what could not be moved are ranges of it, so that none of this has
to know where requests begin and end; numpy turns a range into iovecs.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tent_core.types import Opcode
from tent_core.work import Iovecs
from tent_shm import large, syscalls

Ends = NDArray[np.uint64]
"""Shape (n,): where each request ends in the stream; the running sum of the lengths."""

STEP_BYTES = 256 << 20
"""Bytes of one uninterrupted step, about 0.1 s: so often a transfer looks whether it should give up."""


class Gap(NamedTuple):
    """The bytes [start, stop) of a stream, which did not move, and why."""

    start: int
    stop: int
    cause: Exception


class Whole(NamedTuple):
    """A call that moves all of a stream, and what it answers if it did: bytes moved, memmove None."""

    call: Callable[[], int | None]
    answer: int | None


@dataclass(eq=False)
class Stream:
    """Requests that move in the same way. `local` and `remote` are not changed; `rows` are their indexes.

    `pid` is the process (or thread) whose memory `remote` is in: this one's own where it is mapped here.
    `steady` says that both sides are mapped here and can be touched without a fault, `direct` that memmove
    shall move each block.
    """

    opcode: Opcode
    local: Iovecs
    remote: Iovecs
    total: int
    rows: NDArray[np.intp] | None
    pid: int
    direct: bool
    steady: bool = False

    @cached_property
    def ends(self) -> Ends:
        """Where each request ends in the stream."""
        return np.cumsum(self.local[:, 1], dtype=np.uint64)

    def whole(self, *, keep_gil: bool) -> Whole | None:
        """The one call that moves everything, or None if one cannot."""
        local, remote, n = self.local, self.remote, len(self.local)
        if n > (1 if self.direct else syscalls.MAX_PIECES) or self.total > STEP_BYTES:
            return None
        if self.direct:
            move = syscalls.memmove(keep_gil=keep_gil)
            return Whole(partial(move, *self.copied(0), self.total), None)
        call = syscalls.vector_call(self.opcode, keep_gil=keep_gil)
        # The arrays stay alive with `self`, which whoever calls this keeps.
        vectors = (local.ctypes.data, n, remote.ctypes.data, n)
        return Whole(partial(call, self.pid, *vectors, 0), self.total)

    def step(self, start: int, stop: int) -> int:
        """Move the first bytes of [start, stop), as many as one call can; how many. The GIL is released.

        Raises OSError: EFAULT when the byte at `start` is not there, on one side or the other.
        """
        if self.direct:
            return self._move_block(start, stop)
        first, last, stop = window(self.ends, start, stop)
        local = part(self.local, self.ends, first, last, start, stop)
        remote = part(self.remote, self.ends, first, last, start, stop)
        n = last - first
        call = syscalls.vector_call(self.opcode, keep_gil=False)
        moved = call(self.pid, local.ctypes.data, n, remote.ctypes.data, n, 0)
        if moved <= 0:
            raise syscalls.last_error()
        return moved

    def _move_block(self, start: int, stop: int) -> int:
        row = row_at(self.ends, start)
        end = int(self.ends[row])
        size = min(stop, end, start + STEP_BYTES) - start
        skip = start - (end - int(self.local[row, 1]))
        target, source = self.copied(row)
        copy = large.copy if size > large.ROW_BYTES else syscalls.memmove(keep_gil=False)
        copy(target + skip, source + skip, size)
        return size

    def copied(self, row: int) -> tuple[int, int]:
        """To which address a request copies, and from which."""
        here, there = int(self.local[row, 0]), int(self.remote[row, 0])
        return (there, here) if self.opcode is Opcode.WRITE else (here, there)

    def where(self, position: int) -> str:
        """The addresses of both sides at a position, for messages."""
        row = row_at(self.ends, position)
        skip = position - (int(self.ends[row]) - int(self.local[row, 1]))
        here, there = int(self.local[row, 0]) + skip, int(self.remote[row, 0]) + skip
        whose = "mapped here" if self.pid == os.getpid() else f"of process {self.pid}"
        return f"local address {here:#x}, remote address {there:#x} ({whose})"


def row_at(ends: Ends, position: int) -> int:
    """The request to which the byte at `position` belongs."""
    return int(ends.searchsorted(np.uint64(position), "right"))


def window(
    ends: Ends, start: int, stop: int, pieces: int = syscalls.MAX_PIECES, size: int = STEP_BYTES
) -> tuple[int, int, int]:
    """What one call may take of [start, stop): requests [first, last), at most `pieces`, and a new stop.

    `0 <= start < stop <= ends[-1]`; the new stop is above `start`, and at most `size` bytes above it.
    """
    stop = min(stop, start + size)
    first = row_at(ends, start)
    last = int(ends.searchsorted(np.uint64(stop), "left")) + 1
    last = min(last, first + pieces)
    return first, last, min(stop, int(ends[last - 1]))


def part(iovecs: Iovecs, ends: Ends, first: int, last: int, start: int, stop: int) -> Iovecs:
    """The iovecs of the bytes [start, stop), which lie in the requests [first, last) and in each of them."""
    cut = iovecs[first:last].copy()
    skip = np.uint64(start) - (ends[first] - iovecs[first, 1])
    cut[0, 0] += skip
    cut[0, 1] -= skip
    cut[-1, 1] -= ends[last - 1] - np.uint64(stop)
    return cut


def shares(ends: Ends, count: int, align: int = 1 << 16) -> list[tuple[int, int]]:
    """Cut a stream into about equal ranges, at most `count`, for as many threads.

    Cuts are at the ends of requests where one is near, else at multiples of `align` within a request.
    """
    total = int(ends[-1])
    cuts = [0]
    for i in range(1, count):
        ideal = total * i // count
        row = row_at(ends, ideal)
        begin = int(ends[row - 1]) if row else 0
        cut = begin + (ideal - begin) // align * align
        if cut > cuts[-1]:
            cuts.append(cut)
    return [(a, b) for a, b in zip(cuts, [*cuts[1:], total], strict=True) if a < b]


class Outcome(NamedTuple):
    """What became of n requests: uint64 (n,) `moved`, int32 (n,) `failed`, an index into `causes` or -1."""

    moved: NDArray[np.uint64]
    failed: NDArray[np.int32]
    causes: list[Exception]


def settle(ends: Ends, gaps: list[Gap]) -> Outcome:
    """The outcome of the requests of a stream with these gaps, which do not overlap."""
    starts = np.concatenate((np.zeros(1, np.uint64), ends[:-1]))
    moved = ends - starts
    failed = np.full(len(ends), -1, np.int32)
    causes: list[Exception] = []
    for gap in gaps:
        first, last, _ = window(
            ends, gap.start, gap.stop, pieces=len(ends), size=gap.stop - gap.start
        )
        lost = np.minimum(ends[first:last], np.uint64(gap.stop)) - np.maximum(
            starts[first:last], np.uint64(gap.start)
        )
        moved[first:last] -= lost
        rows = failed[first:last]
        rows[rows < 0] = len(causes)
        causes.append(gap.cause)
    return Outcome(moved, failed, causes)


def runs(values: NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """(start, stop, value) of each run of equal values."""
    edges = np.flatnonzero(np.diff(values)) + 1
    bounds = [0, *edges.tolist(), len(values)]
    return [(a, b, int(values[a])) for a, b in itertools.pairwise(bounds) if a < b]


def runs_of(rows: NDArray[np.intp] | None, n: int) -> list[tuple[int, int]]:
    """(start, stop) of each run of neighbours among ascending `rows` (None: all n)."""
    if rows is None:
        return [(0, n)]
    edges = np.flatnonzero(np.diff(rows) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(rows, edges)]
