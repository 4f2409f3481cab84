"""What peers may touch: buffers by id, and the check of every block of a request against them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tent_tcp.protocol import READ, Rows, Verdict
from tent_tcp.syscalls import map_shared, unmap
from tent_tcp.vectors import Piece, Vector

_READABLE, _WRITABLE, _MAPPED, _GONE = 1, 2, 4, 8

_ACCESS = {0: 0, 1: _READABLE, 2: _READABLE | _WRITABLE}
"""By `types.Permission`: LOCAL_READ_WRITE, GLOBAL_READ_ONLY, GLOBAL_READ_WRITE."""

_ROOM = 64
_TOP = 1 << 64


class Admission(NamedTuple):
    """Memory to move the payload of a request to or from, or why not and which block is the first refused.

    `mapped` says that `vector` has addresses of this process, else they are the owner's.
    """

    verdict: Verdict
    position: int
    vector: Vector | Piece | None
    mapped: bool


class Registry:
    """Columns by buffer id, so that a thousand blocks are checked in a few array operations.

    A buffer that was removed leaves its generation behind, so that who still asks for it is told that it
    was revoked, until the id is used again.
    """

    def __init__(self) -> None:
        self._size = 0
        self._generations = np.zeros(0, np.uint64)
        self._starts = np.zeros(0, np.uint64)
        self._ends = np.zeros(0, np.uint64)
        self._shifts = np.zeros(0, np.uint64)
        self._access = np.zeros(0, np.uint8)

    def add(
        self,
        buffer: int,
        generation: int,
        address: int,
        length: int,
        permission: int,
        descriptor: int,
    ) -> None:
        """Offer a buffer; `descriptor` is that of the memfd behind it, or -1. Raises OSError."""
        access, shift = _ACCESS[permission], 0
        if descriptor >= 0 and access:
            here = map_shared(descriptor, length, writable=bool(access & _WRITABLE))
            access, shift = access | _MAPPED, (here - address) % _TOP
        while buffer >= self._size:
            self._grow()
        self._generations[buffer] = generation
        self._starts[buffer] = address
        self._ends[buffer] = address + length
        self._shifts[buffer] = shift
        self._access[buffer] = access

    def remove(self, buffer: int, generation: int) -> None:
        """Withdraw and unmap a buffer to or from which nothing moves any more. Unknown ones are ignored."""
        if buffer >= self._size or int(self._generations[buffer]) != generation:
            return
        access = int(self._access[buffer])
        self._access[buffer] = _GONE
        if access & _MAPPED:
            start, end = int(self._starts[buffer]), int(self._ends[buffer])
            unmap((start + int(self._shifts[buffer])) % _TOP, end - start)

    def admit_one(self, opcode: int, row: tuple[int, int, int, int]) -> Admission:
        """Check a request of one block, whose length is not zero."""
        buffer, generation, address, length = row
        if buffer >= self._size:
            return _refused(Verdict.UNKNOWN_BUFFER)
        access = int(self._access[buffer])
        start, end = int(self._starts[buffer]), int(self._ends[buffer])
        if int(self._generations[buffer]) != generation:
            return _refused(Verdict.STALE_BUFFER if end else Verdict.UNKNOWN_BUFFER)
        if access & _GONE:
            return _refused(Verdict.REVOKED)
        if not access & (_READABLE if opcode == READ else _WRITABLE):
            return _refused(Verdict.DENIED)
        if not start <= address <= end or length > end - address:
            return _refused(Verdict.OUT_OF_RANGE)
        shift = int(self._shifts[buffer])
        return Admission(
            Verdict.OK, 0, Piece((address + shift) % _TOP, length), bool(access & _MAPPED)
        )

    def admit(self, opcode: int, rows: Rows, total: int) -> Admission:
        """Check a request of many blocks: no length is zero and they are `total` together."""
        ids, generations, addresses, lengths = rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3]
        known = ids < self._size
        if not known.all():
            return _refused(Verdict.UNKNOWN_BUFFER, int(known.argmin()))
        if (ids == ids[0]).all():
            pick = slice(int(ids[0]), int(ids[0]) + 1)  # one value for all rows
            access, starts, ends = self._access[pick], self._starts[pick], self._ends[pick]
            current, shifts = self._generations[pick], self._shifts[pick]
        else:
            index = ids.astype(np.intp)
            access, starts, ends = self._access[index], self._starts[index], self._ends[index]
            current, shifts = self._generations[index], self._shifts[index]
        right = _READABLE if opcode == READ else _WRITABLE
        fits = (addresses >= starts) & (addresses <= ends) & (lengths <= ends - addresses)
        good = (generations == current) & (access & right != 0) & fits
        if not good.all():
            first = int(good.argmin())
            block = rows[first].tolist()
            return self.admit_one(opcode, (block[0], block[1], block[2], block[3]))._replace(
                position=first
            )
        mapped = bool((access & _MAPPED).all())
        pieces = np.empty((len(rows), 2), np.uint64)
        pieces[:, 0] = addresses + shifts if mapped else addresses
        pieces[:, 1] = lengths
        return Admission(Verdict.OK, 0, Vector(pieces, total), mapped)

    def _grow(self) -> None:
        self._size = max(_ROOM, 2 * self._size)
        for name in ("_generations", "_starts", "_ends", "_shifts", "_access"):
            old = getattr(self, name)
            new = np.zeros(self._size, old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)


def _refused(verdict: Verdict, position: int = 0) -> Admission:
    return Admission(verdict, position, None, False)
