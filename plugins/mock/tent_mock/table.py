"""What an engine has registered with its mock transport, checked by its owner's side at each move."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from tent_core.errors import TransportError
from tent_core.transport import LocalBuffer
from tent_core.types import Permission
from tent_core.work import Iovecs


class Table:
    """The live registrations of one engine, with marks of who is using them. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._buffers: dict[int, LocalBuffer] = {}
        self._users: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._buffers)

    def add(self, buffers: Sequence[LocalBuffer]) -> None:
        """Allow moves from and to these."""
        with self._changed:
            self._buffers.update((buffer.id, buffer) for buffer in buffers)

    def remove(self, buffer: LocalBuffer, timeout: float) -> None:
        """Allow no more moves; returns when none is under way, or raises TransportError."""
        with self._changed:
            known = self._buffers.get(buffer.id)
            if known is not None and known.generation == buffer.generation:
                del self._buffers[buffer.id]
            if not self._changed.wait_for(lambda: not self._users.get(buffer.id), timeout):
                raise TransportError(
                    f"buffer {buffer.name!r} was still being copied after {timeout:g} s"
                )

    def generations(self, ids: Sequence[int]) -> dict[int, int]:
        """The present generation of each id; those that are not registered are left out."""
        with self._changed:
            return {i: self._buffers[i].generation for i in ids if i in self._buffers}

    @contextmanager
    def using(
        self,
        generations: Mapping[int, int],
        ids: NDArray[np.int32],
        rows: Iovecs,
        needed: Permission | None = None,
    ) -> Iterator[None]:
        """Hold the buffers while `rows` are copied. Raises TransportError if one has gone or is too small.

        `needed` is the least permission that the move takes; None is the owner's own side, who may do all.
        """
        with self._changed:
            for number in generations:
                self._check(number, generations[number], ids, rows, needed)
            for number in generations:
                self._users[number] = self._users.get(number, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                for number in generations:
                    self._users[number] -= 1
                self._changed.notify_all()

    def _check(
        self,
        number: int,
        generation: int,
        ids: NDArray[np.int32],
        rows: Iovecs,
        needed: Permission | None,
    ) -> None:
        buffer = self._buffers.get(number)
        if buffer is None or buffer.generation != generation:
            raise TransportError(
                f"buffer {number} is not registered any more under generation {generation}"
            )
        if needed is not None and buffer.permission < needed:
            raise TransportError(
                f"buffer {buffer.name!r} is {buffer.permission.name}; this move needs {needed.name}"
            )
        mine = rows[ids == number]
        start, length = np.uint64(buffer.address), np.uint64(buffer.length)
        offset = mine[:, 0] - start  # wraps far beyond every length where the row starts before it
        if np.any(mine[:, 1] > length - np.minimum(offset, length)):
            raise TransportError(
                f"a request leaves buffer {buffer.name!r} of {buffer.length} bytes"
            )
