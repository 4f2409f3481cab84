"""Two real processes without an engine: an owner in a child process, and the peer's transport in this one."""

from __future__ import annotations

import fcntl
import mmap
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from tent_core.host import identify
from tent_core.transport import LocalBuffer
from tent_core.types import BufferState, Opcode, Permission
from tent_core.work import Requests, Work
from tent_shm.endpoint import ShmEndpoint
from tent_shm.settings import Settings
from tent_shm.transport import ShmTransport

Array = NDArray[np.uint8]
TIMEOUT = 20.0


class Log:
    """Keeps the events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    warning = error = debug = info

    def names(self) -> list[str]:
        return [name for name, _ in self.events]


@dataclass
class Context:
    """What an engine gives to the transport."""

    key: PeerKey
    settings: Settings = field(default_factory=Settings)
    host: HostIdentity = field(default_factory=identify)
    log: Any = field(default_factory=Log)
    topology: Any = None
    advertise_host: str = "127.0.0.1"
    listen_host: str = "127.0.0.1"
    published: bytes | None = None

    def publish(self, payload: bytes | None) -> None:
        self.published = payload


class Node:
    """One process's transport, with the memory that it offers."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.conn: Any = None
        self.context = Context(PeerKey(name, os.urandom(16)), models.make(Settings, **settings))
        self.transport = ShmTransport()
        self.transport.start(self.context)
        self.arrays: dict[int, Array] = {}
        self.locals: dict[int, LocalBuffer] = {}
        self.descriptors: dict[int, BufferDescriptor] = {}

    def allocate(
        self, size: int, permission: Permission = Permission.GLOBAL_READ_WRITE
    ) -> LocalBuffer:
        fd = os.memfd_create("tent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(fd, whole)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return self.register(np.frombuffer(mmap.mmap(fd, whole), np.uint8, size), permission, fd)

    def register(
        self, array: Array, permission: Permission = Permission.GLOBAL_READ_WRITE, fd: int = -1
    ) -> LocalBuffer:
        number = len(self.locals)
        buffer = LocalBuffer(
            number,
            100 + number,
            f"buffer-{number}",
            array.ctypes.data,
            array.nbytes,
            "cpu:0",
            permission,
            fd,
        )
        (payload,) = self.transport.add_buffers([buffer])
        assert payload is not None
        self.arrays[number], self.locals[number] = array, buffer
        self.descriptors[number] = BufferDescriptor(
            number,
            buffer.generation,
            buffer.name,
            buffer.address,
            buffer.length,
            buffer.location,
            permission,
            attributes={"shm": Attribute(3, "shm", payload)},
        )
        return buffer

    def segment(self) -> SegmentDescriptor:
        published = self.context.published
        attributes = {} if published is None else {"shm": Attribute(3, "shm", published)}
        key = self.context.key
        return SegmentDescriptor(
            key.name,
            key.incarnation,
            1,
            self.context.host,
            {"shm": 3},
            attributes,
            (),
            dict(self.descriptors),
        )


class FakePeer:
    """The peer as the engine shows it to the transport."""

    def __init__(self, segment: SegmentDescriptor) -> None:
        self.segment = segment
        self.suspicions: list[Exception] = []

    @property
    def key(self) -> PeerKey:
        return self.segment.key

    def bootstrap(self, payload: bytes, timeout: float) -> bytes:
        raise NotImplementedError

    def suspect(self, cause: Exception) -> None:
        self.suspicions.append(cause)

    def without(self, number: int) -> SegmentDescriptor:
        buffers = {i: b for i, b in self.segment.buffers.items() if i != number}
        return replace(self.segment, version=self.segment.version + 1, buffers=buffers)

    def revoking(self, number: int) -> SegmentDescriptor:
        revoked = replace(self.segment.buffers[number], state=BufferState.REVOKING)
        buffers = {**self.segment.buffers, number: revoked}
        return replace(self.segment, version=self.segment.version + 1, buffers=buffers)


Step = Callable[..., Any]


def bytes_of(node: Node, number: int, start: int, stop: int) -> bytes:
    """What the owner has there."""
    return node.arrays[number][start:stop].tobytes()


def serve(conn: Any, setup: Step, settings: dict[str, Any]) -> None:
    """The owner's process: makes a node, then does what it is asked, function by function."""
    node = Node("owner:1", **settings)
    node.conn = conn
    setup(node)
    conn.send(node.segment())
    while True:
        function, args = conn.recv()
        conn.send(function(node, *args))


class Owner:
    """A child process with a node. `ask(f, *args)` answers `f(node, *args)` there."""

    def __init__(self, setup: Step, **settings: Any) -> None:
        self.conn, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=serve, args=(theirs, setup, settings), daemon=True)
        self.process.start()
        theirs.close()
        self.peer = FakePeer(self._receive())

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def tell(self, function: Step, *args: Any) -> None:
        self.conn.send((function, args))

    def ask(self, function: Step, *args: Any) -> Any:
        self.tell(function, *args)
        return self._receive()

    def _receive(self) -> Any:
        assert self.conn.poll(TIMEOUT), "the owner does not answer"
        return self.conn.recv()

    def read_line(self) -> bytes:
        """What a program says that has taken the place of the owner's."""
        line = b""
        while not line.endswith(b"\n"):
            assert self.conn.poll(TIMEOUT), f"the new program says no more than {line!r}"
            line += os.read(self.conn.fileno(), 1)
        return line.strip()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.process.kill()
        self.process.join(TIMEOUT)
        self.conn.close()

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def pair(setup: Step, size: int = 1 << 20, **settings: Any) -> Iterator[Pair]:
    """An owner, and a node here with buffers 0 (allocated) and 1 (registered) that is connected to it."""
    with Owner(setup) as owner:
        node = Node("here:1", **settings)
        try:
            node.allocate(size)
            node.register(np.zeros(size, np.uint8))
            for array in node.arrays.values():
                array[:] = noise(size, 1)
            yield Pair(owner, node, node.transport.connect(owner.peer))
        finally:
            node.transport.stop()


