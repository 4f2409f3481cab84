"""The buffers of one peer that are in use here: mapped at first use, let go of when the peer says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tent_core.descriptor import BufferDescriptor, SegmentDescriptor
from tent_core.errors import StaleHandle, TransportError
from tent_core.types import BufferState, Permission
from tent_shm.attribute import BufferAttribute
from tent_shm.mapping import Mapping
from tent_shm.owner import Owner
from tent_shm.target import Target

NAME = "shm"


class Targets:
    """The targets by buffer id. Thread-safe; each holds a use of the owner until it is released."""

    def __init__(self, owner: Owner, newest: Callable[[], SegmentDescriptor], log: Any) -> None:
        self._owner = owner
        self._newest = newest
        self._log = log
        self._lock = threading.Lock()
        self._targets: dict[int, Target] = {}
        self._mapped: set[Mapping] = set()

    @property
    def mappings(self) -> int:
        """How many buffers are mapped."""
        return len(self._mapped)

    def get(self, number: int) -> Target:
        """The target of a buffer of the newest snapshot, made now if there is none. Raises TentError."""
        described = self._newest().buffers.get(number)
        if described is None:
            raise StaleHandle(f"the peer has no buffer {number} (any more)")
        target = self._targets.get(number)
        if target is not None and target.buffer.generation == described.generation:
            return target
        with self._lock:
            target = self._targets.get(number)
            if target is None or target.buffer.generation != described.generation:
                before, target = target, self._open(described)
                self._targets[number] = target
                if before is not None:
                    before.let_go(StaleHandle(f"buffer {number} of the peer was registered anew"))
        return target

    def refresh(self, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        """Let go of what `new` has no more, or is taking away."""
        for number, target in list(self._targets.items()):
            was, now = old.buffers.get(number), new.buffers.get(number)
            if was is None or was.generation != target.buffer.generation:
                continue  # registered after `old`: another step of the snapshots speaks of it
            if now is None or now.generation != was.generation or now.state is not BufferState.LIVE:
                self._let_go(target, StaleHandle(f"the peer has unregistered buffer {was.name!r}"))

    def let_all_go(self, cause: Exception) -> None:
        """Let go of every target. No more are made afterwards, if the owner takes no more uses by then."""
        with self._lock:
            targets, self._targets = list(self._targets.values()), {}
        for target in targets:
            target.let_go(cause)

    def _let_go(self, target: Target, cause: Exception) -> None:
        with self._lock:
            if self._targets.get(target.buffer.id) is target:
                del self._targets[target.buffer.id]
        target.let_go(cause)

    def _open(self, described: BufferDescriptor) -> Target:
        if not self._owner.begin():
            raise TransportError("the connection to the peer has been closed")
        try:
            mapping = self._map(described)
        except BaseException:
            self._owner.end()
            raise
        if mapping is not None:
            self._mapped.add(mapping)
        return Target(described, mapping, self._released)

    def _released(self, target: Target) -> None:
        if target.mapping is not None:
            target.mapping.unmap()
            self._mapped.discard(target.mapping)
        self._owner.end()

    def _map(self, described: BufferDescriptor) -> Mapping | None:
        """Map a buffer, or answer None where its owner's memory is to be used: it was not made by `allocate`,
        or it cannot be mapped. Raises TransportError where neither is possible."""
        attribute = described.attributes.get(NAME)
        if attribute is None:
            raise TransportError(f"buffer {described.name!r} of the peer is not offered by shm")
        denied = self._owner.memory_denied
        try:
            file = BufferAttribute.decode(attribute.payload).file
            if file is not None:
                if file.size < described.length:
                    raise TransportError(f"{file.size} bytes for a buffer of {described.length}")
                writable = described.permission is Permission.GLOBAL_READ_WRITE
                return Mapping(self._owner.keeper, file, writable=writable)
        except (OSError, TransportError) as error:
            if denied is not None:
                raise TransportError(
                    f"buffer {described.name!r} can neither be mapped ({error}) nor copied ({denied})"
                ) from error
            self._log.warning("shm_buffer_not_mapped", buffer=described.name, reason=str(error))
            return None
        if denied is not None:
            raise TransportError(
                f"buffer {described.name!r} was not made by allocate(), and {denied}"
            )
        return None
