"""The transport: the initiator opens the peer's file by its path, and reads and writes it itself.

The owner's side does nothing on the way: it publishes what names the file. So whoever transfers has to be
allowed to open it, and the owner sees what was written, in the page cache of the one kernel, when the call
has returned. All descriptors are used by one thread alone, hence what is closed in it is used by nobody.
"""

from __future__ import annotations

import ctypes
import os
import queue
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from tent_core.descriptor import BufferDescriptor, SegmentDescriptor
from tent_core.errors import TransportError, Unreachable
from tent_core.transport import Endpoint, LocalBuffer, Peer, Transport, TransportContext
from tent_core.types import BufferState, MemoryKind, Opcode, Permission, Status, memory_kind
from tent_core.work import Work

NAME = "files"
PIECE = 1 << 20
"""Bytes of one system call; between two of them it is looked whether the work is still wanted."""
IDENTITY = struct.Struct("!QQ")
"""Device and inode, before the path: the path may name another file by then, or in another mount."""
CALL_S = 0.9


class FilesTransport(Transport):
    """One thread, which does the input and output of all peers in turn."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._endpoints: set[FilesEndpoint] = set()

    def start(self, context: TransportContext) -> None:
        self._context = context
        self._thread = threading.Thread(target=self._run, name="tent-files-io", daemon=True)
        self._thread.start()
        context.publish(b"")

    def add_buffers(self, buffers: Sequence[LocalBuffer]) -> Sequence[bytes | None]:
        return [
            _attribute(b) if memory_kind(b.location) is MemoryKind.FILE else b"" for b in buffers
        ]

    def connect(self, peer: Peer) -> Endpoint:
        if not self._context.host.same_machine(peer.segment.host):
            raise Unreachable(f"peer {peer.key} is on another machine")
        endpoint = FilesEndpoint(self, peer, self._context.settings.sync)
        self._endpoints.add(endpoint)
        return endpoint

    def stop(self) -> None:
        thread = self._thread
        if thread is None:
            return
        for endpoint in list(self._endpoints):
            endpoint.close("the engine stops")
        self._context.publish(None)
        self._thread = None
        self._jobs.put(None)
        thread.join(CALL_S)

    def holdings(self) -> Mapping[str, int]:
        return {"threads": int(self._thread is not None), "endpoints": len(self._endpoints)}

    def later(self, job: Callable[[], None]) -> None:
        """Run `job` in the thread, after what is there."""
        self._jobs.put(job)

    def now(self, job: Callable[[], None]) -> None:
        """The same, and wait for it. Raises TransportError if the disk keeps the thread too long."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                job()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        self._jobs.put(run)
        try:
            done.result(CALL_S)
        except FutureTimeout as error:
            raise TransportError(f"the disk has kept {NAME} for {CALL_S:g} s") from error

    def forget(self, endpoint: FilesEndpoint) -> None:
        """An endpoint has closed."""
        self._endpoints.discard(endpoint)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # not to be kept alive until the next one comes


class FilesEndpoint(Endpoint):
    """The peer's files that have been opened, by buffer."""

    def __init__(self, transport: FilesTransport, peer: Peer, sync: bool) -> None:
        self._transport, self._peer, self._sync = transport, peer, sync
        self._open: dict[tuple[int, int], int] = {}
        self._closed = ""
        self._gate = (
            threading.Lock()
        )  # between `submit` and `close`: what is queued is before the end

    def submit(self, work: Work) -> None:
        with self._gate:
            if self._closed:
                raise TransportError(f"the endpoint for {self._peer.key} is closed: {self._closed}")
            self._transport.later(lambda: self._carry(work))

    def cancel(self, work: Work) -> None:
        """`work.cancelled` is looked at before each piece."""

    def refresh(self, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        live = {(b.id, b.generation) for b in new.buffers.values() if b.state is BufferState.LIVE}
        self._transport.now(lambda: self._close_files(lambda key: key not in live))

    def close(self, reason: str) -> None:
        with self._gate:
            if self._closed:
                return
            self._closed = reason
        self._transport.forget(self)
        self._transport.now(lambda: self._close_files(lambda key: True))

    def holdings(self) -> Mapping[str, int]:
        return {"files": len(self._open)}

    # In the transport's thread

    def _close_files(self, which: Callable[[tuple[int, int]], bool]) -> None:
        for key in [key for key in self._open if which(key)]:
            os.close(self._open.pop(key))

    def _carry(self, work: Work) -> None:
        """Report each request once. Nothing of a failed one moves later: the call has returned."""
        r = work.requests
        rows = zip(r.local.tolist(), r.remote.tolist(), r.remote_ids.tolist(), strict=True)
        touched = set()
        done = 0
        try:
            for (local, length), (remote, _), number in rows:
                fd, base = self._file(number, r.remote_generations[number])
                touched.add(fd)
                self._move(work, fd, local, remote - base, length)
                done += 1
            if self._sync and r.opcode is Opcode.WRITE:
                for fd in touched:
                    os.fsync(fd)
        except _NotWanted as why:
            work.complete(0, done)
            work.fail(TransportError(why.args[0]), done, status=why.args[1])
        except (OSError, TransportError) as error:
            work.complete(0, done)
            cause = TransportError(f"a file of {self._peer.key}: {error}")
            work.fail(cause, done)
        else:
            work.complete()

    def _move(self, work: Work, fd: int, local: int, offset: int, length: int) -> None:
        memory = memoryview((ctypes.c_char * length).from_address(local)).cast("B")
        reading, at = work.requests.opcode is Opcode.READ, 0
        while at < length:
            self._check_wanted(work)
            piece = memory[at : at + PIECE]
            move = os.preadv if reading else os.pwritev
            count = move(fd, [piece], offset + at)
            if count == 0:
                raise TransportError(f"it ends at {offset + at}: somebody has cut it short")
            at += count
            work.progress += count

    def _check_wanted(self, work: Work) -> None:
        if self._closed:
            raise TransportError(f"the endpoint was closed: {self._closed}")
        if work.cancelled:
            raise _NotWanted("it was cancelled", Status.CANCELED)
        if time.monotonic() > work.deadline:
            raise _NotWanted("its deadline has passed", Status.TIMEOUT)

    def _file(self, number: int, generation: int) -> tuple[int, int]:
        """The open file of a buffer, and the address of its first byte."""
        buffer = self._peer.segment.buffers.get(number)
        if (
            buffer is None
            or buffer.generation != generation
            or buffer.state is not BufferState.LIVE
        ):
            raise TransportError(f"buffer {number} of generation {generation} has gone")
        key = number, generation
        if key not in self._open:
            self._open[key] = _opened(buffer)
        return self._open[key], buffer.address


class _NotWanted(Exception):
    """Text, and the status that says so."""


def _attribute(buffer: LocalBuffer) -> bytes | None:
    path = buffer.location.partition(":")[2]
    try:
        found = os.stat(path)
    except OSError:
        return None  # it went in the meantime: this transport cannot offer it
    return IDENTITY.pack(found.st_dev, found.st_ino) + os.fsencode(path)


def _opened(buffer: BufferDescriptor) -> int:
    payload = buffer.attributes[NAME].payload
    path = os.fsdecode(payload[IDENTITY.size :])
    writable = buffer.permission is Permission.GLOBAL_READ_WRITE
    fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    found = os.fstat(fd)
    if (found.st_dev, found.st_ino) != IDENTITY.unpack_from(payload):
        os.close(fd)
        raise TransportError(f"{path} is another file here than at its owner")
    return fd
