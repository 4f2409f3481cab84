"""From what an application passes (buffers, offsets, lengths) to checked request columns, vectorised."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tent_core.errors import PermissionDenied, RangeError, UsageError
from tent_core.types import Opcode
from tent_core.work import Iovecs, Requests

LARGEST_TOTAL = 1 << 63
"""Bytes of one batch are fewer than this, so that sums of lengths fit into signed columns as well."""

Column = NDArray[np.uint64]
Ids: TypeAlias = NDArray[np.int32]


class Range(Protocol):
    """What a local and a remote buffer have in common."""

    @property
    def id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def address(self) -> int: ...
    @property
    def length(self) -> int: ...


def column(values: ArrayLike, what: str) -> Column:
    """`values` as uint64, shape (n,) or () for a scalar. Raises UsageError for anything that is not exact.

    Floats, negative numbers and numbers from 2^64 are refused instead of being rounded or wrapped.
    """
    array = np.asarray(values)
    if array.dtype == np.uint64:
        pass
    elif array.size == 0:
        array = array.astype(np.uint64)
    elif array.dtype.kind not in "iu":
        raise UsageError(f"{what} must be integers below 2^64, found dtype {array.dtype}")
    elif array.dtype.kind == "i" and int(array.min()) < 0:
        raise RangeError(f"{what} must not be negative, found {int(array.min())}")
    else:
        array = array.astype(np.uint64)
    if array.ndim > 1:
        raise UsageError(f"{what} must have one dimension, found shape {array.shape}")
    return array


class Lengths(NamedTuple):
    """The length of each request, and as exact integers the longest of them (0 of none) and their sum."""

    column: Column
    longest: int
    total: int


class Side(NamedTuple):
    """One side of a batch: iovecs and buffer ids of the requests, the buffers that it uses, and their ids."""

    iovecs: Iovecs
    ids: Ids
    used: tuple[Any, ...]
    used_ids: tuple[int, ...]


def side(
    buffers: Range | Sequence[Range],
    offsets: ArrayLike,
    lengths: Lengths,
    index: ArrayLike | None,
    what: str,
) -> Side:
    """Absolute addresses of `offsets` (bytes, relative to each buffer), checked as `length <= end - address`.

    With a sequence of buffers, `index` says for each request which of them it means. Raises RangeError
    naming the first request that does not lie inside its buffer; nothing has been moved then.
    """
    sizes = lengths.column
    n = len(sizes)
    rel = column(offsets, f"{what} offsets")
    if rel.ndim == 0 or len(rel) != n:
        raise UsageError(f"{what} offsets have shape {rel.shape}, but there are {n} requests")
    if isinstance(buffers, Sequence):
        return _side_of_many(buffers, rel, sizes, index, what)
    if index is not None:
        raise UsageError(f"{what}_index needs a sequence of buffers, found one buffer")
    # Mostly all lengths are one, and the farthest offset with the longest says it, in Python's integers.
    if n and int(np.maximum.reduce(rel)) + lengths.longest > buffers.length:
        end = np.uint64(buffers.length)
        inside = (rel <= end) & (sizes <= end - np.minimum(rel, end))
        if not inside.all():
            _outside(int(np.argmin(inside)), rel, sizes, buffers, what)
    number = buffers.id
    pairs = np.empty((n, 2), np.uint64)
    np.add(rel, np.uint64(buffers.address), pairs[:, 0])
    pairs[:, 1] = sizes
    return Side(pairs, _all_alike(number, n), (buffers,), (number,))


def _all_alike(value: int, n: int) -> Ids:
    """A column of one value, by a zero stride: `np.broadcast_to`, in a fourth of its time."""
    return np.ndarray((n,), np.int32, value.to_bytes(4, sys.byteorder), 0, (0,))


def _side_of_many(
    buffers: Sequence[Range], rel: Column, lengths: Column, index: ArrayLike | None, what: str
) -> Side:
    n = len(lengths)
    if index is None:
        raise UsageError(
            f"a sequence of {what} buffers needs {what}_index: which of them each request means"
        )
    which = column(index, f"{what}_index")
    if which.ndim == 0 or len(which) != n:
        raise UsageError(f"{what}_index has shape {which.shape}, but there are {n} requests")
    if n and int(which.max()) >= len(buffers):
        raise UsageError(
            f"{what}_index goes up to {int(which.max())}, but there are {len(buffers)} buffers"
        )
    which = which.astype(np.intp)
    sizes = np.array([b.length for b in buffers], np.uint64)[which]
    inside = (rel <= sizes) & (lengths <= sizes - np.minimum(rel, sizes))
    if not inside.all():
        bad = int(np.argmin(inside))
        _outside(bad, rel, lengths, buffers[int(which[bad])], what)
    addresses = rel + np.array([b.address for b in buffers], np.uint64)[which]
    ids = np.array([b.id for b in buffers], np.int32)[which]
    used = np.flatnonzero(np.bincount(which, minlength=len(buffers))).tolist()
    found = tuple(buffers[i] for i in used)
    return Side(iovecs(addresses, lengths), ids, found, tuple(buffer.id for buffer in found))


def _outside(row: int, rel: Column, lengths: Column, buffer: Range, what: str) -> None:
    raise RangeError(
        f"request {row}: {int(lengths[row])} bytes at offset {int(rel[row])} do not lie inside the {what} "
        f"buffer {buffer.name!r}, which has {buffer.length} bytes"
    )


def lengths_of(lengths: ArrayLike, n: int) -> Lengths:
    """The lengths of n requests; a scalar stands for all. Raises RangeError for a zero length."""
    given: Any = lengths
    if type(given) is int and 0 <= given < 1 << 64:  # the usual: numpy takes 1.5 us to read it
        return _all_of_one_length(given, n)
    sizes = column(lengths, "lengths")
    if sizes.ndim == 0:
        return _all_of_one_length(int(sizes), n)
    if len(sizes) != n:
        raise UsageError(f"there are {len(sizes)} lengths, but {n} requests")
    if n == 0:
        return Lengths(sizes, 0, 0)
    if not sizes.all():
        raise RangeError(f"request {int(np.argmin(sizes))} has length 0: leave it out")
    longest = int(sizes.max())
    exact = n * longest < LARGEST_TOTAL  # else the sum might wrap
    return Lengths(sizes, longest, int(sizes.sum()) if exact else sum(sizes.tolist()))


def _all_of_one_length(length: int, n: int) -> Lengths:
    if length == 0 and n:
        raise RangeError("request 0 has length 0: leave it out")
    sizes = np.empty(n, np.uint64)
    sizes.fill(length)
    return Lengths(sizes, length if n else 0, n * length)


def total_of(lengths: Lengths) -> int:
    """The sum of the lengths. Raises RangeError from LARGEST_TOTAL on, which only memory that nobody has
    reaches, so that sums of lengths may be made in columns."""
    if lengths.total >= LARGEST_TOTAL:
        raise RangeError(
            f"{len(lengths.column)} requests of {lengths.total} bytes together: "
            "less than 2^63 are allowed"
        )
    return lengths.total


def iovecs(addresses: Column, lengths: Column) -> Iovecs:
    """An `(n, 2)` array of address and length: an array of `struct iovec`."""
    pairs = np.empty((len(addresses), 2), np.uint64)
    pairs[:, 0] = addresses
    pairs[:, 1] = lengths
    return pairs


def opcodes(opcode: Opcode | str | ArrayLike, n: int) -> Opcode | NDArray[np.uint8]:
    """One direction for all requests, or a column of them."""
    if isinstance(opcode, Opcode):
        return opcode
    if isinstance(opcode, str):
        try:
            return Opcode[opcode.upper()]
        except KeyError:
            raise UsageError(f"opcode {opcode!r} is none: use read or write") from None
    array = column(opcode, "opcode")
    if array.size and int(array.max()) > Opcode.WRITE:
        raise UsageError(f"opcode {int(array.max())} is none: READ is 0, WRITE is 1")
    if array.ndim == 0:
        return Opcode(int(array))
    if len(array) != n:
        raise UsageError(f"there are {len(array)} opcodes, but {n} requests")
    if n and (array == array[0]).all():
        return Opcode(int(array[0]))
    return array.astype(np.uint8)


def check_local(opcode: Opcode, used: Sequence[Any]) -> None:
    """The owner may read all of its memory, and write all but what its exporter calls read-only."""
    if opcode is Opcode.READ:
        for buffer in used:
            if buffer.readonly:
                raise PermissionDenied(
                    f"cannot read into buffer {buffer.name!r}: the registered object is read-only; "
                    "register writable memory"
                )


def subset(requests: Requests, rows: NDArray[np.intp]) -> Requests:
    """The requests at `rows`, as requests of their own."""
    local_ids, remote_ids = requests.local_ids[rows], requests.remote_ids[rows]
    local = requests.local[rows]
    return Requests(
        requests.opcode,
        local,
        requests.remote[rows],
        local_ids,
        remote_ids,
        distinct(local_ids),
        distinct(remote_ids),
        requests.remote_generations,
        int(local[:, 1].sum()),
        requests.reused,
    )


def distinct(ids: Ids) -> tuple[int, ...]:
    """The distinct values of an id column; ids are dense and small, so counting beats sorting."""
    if len(ids) == 0:
        return ()
    if ids.strides[0] == 0:
        return (int(ids[0]),)
    return tuple(np.flatnonzero(np.bincount(ids)).tolist())
