"""Many pieces of memory moved over a socket: iovec arrays, 1,024 pieces a call, short counts carried over."""

from __future__ import annotations

import ctypes
from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from tent_tcp.syscalls import MAX_PIECES, MessageHeader, SocketCalls, last_error, would_block

Pieces = NDArray[np.uint64]
"""Shape (n, 2), C-contiguous: address, length. Such an array is an array of struct iovec."""

IOVEC_SIZE = 16
"""Bytes of a struct iovec."""

WOULD_BLOCK = -1
"""What a call answers that moved nothing because it would have had to wait."""


class EndOfStream(ConnectionError):
    """The other side has closed the stream."""


def address_of(array: NDArray[np.generic]) -> int:
    """The address of an array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address


class Vector:
    """Pieces of memory on their way into or out of a stream. `left` is what has not moved yet, in bytes.

    `start` is the address of `count` iovecs, which are never changed: the first short count makes a copy. No
    length may be zero, and their sum must be `total`, below 2^63. `owner` is kept alive for whoever else
    would free them; the memory that they name is the caller's care. Used by one thread at a time.

    Progress is kept without numpy, whose calls release the GIL: beside a thread that computes, any of them
    may cost a switch interval.
    """

    __slots__ = (
        "_count",
        "_done",
        "_ends",
        "_first",
        "_header",
        "_header_address",
        "_one",
        "_owner",
        "_start",
        "_words",
        "left",
    )

    def __init__(self, start: int, count: int, total: int, owner: object) -> None:
        self.left = total
        self._start = start
        self._count = count
        self._owner = owner
        self._first = 0
        self._done = 0
        self._words: memoryview[int] | None = (
            None  # pieces of our own: address, length, address, ...
        )
        self._ends: memoryview[int] | None = None  # where each ends, from the start of the first
        self._one: ctypes.Array[ctypes.c_uint64] | None = None
        self._header = MessageHeader()
        self._header_address = ctypes.addressof(self._header)

    def send(
        self, descriptor: int, flags: int, calls: SocketCalls, bound: int | None = None
    ) -> int:
        """One sendmsg(2) of at most `bound` bytes; how many it took, or WOULD_BLOCK. Raises OSError."""
        self._prepare(bound)
        return self._account(calls.send_message(descriptor, self._header_address, flags))

    def receive(
        self, descriptor: int, flags: int, calls: SocketCalls, bound: int | None = None
    ) -> int:
        """One recvmsg(2); how many bytes it gave, or WOULD_BLOCK. Raises EndOfStream and OSError."""
        self._prepare(bound)
        moved = self._account(calls.receive_message(descriptor, self._header_address, flags))
        if moved == 0:
            raise EndOfStream
        return moved

    def window(self, bound: int) -> tuple[int, int, int]:
        """The next pieces, up to `bound` bytes: address of their iovec array, their number, their bytes.

        Nothing moves on. It is valid until the next call of any method.
        """
        _, ends = self._own()
        self._prepare(bound)
        count: int = self._header.count
        if self._one is not None and self._header.pieces == ctypes.addressof(self._one):
            return self._header.pieces, count, bound
        return self._header.pieces, count, ends[self._first + count - 1] - self._done

    def advance(self, moved: int) -> None:
        """The first `moved` bytes of what was left have moved."""
        self.left -= moved
        self._done += moved
        if self.left == 0:
            self._first = self._count
            return
        words, ends = self._own()
        self._first = first = bisect_right(ends, self._done, self._first)
        rest = ends[first] - self._done
        words[2 * first] += words[2 * first + 1] - rest
        words[2 * first + 1] = rest

    def _prepare(self, bound: int | None) -> None:
        """Point the header at the next pieces."""
        header, first = self._header, self._first
        if bound is None or self.left <= bound:
            fit = self._count - first
        else:
            words, ends = self._own()
            fit = bisect_right(ends, self._done + bound, first) - first
            if fit == 0:  # the next piece alone is larger
                if self._one is None:
                    self._one = (ctypes.c_uint64 * 2)()
                self._one[0], self._one[1] = words[2 * first], bound
                header.pieces, header.count = ctypes.addressof(self._one), 1
                return
        header.pieces, header.count = self._start + IOVEC_SIZE * first, min(fit, MAX_PIECES)

    def _account(self, moved: int) -> int:
        if moved > 0:
            self.advance(moved)
        elif moved < 0:
            if would_block():
                return WOULD_BLOCK
            raise last_error()
        return moved

    def _own(self) -> tuple[memoryview[int], memoryview[int]]:
        """Pieces of our own, as words, and where each ends."""
        if self._words is None or self._ends is None:
            given = (ctypes.c_uint64 * (2 * self._count)).from_address(self._start)
            words = np.frombuffer(memoryview(given), np.uint64).copy()
            self._words = words.data
            self._start = address_of(words)
            self._ends = np.cumsum(words[1::2], dtype=np.int64).data
        return self._words, self._ends


class Piece:
    """A vector of one piece, without numpy: see Vector."""

    __slots__ = ("_address", "_iovec", "left")

    def __init__(self, address: int, length: int) -> None:
        self.left = length
        self._address = address
        self._iovec: ctypes.Array[ctypes.c_uint64] | None = None

    def send(
        self, descriptor: int, flags: int, calls: SocketCalls, bound: int | None = None
    ) -> int:
        """One send(2); see Vector.send."""
        size = self.left if bound is None or self.left < bound else bound
        return self._account(calls.send(descriptor, self._address, size, flags))

    def receive(
        self, descriptor: int, flags: int, calls: SocketCalls, bound: int | None = None
    ) -> int:
        """One recv(2); see Vector.receive."""
        size = self.left if bound is None or self.left < bound else bound
        moved = self._account(calls.receive(descriptor, self._address, size, flags))
        if moved == 0:
            raise EndOfStream
        return moved

    def window(self, bound: int) -> tuple[int, int, int]:
        """See Vector.window."""
        if self._iovec is None:
            self._iovec = (ctypes.c_uint64 * 2)()
        size = min(self.left, bound)
        self._iovec[0], self._iovec[1] = self._address, size
        return ctypes.addressof(self._iovec), 1, size

    def advance(self, moved: int) -> None:
        """See Vector.advance."""
        self.left -= moved
        self._address += moved

    def _account(self, moved: int) -> int:
        if moved < 0:
            if would_block():
                return WOULD_BLOCK
            raise last_error()
        self.left -= moved
        self._address += moved
        return moved
