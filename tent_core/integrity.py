"""Checksums of what a batch moved: summed here after the data, and compared by the receiver's engine.

CRC-32C, because processors compute it (about 10 GB/s on one core) and storage and networks know it.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tent_core.control.contract import RANGES_LIMIT, Checksum
from tent_core.errors import ClosedError, MemoryUnsupported, UsageError
from tent_core.serial import SerialQueue
from tent_core.types import MemoryKind, Opcode, memory_kind

if TYPE_CHECKING:
    from tent_core.checked import Checked
    from tent_core.memory import Buffer
    from tent_core.remote_buffer import RemoteBuffer
    from tent_core.work import Iovecs, Requests

Crc = Callable[[memoryview, int], int]
"""The checksum of bytes that follow others with a given checksum."""

Find = Callable[[int, int], "Buffer | None"]
"""The registered buffer of this id and generation."""

_LISTS_OF_A_BUFFER = 2  # what a batch wrote to it, and what it read from it


def crc32c() -> Crc:
    """The library's function. Raises UsageError when it is not installed."""
    try:
        from crc32c import crc32c as function
    except ImportError:
        raise UsageError(
            "integrity='crc32c' needs the package crc32c, which is not installed: "
            "pip install 'tent-core[integrity]'"
        ) from None
    return function


# -------------------------------------------------------------------- the sender's side


@dataclass(frozen=True, slots=True)
class _List:
    """Ranges of one remote buffer, neighbours joined, and where the same bytes are here, row by row."""

    buffer: int
    generation: int
    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    local_ids: NDArray[np.int32]
    local: Iovecs


@dataclass(frozen=True, slots=True)
class Sums:
    """What is to be summed once a batch has moved its data. Immutable."""

    _lists: tuple[_List, ...]
    _local: tuple[Buffer, ...]
    _crc: Crc

    def checksums(self) -> tuple[Checksum, ...]:
        """Sum what is in local memory now. Takes as long as reading it."""
        views = {b.id: (b.address, _view(b.address, b.length)) for b in self._local}
        return tuple(
            Checksum(one.buffer, one.generation, one.offsets, one.lengths, self._sum(one, views))
            for one in self._lists
        )

    def _sum(self, one: _List, views: dict[int, tuple[int, memoryview]]) -> int:
        value = 0
        for buffer, (address, length) in zip(
            one.local_ids.tolist(), one.local.tolist(), strict=True
        ):
            base, view = views[buffer]
            value = self._crc(view[address - base : address - base + length], value)
        return value


def sums_of(checked: Checked) -> Sums:
    """How to sum these requests.

    Raises UsageError when ranges overlap where they are written to, so that no order of bytes is right, when
    there are more than RANGES_LIMIT, or when the library is missing; MemoryUnsupported for what is no host
    memory.
    """
    crc = crc32c()
    buffers: tuple[Buffer | RemoteBuffer, ...] = (*checked.local, *checked.remote)
    for buffer in buffers:
        if memory_kind(buffer.location) is not MemoryKind.DRAM:
            raise MemoryUnsupported(
                f"integrity='crc32c' reads host memory, and buffer {buffer.name!r} is in {buffer.location}"
            )
    bases = {b.id: b.address for b in checked.remote}
    lists = [
        _list(requests, number, bases[number])
        for requests, _ in checked.parts
        for number in requests.remote_used
        if (requests.remote_ids == number).any()
    ]
    count = sum(len(one.offsets) for one in lists)
    if count > RANGES_LIMIT:
        raise UsageError(
            f"integrity='crc32c' covers up to {RANGES_LIMIT} ranges of the peer's memory, found {count}: "
            "submit the batch in parts"
        )
    return Sums(tuple(lists), checked.local, crc)


