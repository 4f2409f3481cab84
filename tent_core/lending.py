"""Memory that this engine lends to peers to stage in, and the copies that it makes for them.

A peer that cannot reach device memory here asks, by a message on the control plane, for host memory to move
through. It gets a buffer of its own, which nobody else uses, and then asks for copies between that and the
buffers here; with each it names slots, and it alone says when it uses which. When it departs the buffer is
revoked like any other: the memory is free when the peer can touch it no more.

Messages and answers are little-endian, of fixed layout; a peer gets no more by them than the permissions of
the buffers give it.
"""

from __future__ import annotations

import struct
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tent_core.batch import Batch, Options
from tent_core.checked import Checked
from tent_core.control.contract import SessionState
from tent_core.descriptor import PeerKey
from tent_core.errors import (
    ClosedError,
    PermissionDenied,
    RangeError,
    StaleHandle,
    TentError,
    TransportError,
)
from tent_core.memory import Buffer
from tent_core.policy import HOST_MEMORY
from tent_core.remote import Segment
from tent_core.serial import SerialQueue
from tent_core.types import Intent, MemoryKind, Opcode, Permission, Priority, Status
from tent_core.work import Requests

if TYPE_CHECKING:
    from tent_core.engine import Engine

CHANNEL = "tent.staging"
"""What these messages are addressed to, where those of transports have the transport's name."""
MOST_ROWS = 16_384
"""Of one copy: as many as fit into a message of the control plane, with room to spare."""

_ASK = struct.Struct("<cQ")
_LENT = struct.Struct("<IIQ")
_COPY = struct.Struct("<cBBIId")
_ROW = np.dtype("<u8")


class Lent(NamedTuple):
    """What was lent: the id of a buffer, how many slots it has, and their size in bytes."""

    buffer: int
    slots: int
    size: int


class Copy(NamedTuple):
    """A copy that is asked for: between a slot and `rows` of buffer id, generation, address, length (uint64,
    shape (n, 4)), which lie in the slot one behind the other. WRITE goes into the rows. `seconds` is how long
    it may take."""

    opcode: Opcode
    priority: Priority
    slot: int
    seconds: float
    rows: NDArray[np.uint64]


def ask(size: int) -> bytes:
    """The message that asks for slots of so many bytes."""
    return _ASK.pack(b"L", size)


def ask_copy(copy: Copy) -> bytes:
    """The message that asks for a copy."""
    head = _COPY.pack(b"C", copy.opcode, copy.priority, copy.slot, len(copy.rows), copy.seconds)
    return head + copy.rows.astype(_ROW).tobytes()


def read_lent(answer: bytes) -> Lent:
    """What is lent. Raises TransportError for an answer that is none."""
    if len(answer) != _LENT.size:
        raise TransportError(f"the peer lends memory in {len(answer)} bytes that mean nothing")
    return Lent(*_LENT.unpack(answer))


def read_copied(answer: bytes, rows: int) -> tuple[NDArray[np.uint8], str]:
    """The status of each row, and why the first failed one did. Raises TransportError."""
    if len(answer) < rows:
        raise TransportError(f"the peer answers for {len(answer)} of {rows} copies")
    statuses = np.frombuffer(answer, np.uint8, rows)
    return statuses, answer[rows:].decode(errors="replace")


def _read_copy(message: bytes) -> Copy:
    if len(message) < _COPY.size:
        raise TransportError("a copy is asked for in a message that is too short")
    _, opcode, priority, slot, count, seconds = _COPY.unpack_from(message)
    rows = np.frombuffer(message, _ROW, offset=_COPY.size) if count else np.empty(0, _ROW)
    if not 0 < count <= MOST_ROWS or len(rows) != 4 * count or not 0 < seconds < float("inf"):
        raise TransportError(
            f"a copy of {count} rows is asked for in a message that does not hold it"
        )
    try:
        return Copy(
            Opcode(opcode), Priority(priority), slot, seconds, rows.reshape(-1, 4).astype(np.uint64)
        )
    except ValueError as error:
        raise TransportError(f"a copy is asked for that is none: {error}") from None


