"""A transport driven by the contract alone: two sides in one process, no engine, no control plane."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tent_core import models
from tent_core.descriptor import (
    Attribute,
    BufferDescriptor,
    HostIdentity,
    PeerKey,
    SegmentDescriptor,
)
from tent_core.log import Logger, configure
from tent_core.segments import LocalSegment
from tent_core.settings import LogSettings
from tent_core.topology import Topology
from tent_core.transport import (
    Endpoint,
    LocalBuffer,
    Resume,
    Transport,
    TransportContext,
    TransportDeclaration,
)
from tent_core.types import Opcode, Permission
from tent_core.work import Requests, Work

_ports = itertools.count(1)


def this_host() -> HostIdentity:
    """The identity of this process, as proc(5) has it."""
    with open("/proc/sys/kernel/random/boot_id") as boot, open("/proc/self/stat") as stat:
        start = int(stat.read().rpartition(")")[2].split()[19])
        return HostIdentity(
            boot.read().strip(), os.stat("/proc/self/ns/pid").st_ino, os.getpid(), start
        )


@dataclass
class Context:
    """What `Side` gives to its transport; implements `transport.TransportContext`."""

    side: Side
    settings: Any
    topology: Topology = field(default_factory=Topology)
    log: Logger = field(default_factory=lambda: configure(LogSettings()))
    advertise_host: str = "127.0.0.1"
    listen_host: str = "127.0.0.1"

    @property
    def key(self) -> PeerKey:
        """Name and incarnation of the side."""
        return self.side.segment.snapshot.key

    @property
    def host(self) -> HostIdentity:
        """This process."""
        return self.side.segment.snapshot.host

    def publish(self, payload: bytes | None) -> None:
        """Set or withdraw the attribute of the segment."""
        self.side.publish(payload)

    def notified(self, peer: PeerKey, message: bytes) -> bytes:
        """Write the message down and answer what the side says."""
        self.side.messages.append((peer, message))
        return self.side.answer(peer, message)


class Side:
    """One transport with a segment of its own, as an engine would have it."""

    def __init__(self, declaration: TransportDeclaration, **settings: Any) -> None:
        self.declaration = declaration
        name = f"side-{next(_ports)}:1"
        self.segment = LocalSegment(SegmentDescriptor(name, os.urandom(16), 1, this_host()))
        self.transport: Transport = declaration.factory()
        self.context: TransportContext = Context(
            self, models.make(declaration.settings, **settings)
        )
        self.buffers: dict[int, LocalBuffer] = {}
        self.arrays: dict[int, NDArray[np.uint8]] = {}
        self._generation = itertools.count(1)
        self.messages: list[tuple[PeerKey, bytes]] = []
        """What `exchange` of other sides has brought here."""
        self.answer: Callable[[PeerKey, bytes], bytes] = lambda _, message: message
        """What is answered to it: the same, unless a test says otherwise. May raise TransportError."""

    @property
    def incarnation(self) -> bytes:
        """The incarnation, as an engine has it."""
        return self.segment.snapshot.incarnation

    def start(self) -> Side:
        """Start the transport and answer self."""
        self.transport.start(self.context)
        return self

    def __enter__(self) -> Side:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.transport.stop()

    def publish(self, payload: bytes | None) -> None:
        """What the transport says of the segment."""
        d = self.declaration

        def change(old: SegmentDescriptor) -> SegmentDescriptor:
            attributes = {k: v for k, v in old.attributes.items() if k != d.name}
            if payload is not None:
                attributes[d.name] = Attribute(d.number, d.name, payload)
            return replace(old, attributes=MappingProxyType(attributes))

        self.segment.update(change)

    def register(
        self,
        array: NDArray[np.uint8],
        *,
        location: str = "cpu:0",
        permission: Permission = Permission.GLOBAL_READ_WRITE,
        memory_fd: int = -1,
    ) -> LocalBuffer:
        """Register a contiguous array and publish what the transport says of it. Ids are reused.

        `memory_fd` is that of the memfd whose mapping the array is, for memory that an engine allocated.
        """
        number = next(i for i in itertools.count() if i not in self.buffers)
        buffer = LocalBuffer(
            id=number,
            generation=next(self._generation),
            name=f"buffer-{number}",
            address=int(array.ctypes.data),
            length=array.nbytes,
            location=location,
            permission=permission,
            memory_fd=memory_fd,
        )
        (payload,) = self.transport.add_buffers([buffer])
        self.buffers[number], self.arrays[number] = buffer, array
        attributes = {}
        if payload is not None:
            d = self.declaration
            attributes[d.name] = Attribute(d.number, d.name, payload)
        described = BufferDescriptor(
            number,
            buffer.generation,
            buffer.name,
            buffer.address,
            buffer.length,
            location,
            permission,
            attributes=MappingProxyType(attributes),
        )
        self._change_buffers(lambda buffers: {**buffers, number: described})
        return buffer

    def unregister(self, buffer: LocalBuffer, timeout: float = 5.0) -> None:
        """Take the buffer out of the snapshot, then away from the transport."""
        self._change_buffers(lambda buffers: {i: b for i, b in buffers.items() if i != buffer.id})
        self.transport.remove_buffer(buffer, timeout)
        del self.buffers[buffer.id], self.arrays[buffer.id]

    def _change_buffers(self, change: Any) -> None:
        self.segment.update(lambda old: replace(old, buffers=MappingProxyType(change(old.buffers))))

    def connect(self, other: Side) -> Endpoint:
        """An endpoint of this side for the other one."""
        return self.transport.connect(DirectPeer(self, other))


class DirectPeer:
    """The other side as a transport sees it; implements `transport.Peer`, keeps `suspicions`."""

    def __init__(self, here: Side, there: Side) -> None:
        self._here = here
        self._there = there
        self.suspicions: list[Exception] = []

    @property
    def key(self) -> PeerKey:
        """The identity of the other side."""
        return self._there.segment.snapshot.key

    @property
    def segment(self) -> SegmentDescriptor:
        """The newest snapshot of the other side."""
        return self._there.segment.snapshot

    def bootstrap(self, payload: bytes, timeout: float) -> bytes:
        """Ask the transport of the other side, in this thread."""
        return self._there.transport.bootstrap(self._here.segment.snapshot.key, payload)

    def begin_bootstrap(self, payload: bytes, timeout: float) -> Future[bytes]:
        """The same, in a thread of its own."""
        answer: Future[bytes] = Future()

        def ask() -> None:
            try:
                answer.set_result(self.bootstrap(payload, timeout))
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=ask, daemon=True).start()
        return answer

    def suspect(self, cause: Exception) -> None:
        """Remember the suspicion."""
        self.suspicions.append(cause)


Row = tuple[LocalBuffer, int, LocalBuffer, int, int]
"""Local buffer, offset in it, remote buffer, offset in it, length; offsets and length in bytes."""


def requests(opcode: Opcode, rows: Sequence[Row]) -> Requests:
    """The columns of these rows."""
    local = np.array([(b.address + o, n) for b, o, _, _, n in rows], np.uint64).reshape(-1, 2)
    remote = np.array([(b.address + o, n) for _, _, b, o, n in rows], np.uint64).reshape(-1, 2)
    local_ids = np.array([b.id for b, *_ in rows], np.int32)
    remote_ids = np.array([b.id for _, _, b, _, _ in rows], np.int32)
    return Requests(
        opcode,
        local,
        remote,
        local_ids,
        remote_ids,
        tuple(dict.fromkeys(local_ids.tolist())),
        tuple(dict.fromkeys(remote_ids.tolist())),
        {b.id: b.generation for _, _, b, _, _ in rows},
        int(local[:, 1].sum()),
    )


class Submitted:
    """One submission and the wait for its end. `finished` counts the calls of `on_finished`: one is right."""

    def __init__(
        self,
        endpoint: Endpoint,
        opcode: Opcode,
        rows: Sequence[Row],
        timeout: float = 30.0,
        resume: Resume | None = None,
    ) -> None:
        """`resume` goes on with a request that a bound call has started."""
        self.finished = 0
        self._ended = threading.Event()
        self.work = Work(requests(opcode, rows), self._finish, deadline=time.monotonic() + timeout)
        (resume or endpoint.submit)(self.work)

    def _finish(self, work: Work) -> None:
        self.finished += 1
        self._ended.set()

    def wait(self, timeout: float = 10.0) -> Work:
        """The work, once all of it is reported. AssertionError after `timeout` seconds."""
        if not self._ended.wait(timeout):
            raise AssertionError(
                f"after {timeout:g} s these are still unreported: {np.flatnonzero(self.work.status == 1)}; "
                "each has to be, by complete, fail or refuse, when the endpoint closes or at work.deadline"
            )
        return self.work