def _list(requests: Requests, buffer: int, base: int) -> _List:
    rows = np.flatnonzero(requests.remote_ids == buffer)
    local, remote = requests.local[rows], requests.remote[rows]
    written = remote if requests.opcode is Opcode.WRITE else local
    if _overlap(remote) or _overlap(written):
        raise UsageError(
            "integrity='crc32c' cannot say what overlapping ranges have to be; submit them in batches of "
            "their own"
        )
    first = np.flatnonzero(
        np.append(True, remote[1:, 0] != remote[:-1, 0] + remote[:-1, 1])
    )  # a joined range begins where one does not follow the one before
    return _List(
        buffer,
        requests.remote_generations[buffer],
        remote[first, 0] - np.uint64(base),
        np.add.reduceat(remote[:, 1], first),
        requests.local_ids[rows],
        local,
    )


def _overlap(ranges: Iovecs) -> bool:
    ordered = ranges[np.argsort(ranges[:, 0], kind="stable")]
    return bool((ordered[1:, 0] - ordered[:-1, 0] < ordered[:-1, 1]).any())


def _view(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * length).from_address(address)).cast("B")


# -------------------------------------------------------------------- the receiver's side


def compare(checksums: Sequence[Checksum], find: Find) -> str | None:
    """What is wrong with memory here, in words for people, or None: all of it is what it has to be."""
    try:
        crc = crc32c()
    except UsageError as error:
        return f"not verified: {error}"
    if any(n > _LISTS_OF_A_BUFFER for n in Counter(c.buffer for c in checksums).values()):
        return "not verified: one buffer is summed more often than a batch can do"
    wrong = [text for checksum in checksums if (text := _compare(checksum, find, crc))]
    return "; ".join(wrong) or None


def _compare(checksum: Checksum, find: Find, crc: Crc) -> str | None:
    buffer = find(checksum.buffer, checksum.generation)
    if buffer is None or not buffer.inflight.begin():
        return f"not verified: buffer {checksum.buffer} has been unregistered here"
    try:
        offsets, lengths = checksum.offsets, checksum.lengths
        size = np.uint64(buffer.length)
        if (offsets > size).any() or (lengths > size - offsets).any() or _sum(lengths) > size:
            return f"not verified: ranges that buffer {buffer.name!r} does not have"
        if memory_kind(buffer.location) is not MemoryKind.DRAM:
            return (
                f"not verified: buffer {buffer.name!r} is in {buffer.location}, not in host memory"
            )
        view, value = _view(buffer.address, buffer.length), 0
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
            value = crc(view[offset : offset + length], value)
        if value == checksum.value:
            return None
        return (
            f"checksum mismatch in buffer {buffer.name!r}: {_sum(lengths)} bytes in {len(offsets)} ranges "
            f"from offset {int(offsets[0])} on have CRC-32C {value:#010x}, the sender's have "
            f"{checksum.value:#010x}"
        )
    finally:
        buffer.inflight.end()


def _sum(lengths: NDArray[np.uint64]) -> int:
    return sum(lengths.tolist())  # 16,384 lengths can be beyond 2^64


class Integrity:
    """Sums and compares, in a thread that starts with the first use. Thread-safe; nothing here waits."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._queue = SerialQueue("tent-integrity")
        self.verified = 0
        """Batches whose data was compared here and is right."""
        self.wrong = 0
        """Those whose data is not, or could not be compared."""

    def sum(self, sums: Sums) -> Future[tuple[Checksum, ...]]:
        """The checksums. Raises ClosedError."""
        return self._queue.submit(sums.checksums)

    def verify(self, checksums: Sequence[Checksum]) -> Future[str | None]:
        """As `compare`, and counted."""
        try:
            return self._queue.submit(partial(self._compare, checksums))
        except ClosedError:
            refused: Future[Any] = Future()
            refused.set_result("not verified: the engine is closing")
            return refused

    def _compare(self, checksums: Sequence[Checksum]) -> str | None:
        try:
            wrong = compare(checksums, self._find)
        except Exception as error:  # a notification is handed over in any case
            wrong = f"not verified: {error!r}"
        if wrong is None:
            self.verified += 1
        else:
            self.wrong += 1
        return wrong

    def close(self, timeout: float) -> None:
        """Take no more."""
        self._queue.close(timeout)
