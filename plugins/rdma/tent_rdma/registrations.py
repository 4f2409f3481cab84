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
from tent_rdma.advice import advice
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

    def __init__(self, regions: list[Registration]) -> None:
        self.regions = regions
        self._closing = threading.Lock()

    def close(self) -> None:
        """Deregister, once, whoever comes. Raises VerbsError; it may be asked again."""
        with self._closing:
            while self.regions:
                self.regions[-1].close()
                self.regions.pop()


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
        self._made: dict[tuple[int, int], _Registered] = {}
        """By identifier and generation: identifiers are used again, also beside what could not be closed."""
        self._keys: dict[int, Keys] = {}

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
                told = advice(error.errno, buffer.length, nic.device.limits)
                failures.append(error.advised(told))
            except Exception as error:  # in a thread of its own it would be lost
                failures.append(VerbsError(f"registering raised {error!r}", 0))

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
        keys = Keys(
            buffer.id,
            buffer.generation,
            buffer.address,
            buffer.length,
            chunk,
            buffer.location,
            lkeys,
        )
        with self._lock:
            self._made[buffer.id, buffer.generation] = _Registered(regions)
            self._keys[buffer.id] = keys
        rkeys = (
            [[] for _ in grid]
            if buffer.permission is Permission.LOCAL_READ_WRITE
            else [[r.rkey for r in made] for made in grid]
        )
        return BufferAttribute(chunk=chunk, rkeys=rkeys)

    def remove(self, buffer: LocalBuffer) -> None:
        """Deregister: afterwards no NIC can touch it. Raises VerbsError; it may be asked again."""
        key = (buffer.id, buffer.generation)
        with self._lock:
            made = self._made.get(key)
            keys = self._keys.get(buffer.id)
            if keys is not None and keys.generation == buffer.generation:
                del self._keys[buffer.id]
        if made is not None:
            made.close()
            with self._lock:
                self._made.pop(key, None)

    def close(self) -> list[VerbsError]:
        """Deregister all; answers what failed."""
        with self._lock:
            everything = list(self._made.values())
        failures = []
        for made in everything:
            try:
                made.close()
            except VerbsError as error:
                failures.append(error)
        with self._lock:
            self._keys.clear()
            self._made = {key: made for key, made in self._made.items() if made.regions}
        return failures

    def lookup(self, ids: Iterable[int]) -> list[Keys]:
        """The local keys of buffers. Raises TransportError when one has none."""
        found = []
        with self._lock:
            for id in ids:
                keys = self._keys.get(id)
                if keys is None:
                    raise TransportError(f"local buffer {id} is not registered for rdma")
                found.append(keys)
        return found

    def _keep_what_cannot_be_closed(self, buffer: LocalBuffer, regions: list[Registration]) -> None:
        made = _Registered(regions)
        try:
            made.close()
        except VerbsError:
            with self._lock:  # `remove` and `close` try again
                self._made[buffer.id, buffer.generation] = made
