"""The buffers of one engine: registration, publication, and revocation on unregister."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tent_core.control.contract import SessionInfo
from tent_core.descriptor import BufferDescriptor, SegmentDescriptor
from tent_core.errors import (
    ClosedError,
    MemoryUnsupported,
    RangeError,
    RevocationTimeout,
    TransportError,
    UsageError,
)
from tent_core.inflight import Deadline
from tent_core.memory import Buffer, Memory
from tent_core.runner import Transports
from tent_core.segments import LocalSegment
from tent_core.transport import LocalBuffer
from tent_core.types import BufferState, MemoryKind, Permission, Reach, memory_kind

if TYPE_CHECKING:
    from tent_core.control.plane import ControlPlane

MAX_NAME_BYTES = 1024
"""Of a buffer's name, as UTF-8."""

Made = Callable[[LocalBuffer, Memory, dict[str, int]], Buffer]


class BufferRegistry:
    """Owns the local buffers. Thread-safe: `_lock` guards the tables and is a leaf; each buffer's revocation
    has a lock of its own, so that two calls of `unregister` for one buffer take turns."""

    def __init__(
        self, segment: LocalSegment, transports: Transports, control: ControlPlane, log: Any
    ) -> None:
        self._segment = segment
        self._transports = transports
        self._control = control
        self._log = log
        self._lock = threading.Lock()
        self._live: dict[int, Buffer] = {}
        self._free: list[int] = []
        self._next = 0
        self._generation = 0
        self._revoking: dict[int, _Revocation] = {}

    # ---------------------------------------------------------------- registration

    def add(
        self,
        memories: Sequence[Memory],
        names: Sequence[str | None],
        permission: Permission,
        made: Made,
    ) -> list[Buffer]:
        """Register all of `memories` with one new snapshot. Either all are registered or none.

        Raises MemoryUnsupported for memory that no running transport can move, PermissionDenied-like
        UsageError for read-only memory that peers might write to.
        """
        for memory, name in zip(memories, names, strict=True):
            self._check(memory, permission)
            _check_name(name)
        locals_ = self._number(memories, names, permission)
        offers = self._transports.add_buffers(locals_, [memory_kind(m.location) for m in memories])
        buffers = [
            made(local, memory, {a.name: a.number for a in offer.values()})
            for local, memory, offer in zip(locals_, memories, offers, strict=True)
        ]
        published = {
            b.id: BufferDescriptor(
                b.id,
                b.generation,
                b.name,
                b.address,
                b.length,
                b.location,
                b.permission,
                BufferState.LIVE,
                MappingProxyType(offer),
            )
            for b, offer in zip(buffers, offers, strict=True)
        }
        with self._lock:
            self._live.update({b.id: b for b in buffers})
        self._change(lambda old: {**old, **published})
        return buffers

    def _check(self, memory: Memory, permission: Permission) -> None:
        kind = memory_kind(memory.location)
        if kind is not MemoryKind.DRAM and not self._transports.moves(kind):
            running = ", ".join(r.name for r in self._transports) or "none"
            raise MemoryUnsupported(
                f"memory in {memory.location} cannot be registered: no running transport moves "
                f"{kind.value} memory "
                f"(running: {running}); enable one that does, or copy to host memory first"
            )
        if memory.readonly and permission is Permission.GLOBAL_READ_WRITE:
            raise UsageError(
                "a read-only object cannot be registered with GLOBAL_READ_WRITE, since peers could "
                "write to it: "
                "use permission=Permission.GLOBAL_READ_ONLY"
            )

    def _number(
        self, memories: Sequence[Memory], names: Sequence[str | None], permission: Permission
    ) -> list[LocalBuffer]:
        numbered = []
        with self._lock:
            for memory, name in zip(memories, names, strict=True):
                if self._free:
                    number = self._free.pop()
                else:
                    number, self._next = self._next, self._next + 1
                self._generation += 1
                numbered.append(
                    LocalBuffer(
                        number,
                        self._generation,
                        name or f"buffer-{self._generation}",
                        memory.address,
                        memory.length,
                        memory.location,
                        permission,
                        memory.memory_fd,
                    )
                )
        return numbered

    def _change(
        self, change: Callable[[dict[int, BufferDescriptor]], dict[int, BufferDescriptor]]
    ) -> SegmentDescriptor:
        return self._segment.update(
            lambda old: replace(old, buffers=MappingProxyType(change(dict(old.buffers))))
        )

    # ---------------------------------------------------------------- look-up

    def all(self) -> list[Buffer]:
        """The registered buffers, those being revoked included."""
        with self._lock:
            return list(self._live.values())

    def find(self, number: int, generation: int) -> Buffer | None:
        """The buffer of this id and generation, if it is registered."""
        with self._lock:
            buffer = self._live.get(number)
        return buffer if buffer is not None and buffer.generation == generation else None

    def locate(self, address: int, length: int) -> tuple[Buffer, int]:
        """The smallest registered buffer that holds [address, address + length), and the offset in it.

        Raises RangeError that names the nearest registered range.
        """
        buffers = self.all()
        holding = [
            b for b in buffers if b.address <= address and length <= b.address + b.length - address
        ]
        if length > 0 and holding:
            found = min(holding, key=lambda b: b.length)
            return found, address - found.address
        if not buffers:
            raise RangeError(
                f"{length} bytes at {address:#x}: this engine has no registered buffer; register one"
            )
        near = min(
            buffers, key=lambda b: max(b.address - address, address - (b.address + b.length), 0)
        )
        raise RangeError(
            f"{length} bytes at {address:#x} lie in no registered buffer; the nearest is {near.name!r}, "
            f"{near.length} bytes from {near.address:#x} to {near.address + near.length:#x}"
        )

    # ---------------------------------------------------------------- revocation

    def remove(self, buffer: Buffer, timeout: float) -> None:
        """Withdraw a buffer; returns when no peer and no transport can touch its memory any more.

        Raises RevocationTimeout naming who still may; the buffer then stays alive, refuses every new
        request, and calling again goes on waiting.
        """
        deadline = Deadline(timeout)
        with self._lock:
            if self._live.get(buffer.id) is not buffer:
                raise ClosedError(f"buffer {buffer.name!r} is not registered (any more)")
            revocation = self._revoking.get(buffer.id)
            if revocation is None:
                revocation = self._revoking[buffer.id] = _Revocation()
        if not revocation.turn.acquire(timeout=max(0.001, deadline.left)):
            raise RevocationTimeout(
                f"another thread is unregistering buffer {buffer.name!r} and has not ended", ()
            )
        try:
            if buffer.memory is not None:
                self._revoke(buffer, revocation, deadline)
        finally:
            revocation.turn.release()

    def withdraw_all(self, deadline: Deadline) -> list[tuple[Buffer, list[str]]]:
        """Revoke every buffer with one snapshot, for the close of the engine: peers let go of all of them at
        once. Answers the buffers that somebody may still touch, and who; the transports are stopped next."""
        buffers = self.all()
        if not buffers:
            return []
        for buffer in buffers:
            buffer.inflight.shut()
        version = self._change(
            lambda old: {i: replace(d, state=BufferState.REVOKING) for i, d in old.items()}
        ).version
        left = self._control.wait_acknowledged(
            version, lambda info: any(self._may_touch(b, info) for b in buffers), deadline.left
        )
        held = []
        for buffer in buffers:
            holders = [str(info.key) for info in left if self._may_touch(buffer, info)]
            if not buffer.inflight.wait_drained(deadline.left):
                holders.append("this engine")
            if holders:
                held.append((buffer, holders))
        return held

    def forget_all(self) -> None:
        """The transports have stopped: give all memory back."""
        with self._lock:
            buffers, self._live = list(self._live.values()), {}
        for buffer in buffers:
            buffer.memory = None

    def _revoke(self, buffer: Buffer, revocation: _Revocation, deadline: Deadline) -> None:
        buffer.inflight.shut()
        if revocation.version is None:
            revocation.version = self._change(
                lambda old: {**old, buffer.id: replace(old[buffer.id], state=BufferState.REVOKING)}
            ).version
        if not buffer.inflight.wait_drained(deadline.left):
            raise RevocationTimeout(
                f"buffer {buffer.name!r}: {buffer.inflight.count} transfers of this engine still use it; "
                "wait for them, then call unregister again",
                ("this engine",),
            )
        self._withdraw(buffer, revocation, deadline, owner_checked=True)
        left = self._control.wait_acknowledged(
            revocation.version, lambda info: self._may_touch(buffer, info), deadline.left
        )
        if left:
            holders = [f"{info.key} (pid {info.host.pid}, {info.state.value})" for info in left]
            raise RevocationTimeout(
                f"buffer {buffer.name!r} is still in use by {', '.join(holders)}: "
                "no acknowledgement in time. Its memory stays registered and refuses new requests; "
                "call unregister again to go on waiting, "
                "or end the process that holds it",
                holders,
            )
        self._withdraw(buffer, revocation, deadline, owner_checked=False)
        self._change(lambda old: {i: d for i, d in old.items() if i != buffer.id})
        with self._lock:
            del self._live[buffer.id]
            del self._revoking[buffer.id]
            self._free.append(buffer.id)
        buffer.memory = None

    def _withdraw(
        self, buffer: Buffer, revocation: _Revocation, deadline: Deadline, *, owner_checked: bool
    ) -> None:
        """Tell the transports of one kind that were told of the buffer; each is told once.

        Those whose owner's side stops peers by itself do so before anybody is waited for. The others let go
        after the peers: what they hold for them may break under a transfer that is still on its way.
        """
        for running in self._transports:
            if (
                running.name in revocation.withdrawn
                or running.capabilities.owner_checked is not owner_checked
                or not running.capabilities.touches(memory_kind(buffer.location))
            ):
                continue
            left = max(0.05, deadline.left)
            try:
                running.call(
                    partial(running.transport.remove_buffer, buffer.local, left),
                    left,
                    f"remove_buffer of {buffer.name!r}",
                )
            except TransportError as error:
                raise RevocationTimeout(
                    f"buffer {buffer.name!r}: transport {running.name} has not let go of it: {error}; "
                    "call unregister again",
                    (f"transport {running.name}",),
                ) from error
            revocation.withdrawn.add(running.name)

    def _may_touch(self, buffer: Buffer, info: SessionInfo) -> bool:
        """Whether a watcher could still move bytes of the buffer without the owner's side stopping it."""
        if buffer.permission is Permission.LOCAL_READ_WRITE:
            return False
        for name, number in buffer.offers.items():
            running = self._transports.get(name)
            if running is None or info.transports.get(name) != number:
                continue
            able = running.capabilities
            if not able.owner_checked and (able.reach > Reach.HOST or info.same_host):
                return True
        return False


def _check_name(name: str | None) -> None:
    """A name travels as UTF-8 in the descriptor, beside those of all other buffers."""
    if name is None:
        return
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise UsageError(
            f"buffer name {name!r} is no text: it cannot be written as UTF-8"
        ) from None
    if not 0 < size <= MAX_NAME_BYTES:
        raise UsageError(f"a buffer name has 1 to {MAX_NAME_BYTES} bytes, found {size}")


class _Revocation:
    """How far the withdrawal of one buffer has come."""

    __slots__ = ("turn", "version", "withdrawn")

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.version: int | None = None
        self.withdrawn: set[str] = set()