class Lender:
    """What one engine lends. Thread-safe. `own` waits, and answers the engine's own segment."""

    def __init__(self, engine: Engine, most: int, peers: int, own: Any) -> None:
        """`most`: bytes for each of at most so many peers."""
        self._engine = engine
        self._most = most
        self._peers = peers
        self._own = own
        self._lock = threading.Lock()
        self._lent: dict[PeerKey, tuple[Buffer, Lent]] = {}
        # Threads of their own: two engines may borrow from each other at once, and taking back may take long.
        self._calls = SerialQueue("tent-lending")
        self._takings = SerialQueue("tent-lending-end")

    def asked(self, peer: PeerKey, message: bytes) -> Future[bytes]:
        """The answer to a message; never waits. Raises ClosedError."""
        answer: Future[bytes] = Future()

        def give() -> None:
            try:
                self._give(peer, message, answer)
            except Exception as error:
                why = str(error) if isinstance(error, TentError) else repr(error)
                with suppress(InvalidStateError):
                    answer.set_exception(TransportError(why))

        self._calls.submit(give)
        return answer

    def departed(self, peer: PeerKey) -> None:
        """Take back what the peer has; never waits."""
        with self._lock:
            buffer, _ = self._lent.pop(peer, (None, None))
        if buffer is not None:
            with suppress(ClosedError):  # then all buffers are withdrawn
                self._takings.submit(lambda: self._take_back(buffer))

    def close(self, timeout: float) -> None:
        """End its threads."""
        self._calls.close(timeout)
        self._takings.close(timeout)

    def holdings(self) -> int:
        """How many peers have something."""
        return len(self._lent)

    def _take_back(self, buffer: Buffer) -> None:
        try:
            self._engine.unregister(buffer)
        except TentError as error:
            # It stays alive, and is free when the engine closes.
            self._engine.dispatcher.log.warning(
                "lent_memory_kept", buffer=buffer.name, reason=str(error)
            )

    def _give(self, peer: PeerKey, message: bytes, answer: Future[bytes]) -> None:
        if message[:1] == b"L" and len(message) == _ASK.size:
            _settle(answer, _LENT.pack(*self._lend(peer, _ASK.unpack(message)[1])))
        elif message[:1] == b"C":
            copy = _read_copy(message)
            try:
                self._copy(peer, copy, answer)
            except TentError as error:  # an answer, lest the peer think that it may be under way
                _settle(answer, bytes([Status.FAILED]) * len(copy.rows) + str(error).encode())
        else:
            raise TransportError("a message about staging that means nothing")

    def _lend(self, peer: PeerKey, size: int) -> Lent:
        with self._lock:
            known = self._lent.get(peer)
            full = len(self._lent) >= self._peers
        if known is not None and known[1].size == size:
            return known[1]
        facts = self._engine.dispatcher.planner.facts.values()
        able = [fact.capabilities for fact in facts if fact.capabilities is not None]
        if not any(can.moves(MemoryKind.GPU, MemoryKind.DRAM) for can in able):
            raise TransportError("no transport copies between device memory and host memory there")
        if known is None and full:
            raise TransportError(
                f"memory to stage in is lent to {self._peers} peers already; see staging.lent there"
            )
        count = self._most // size if size else 0
        if not count or known is not None:
            raise TransportError(
                f"slots of {size} bytes are asked for, and {self._most} bytes are lent to each peer: "
                "give both sides the same staging.chunk"
            )
        self._own()
        buffer = self._engine.allocate(
            count * size,
            HOST_MEMORY,
            name=f"{CHANNEL} for {peer.name}",
            permission=Permission.GLOBAL_READ_WRITE,
        )
        lent = Lent(buffer.id, count, size)
        with self._lock:
            self._lent[peer] = (buffer, lent)
        if not any(
            info.key == peer and info.state is not SessionState.DEPARTED
            for info in self._engine.sessions()
        ):
            self.departed(peer)  # while it was being served
            raise TransportError(f"peer {peer} has departed")
        return lent

    def _copy(self, peer: PeerKey, copy: Copy, answer: Future[bytes]) -> None:
        with self._lock:
            known = self._lent.get(peer)
        if known is None:
            raise StaleHandle("nothing is lent to this peer any more: it has to ask again")
        slots, lent = known
        lengths = copy.rows[:, 3]
        total = sum(lengths.tolist())
        if copy.slot >= lent.slots or total > lent.size:
            raise RangeError(f"slot {copy.slot} of {lent.slots} cannot have {total} bytes")
        buffers = self._buffers(copy)
        start = np.uint64(slots.address + copy.slot * lent.size)
        own: Segment = self._own()
        there = own.buffer(slots.name)
        requests = Requests(
            Opcode.READ if copy.opcode is Opcode.WRITE else Opcode.WRITE,  # seen from the buffers
            np.ascontiguousarray(copy.rows[:, 2:]),
            np.stack((start + np.cumsum(lengths) - lengths, lengths), axis=1),
            copy.rows[:, 0].astype(np.int32),
            np.full(len(lengths), there.id, np.int32),
            tuple(buffer.id for buffer in buffers),
            (there.id,),
            {there.id: there.generation},
            total,
        )
        options = Options(copy.seconds, copy.priority, Intent.STAGING_INTERNAL, part=True)
        batch = Checked(own, [(requests, None)], buffers, (there,)).start(options, False)
        batch.add_done_callback(lambda done: _settle(answer, _answer(done)))
        # Cancelled when whoever asked has given up.
        answer.add_done_callback(lambda over: batch.cancel() if over.cancelled() else None)

    def _buffers(self, copy: Copy) -> tuple[Buffer, ...]:
        """The buffers that the rows are in, which permit it. Raises what a mistake of the caller raises."""
        needed = Permission.GLOBAL_READ_ONLY
        if copy.opcode is Opcode.WRITE:
            needed = Permission.GLOBAL_READ_WRITE
        known = {buffer.id: buffer for buffer in self._engine.buffers()}
        found = {}
        for number, generation, address, length in copy.rows.tolist():
            buffer = known.get(number)
            if buffer is None or buffer.generation != generation:
                raise StaleHandle(f"there is no buffer {number} of generation {generation}")
            if buffer.permission < needed:
                raise PermissionDenied(
                    f"buffer {buffer.name!r} permits {buffer.permission.name}; "
                    f"this copy needs {needed.name}"
                )
            inside = (
                buffer.address <= address and address + length <= buffer.address + buffer.length
            )
            if not inside or not length:
                raise RangeError(
                    f"{length} bytes at {address:#x} are not in buffer {buffer.name!r}"
                )
            found[number] = buffer
        return tuple(found.values())


def _settle(answer: Future[bytes], said: bytes) -> None:
    with suppress(InvalidStateError):  # nobody waits for it any more
        answer.set_result(said)


def _answer(batch: Batch) -> bytes:
    cause = "" if (batch.status == Status.COMPLETED).all() else batch.explain_failures()[:4096]
    return batch.status.tobytes() + cause.encode()
