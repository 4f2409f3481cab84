"""How the bytes of one message get from a stream into memory, or the other way."""

from __future__ import annotations

import errno
import mmap
from typing import Protocol

import numpy as np

from tent_tcp.receiver.owner import Fault, Owner
from tent_tcp.syscalls import HOLDING, MORE, NOW, last_error, would_block
from tent_tcp.vectors import WOULD_BLOCK, EndOfStream, Piece, Vector, address_of

CHUNK = 256 << 10
"""Bytes that go through the scratch memory at once: they stay in a core's second-level cache."""


class Payload(Protocol):
    """The bytes of one message; `left` of them have not moved. A call moves what the stream allows."""

    @property
    def left(self) -> int: ...

    def take(self, descriptor: int) -> int:
        """From the stream: bytes, or WOULD_BLOCK. Raises Fault, OwnerGone, EndOfStream, OSError."""
        ...

    def give(self, descriptor: int, flags: int) -> int:
        """To the stream: bytes, or WOULD_BLOCK. Raises Fault, OwnerGone, OSError."""
        ...


class Scratch:
    """Memory that is filled and emptied within one call, and zeros; one of each for the whole process."""

    def __init__(self) -> None:
        self._memory = np.zeros(CHUNK + mmap.PAGESIZE, np.uint8)
        self._zeros = np.zeros(CHUNK, np.uint8)  # pages that nobody writes to take no memory
        self.address = address_of(self._memory)
        self.zeros = address_of(self._zeros)

    def fill(self, descriptor: int, size: int) -> int:
        """Receive up to `size` bytes; how many, or WOULD_BLOCK. Raises EndOfStream and OSError."""
        moved = HOLDING.receive(descriptor, self.address, min(size, CHUNK), NOW)
        if moved == 0:
            raise EndOfStream
        return _checked(moved)


class Mapped:
    """Memory that is mapped here: the kernel copies between it and the stream, nothing else touches it."""

    __slots__ = ("_vector",)

    def __init__(self, vector: Vector | Piece) -> None:
        self._vector = vector

    @property
    def left(self) -> int:
        return self._vector.left

    def take(self, descriptor: int) -> int:
        try:
            return self._vector.receive(descriptor, NOW, HOLDING)
        except OSError as error:
            raise _as_fault(error) from None

    def give(self, descriptor: int, flags: int) -> int:
        try:
            return self._vector.send(descriptor, NOW | flags, HOLDING)
        except OSError as error:
            raise _as_fault(error) from None


class Owned:
    """Memory of the owner that is not mapped here: through the scratch memory and process_vm_*.

    Nothing stays in the scratch memory between calls, so a stream that stalls holds none of it: what a full
    stream did not take is read again when it has room.
    """

    __slots__ = ("_owner", "_scratch", "_vector", "left")

    def __init__(self, vector: Vector | Piece, owner: Owner, scratch: Scratch) -> None:
        self.left = vector.left
        self._vector = vector
        self._owner = owner
        self._scratch = scratch

    def take(self, descriptor: int) -> int:
        moved = self._scratch.fill(descriptor, self.left)
        if moved == WOULD_BLOCK:
            return WOULD_BLOCK
        self.left -= moved
        source, rest = self._scratch.address, moved
        while rest:
            pieces, count, size = self._vector.window(rest)
            self._owner.write(source, size, pieces, count)
            self._vector.advance(size)
            source += size
            rest -= size
        return moved

    def give(self, descriptor: int, flags: int) -> int:
        pieces, count, size = self._vector.window(CHUNK)
        self._owner.read(self._scratch.address, size, pieces, count)
        if size < self.left:
            flags |= MORE
        moved = _checked(HOLDING.send(descriptor, self._scratch.address, size, NOW | flags))
        if moved > 0:
            self._vector.advance(moved)
            self.left -= moved
        return moved


class Bin:
    """No memory: what comes is dropped, what goes is zeros. It keeps a stream in step after a refusal."""

    __slots__ = ("_scratch", "left")

    def __init__(self, left: int, scratch: Scratch) -> None:
        self.left = left
        self._scratch = scratch

    def take(self, descriptor: int) -> int:
        moved = self._scratch.fill(descriptor, self.left)
        if moved > 0:
            self.left -= moved
        return moved

    def give(self, descriptor: int, flags: int) -> int:
        size = min(self.left, CHUNK)
        moved = _checked(HOLDING.send(descriptor, self._scratch.zeros, size, NOW | flags))
        if moved > 0:
            self.left -= moved
        return moved


def _checked(moved: int) -> int:
    if moved >= 0:
        return moved
    if would_block():
        return WOULD_BLOCK
    raise last_error()


def _as_fault(error: OSError) -> Exception:
    """A page that cannot be had (a memory limit) is a Fault: the stream is still good."""
    if error.errno in (errno.EFAULT, errno.ENOMEM):
        return Fault(f"the mapped memory: {error.strerror}")
    return error
