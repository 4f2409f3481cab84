"""What peers may touch: buffers by id, and the check of every block of a request against them."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tent_tcp.protocol import READ, Columns, Verdict
from tent_tcp.syscalls import map_shared, unmap
from tent_tcp.vectors import Piece, Vector, address_of

_READABLE, _WRITABLE, _MAPPED, _GONE = 1, 2, 4, 8

_ACCESS = {0: 0, 1: _READABLE, 2: _READABLE | _WRITABLE}
"""By `types.Permission`: LOCAL_READ_WRITE, GLOBAL_READ_ONLY, GLOBAL_READ_WRITE."""

_ROOM = 64
_TOP = 1 << 64


Place = tuple[Verdict, int, memoryview | None]
"""Whether a block may be touched; if the verdict is OK, its address, at its owner or, if it is mapped, in
this process; and if it is mapped, its memory. A plain tuple, made in a tenth of a NamedTuple's time."""


def _no(verdict: Verdict) -> Place:
    return verdict, 0, None


_UNKNOWN, _STALE = _no(Verdict.UNKNOWN_BUFFER), _no(Verdict.STALE_BUFFER)
_REVOKED, _DENIED = _no(Verdict.REVOKED), _no(Verdict.DENIED)
_OUT_OF_RANGE = _no(Verdict.OUT_OF_RANGE)


class Admission(NamedTuple):
    """Memory to move the payload of a request to or from, or why not and which block is the first refused.

    `mapped` says that `vector` has addresses of this process, else they are the owner's.
    """

    verdict: Verdict
    position: int
    vector: Vector | Piece | None
    mapped: bool


class _Row(NamedTuple):
    """One buffer; `memory` is what is mapped of it here, all of it or nothing."""

    generation: int
    start: int
    end: int
    shift: int
    access: int
    memory: memoryview | None


_NEVER_USED = _Row(0, 0, 0, 0, 0, None)
_FINE = Verdict.OK


class Registry:
    """Columns by buffer id, so that a thousand blocks are checked in a few array operations, and the same as
    rows of numbers for a block alone.

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
        self._rows: list[_Row] = []

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
        access, shift, memory = _ACCESS[permission], 0, None
        if descriptor >= 0 and access:
            here = map_shared(descriptor, length, writable=bool(access & _WRITABLE))
            access, shift = access | _MAPPED, (here - address) % _TOP
            memory = memoryview((ctypes.c_ubyte * length).from_address(here)).cast("B")
        while buffer >= self._size:
            self._grow()
        self._generations[buffer] = generation
        self._starts[buffer] = address
        self._ends[buffer] = address + length
        self._shifts[buffer] = shift
        self._access[buffer] = access
        self._rows[buffer] = _Row(generation, address, address + length, shift, access, memory)

    def remove(self, buffer: int, generation: int) -> None:
        """Withdraw and unmap a buffer to or from which nothing moves any more. Unknown ones are ignored."""
        if buffer >= self._size or int(self._generations[buffer]) != generation:
            return
        access = int(self._access[buffer])
        self._access[buffer] = _GONE
        row = self._rows[buffer]
        self._rows[buffer] = row._replace(access=_GONE, memory=None)
        if access & _MAPPED:
            unmap((row.start + row.shift) % _TOP, row.end - row.start)

    def find(self, opcode: int, row: tuple[int, int, int, int]) -> Place:
        """Check a block alone, whose length is not zero."""
        buffer, generation, address, length = row
        if buffer >= self._size:
            return _UNKNOWN
        known, start, end, shift, access, memory = self._rows[buffer]
        if end == 0:
            return _UNKNOWN  # an id that was never used
        if known != generation:
            return _STALE
        if access & _GONE:
            return _REVOKED
        if not access & (_READABLE if opcode == READ else _WRITABLE):
            return _DENIED
        if not start <= address <= end or length > end - address:
            return _OUT_OF_RANGE
        if memory is None:
            return _FINE, address, None
        offset = address - start
        return _FINE, (address + shift) % _TOP, memory[offset : offset + length]

    def admit_one(self, opcode: int, row: tuple[int, int, int, int]) -> Admission:
        """Check a request of one block, whose length is not zero."""
        verdict, address, memory = self.find(opcode, row)
        if verdict is not Verdict.OK:
            return _refused(verdict)
        return Admission(verdict, 0, Piece(address, row[3]), memory is not None)

    def admit(self, opcode: int, columns: Columns, total: int) -> Admission:
        """Check a request of many blocks, whose lengths are not zero and `total` together."""
        ids, generations, addresses, lengths = columns
        first = int(ids[0])
        if first >= self._size:
            return _refused(Verdict.UNKNOWN_BUFFER)
        right = _READABLE if opcode == READ else _WRITABLE
        if (ids == ids[0]).all():
            start, end = int(self._starts[first]), int(self._ends[first])
            access, shift = int(self._access[first]), self._shifts[first]
            if (
                access & right
                and (generations == self._generations[first]).all()
                and int(addresses.min()) >= start
                and int(addresses.max()) <= end
                and int((addresses + lengths).max()) <= end  # cannot wrap: see `end` and MAX_TOTAL
            ):
                return _admitted(addresses, lengths, shift, bool(access & _MAPPED), total)
        known = ids < self._size
        index = np.where(known, ids, 0).astype(np.intp)
        starts, ends, access_by_row = self._starts[index], self._ends[index], self._access[index]
        good = known & (generations == self._generations[index]) & (access_by_row & right != 0)
        good &= (addresses >= starts) & (addresses <= ends) & (lengths <= ends - addresses)
        if not good.all():
            position = int(good.argmin())
            row = columns[:, position].tolist()
            refusal = self.admit_one(opcode, (row[0], row[1], row[2], row[3]))
            return refusal._replace(position=position)
        mapped = bool((access_by_row & _MAPPED).all())
        return _admitted(addresses, lengths, self._shifts[index], mapped, total)

    def _grow(self) -> None:
        self._size = max(_ROOM, 2 * self._size)
        self._rows += [_NEVER_USED] * (self._size - len(self._rows))
        for name in ("_generations", "_starts", "_ends", "_shifts", "_access"):
            old = getattr(self, name)
            new = np.zeros(self._size, old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)


def _admitted(
    addresses: NDArray[np.uint64],
    lengths: NDArray[np.uint64],
    shifts: NDArray[np.uint64] | np.uint64,
    mapped: bool,
    total: int,
) -> Admission:
    pieces = np.empty((len(addresses), 2), np.uint64)
    pieces[:, 0] = addresses + shifts if mapped else addresses
    pieces[:, 1] = lengths
    return Admission(Verdict.OK, 0, Vector(address_of(pieces), len(pieces), total, pieces), mapped)


def _refused(verdict: Verdict, position: int = 0) -> Admission:
    return Admission(verdict, position, None, False)