@dataclass
class Pair:
    owner: Owner
    node: Node
    endpoint: ShmEndpoint

    def transfer(self, opcode: Opcode, rows: Sequence[Row], **options: Any) -> Work:
        """Submit rows and wait; checks that each was reported once."""
        return transfer(self.endpoint, self.node, self.owner.peer, opcode, rows, **options)

    def check(self, rows: Sequence[Row]) -> None:
        """Both sides of these rows have the same bytes."""
        for here, at, there, to, size in rows:
            expected = self.node.arrays[here][at : at + size].tobytes()
            assert self.owner.ask(bytes_of, there, to, to + size) == expected


Row = tuple[int, int, int, int, int]
"""Local buffer, offset in it, remote buffer, offset in it, length."""


def requests(
    node: Node, peer: FakePeer, opcode: Opcode, rows: Sequence[Row], reused: bool = False
) -> Requests:
    columns = np.array(rows, np.int64).reshape(-1, 5)
    here = {i: b.address for i, b in node.locals.items()}
    there = {i: b.address for i, b in peer.segment.buffers.items()}
    local = np.array([(here[b] + o, n) for b, o, _, _, n in columns.tolist()], np.uint64)
    remote = np.array([(there[b] + o, n) for _, _, b, o, n in columns.tolist()], np.uint64)
    local_ids, remote_ids = columns[:, 0].astype(np.int32), columns[:, 2].astype(np.int32)
    return Requests(
        opcode,
        local,
        remote,
        local_ids,
        remote_ids,
        tuple(set(local_ids.tolist())),
        tuple(set(remote_ids.tolist())),
        {i: peer.segment.buffers[i].generation for i in remote_ids.tolist()},
        int(columns[:, 4].sum()),
        reused,
    )


def submit(
    endpoint: ShmEndpoint,
    what: Requests,
    *,
    may_block: bool = True,
    deadline: float = float("inf"),
    wait: bool = True,
) -> tuple[Work, list[Work]]:
    """Submit; the work, and the list of the `on_finished` calls (one is right)."""
    finished: list[Work] = []
    event = threading.Event()

    def on_finished(work: Work) -> None:
        finished.append(work)
        event.set()

    work = Work(what, on_finished, may_block=may_block, deadline=deadline)
    endpoint.submit(work)
    if wait:
        assert event.wait(TIMEOUT), "the work was never finished"
    return work, finished


def transfer(
    endpoint: ShmEndpoint,
    node: Node,
    peer: FakePeer,
    opcode: Opcode,
    rows: Sequence[Row],
    **options: Any,
) -> Work:
    """Submit rows and wait; checks that each was reported once."""
    work, finished = submit(endpoint, requests(node, peer, opcode, rows), **options)
    assert finished == [work]
    assert work.surplus == 0
    return work


def noise(size: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def blocks(count: int, block: int, size: int, remote: Iterable[int], seed: int = 1) -> list[Row]:
    """`count` blocks at distinct random places of buffer 0 here and of `remote` buffers there, in turns."""
    rng = np.random.default_rng(seed)
    here = rng.permutation(size // block)[:count] * block
    there = rng.permutation(size // block)[:count] * block
    numbers = list(remote)
    return [
        (0, int(h), numbers[i % len(numbers)], int(t), block)
        for i, (h, t) in enumerate(zip(here, there, strict=True))
    ]
