"""Buffers on NICs: each is registered once on every NIC, and its keys are looked up by column."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tent_core.errors import TransportError
from tent_core.transport import LocalBuffer
from tent_core.types import Permission
from tent_rdma.verbs import Device, Registration, VerbsError
from tent_rdma.wire import BufferAttribute

PAGE = 4096


class Registrar(Protocol):
    """Where buffers are registered: an open NIC."""

    @property
    def device(self) -> Device: ...


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """The keys of one buffer: `keys[nic][chunk]`, uint64, for addresses from `address` on.

    Chunk c spans [address + c * chunk, ...), `length` bytes in all.
    """

    id: int
    generation: int
    address: int
    length: int
    chunk: int
    location: str
    keys: NDArray[np.uint64]


class _Registered:
    """What was made for one buffer, and whatever of it is still there."""

    def __init__(self, keys: Keys, regions: list[Registration]) -> None:
        self.keys = keys
        self.regions = regions


class Registrations:
    """All registrations of one engine. Thread-safe; its lock is a leaf, no verb is called under it.

    `spread(calls)` runs calls side by side, one for each NIC, and answers when all have ended.
    """

    def __init__(
        self,
        nics: Sequence[Registrar],
        largest: int,
        spread: Callable[[Sequence[Callable[[], None]]], None],
    ) -> None:
        limits = [nic.device.limits.max_registration for nic in nics]
        self._nics = nics
        self._chunk = min(largest, *limits) // PAGE * PAGE
        self._spread = spread
        self._lock = threading.Lock()
        self._made: dict[int, _Registered] = {}

    def __len__(self) -> int:
        """How many registrations there are, on all NICs."""
        with self._lock:
            return sum(len(made.regions) for made in self._made.values())

    def add(self, buffer: LocalBuffer) -> BufferAttribute:
        """Register on every NIC; what to publish. Raises VerbsError, and then nothing of it is left."""
        chunk = max(self._chunk, 1)
        starts = range(buffer.address, buffer.address + buffer.length, chunk)
        end = buffer.address + buffer.length
        grid: list[list[Registration]] = [[] for _ in self._nics]
        failures: list[VerbsError] = []

        def register(nic: Registrar, made: list[Registration]) -> None:
            try:
                for start in starts:
                    made.append(
                        nic.device.register(
                            start,
                            min(chunk, end - start),
                            remote_read=buffer.permission is not Permission.LOCAL_READ_WRITE,
                            remote_write=buffer.permission is Permission.GLOBAL_READ_WRITE,
                        )
                    )
            except VerbsError as error:
                failures.append(error)

        self._spread(
            [
                lambda nic=nic, made=made: register(nic, made)  # type: ignore[misc]
                for nic, made in zip(self._nics, grid, strict=True)
            ]
        )
        regions = [region for made in grid for region in made]
        lkeys = (
            np.array([[r.lkey for r in made] for made in grid], np.uint64) if not failures else None
        )
        if lkeys is None:
            self._keep_what_cannot_be_closed(buffer, regions)
            raise failures[0]
        keys = _keys(buffer, chunk, lkeys)
        with self._lock:
            self._made[buffer.id] = _Registered(keys, regions)
        rkeys = (
            [[] for _ in grid]
            if buffer.permission is Permission.LOCAL_READ_WRITE
            else [[r.rkey for r in made] for made in grid]
        )
        return BufferAttribute(chunk=chunk, rkeys=rkeys)

    def remove(self, buffer: LocalBuffer) -> None:
        """Deregister: afterwards no NIC can touch it. Raises VerbsError; it may be asked again."""
        with self._lock:
            made = self._made.get(buffer.id)
            if made is None or made.keys.generation != buffer.generation:
                return
        self._close(made)
        with self._lock:
            self._made.pop(buffer.id, None)

    def close(self) -> list[VerbsError]:
        """Deregister all; answers what failed."""
        with self._lock:
            everything = list(self._made.values())
        failures = []
        for made in everything:
            try:
                self._close(made)
            except VerbsError as error:
                failures.append(error)
        with self._lock:
            for id in [id for id, made in self._made.items() if not made.regions]:
                del self._made[id]
        return failures

    def lookup(self, ids: Iterable[int]) -> list[Keys]:
        """The local keys of buffers. Raises TransportError when one has none."""
        found = []
        with self._lock:
            for id in ids:
                made = self._made.get(id)
                if made is None or not made.keys.keys.size:
                    raise TransportError(f"local buffer {id} is not registered for rdma")
                found.append(made.keys)
        return found

    def _keep_what_cannot_be_closed(self, buffer: LocalBuffer, regions: list[Registration]) -> None:
        nothing = _keys(buffer, 1, np.empty((0, 0), np.uint64))
        made = _Registered(nothing, regions)
        try:
            self._close(made)
        except VerbsError:
            with self._lock:  # `remove` and `close` try again
                self._made[buffer.id] = made

    @staticmethod
    def _close(made: _Registered) -> None:
        while made.regions:
            made.regions[-1].close()
            made.regions.pop()


def _keys(buffer: LocalBuffer, chunk: int, keys: NDArray[np.uint64]) -> Keys:
    return Keys(
        buffer.id, buffer.generation, buffer.address, buffer.length, chunk, buffer.location, keys
    )
