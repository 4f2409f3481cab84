"""One accepted stream: a state machine that takes what has arrived, and never waits."""

from __future__ import annotations

import math
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tent_tcp.protocol import (
    ANSWER_SIZE,
    HELLO_SIZE,
    MAX_NAME,
    READ,
    REQUEST_SIZE,
    ROW_SIZE,
    STREAM_SIZE,
    WRITE,
    Columns,
    Malformed,
    Request,
    Rows,
    Verdict,
    check_lengths,
    pack_answer,
    pack_ok,
    parse_hello,
    parse_request,
    secrets_match,
)
from tent_tcp.receiver.owner import Fault, Owner
from tent_tcp.receiver.payload import Bin, Mapped, Owned, Payload, Scratch
from tent_tcp.receiver.registry import Admission, Registry
from tent_tcp.syscalls import MORE, NOW
from tent_tcp.tuning import tune_for_one_machine
from tent_tcp.vectors import WOULD_BLOCK, EndOfStream, Piece

TURN_BYTES = 256 << 10
"""About what one stream moves before the others have their turn: what a small request waits for, for each
stream with bulk."""

_SHORT = 128 << 10
"""A block alone of up to this size is mostly there as a whole, or is sent as a whole."""

_MESSAGE_COST = 32 << 10
"""What a message counts for beside its bytes: they take about the same time."""

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT

_REASONS = {
    Verdict.UNKNOWN_BUFFER: "there is no such buffer",
    Verdict.STALE_BUFFER: "that registration is gone, and its id belongs to another",
    Verdict.REVOKED: "its owner has withdrawn it",
    Verdict.DENIED: "its permission forbids this",
    Verdict.OUT_OF_RANGE: "the block does not lie inside it",
}


@dataclass(slots=True)
class Desk:
    """What all connections of a receiver share."""

    secret: bytes
    registry: Registry
    owner: Owner
    scratch: Scratch
    handshake_s: float
    stall_s: float
    socket_buffer: int


@dataclass(slots=True)
class Task:
    """A request that is being carried out."""

    request: Request
    columns: Columns | None  # None: the one block is in the request
    payload: Payload
    verdict: Verdict = Verdict.OK
    position: int = 0
    text: str = ""
    moved: int = 0

    def uses(self, buffer: int) -> bool:
        """Whether any of its blocks lies in that buffer."""
        if self.columns is None:
            return self.request.row[0] == buffer
        return bool((self.columns[0] == buffer).any())


class Connection:
    """One accepted stream, without its place in the event loop.

    `turn` goes on with what has arrived. `deadline` is when it must have made progress, `peer` is who it said
    it is (name, incarnation), None until its secret was right, and `identity` what it calls the stream.
    `between` says that the last message was answered, and that nothing of the next one has come.
    """

    def __init__(self, stream: socket.socket, desk: Desk, now: float) -> None:
        self.stream = stream
        self.peer: tuple[str, bytes] | None = None
        self.identity = b""
        self.deadline = now + desk.handshake_s
        self.events = _IN
        self.between = False
        self._desk = desk
        self._descriptor = stream.fileno()
        self._receive_into = stream.recv_into
        self._head = memoryview(bytearray(max(HELLO_SIZE, MAX_NAME + STREAM_SIZE)))
        self._head_of_request = self._head[:REQUEST_SIZE]
        self._got = 0  # bytes of the current fixed-size part
        self._step: Callable[[], bool] = self._take_hello
        self._name_size = 0
        self._incarnation = b""
        self._request: Request | None = None
        self._rows: Rows = np.empty((0, 4), np.uint64)
        self._task: Task | None = None
        self._reply = b""
        self._after: Callable[[], bool] = self._take_request
        self._flags = NOW
        self._moved = 0

    def turn(self, now: float) -> int:
        """Carry on until the stream has nothing more, or its share is used up: the epoll events to wait for.

        Raises Malformed for a peer that breaks the rules, EndOfStream and OSError when the stream is over,
        and OwnerGone.
        """
        self.events = _IN
        self._moved = 0
        while self._step():
            if self._moved > TURN_BYTES:
                self.events = _OUT if self._step in (self._give_payload, self._send_reply) else _IN
                break
        if self.peer is not None:
            self.between = self._step == self._take_request and self._got == 0
            self.deadline = math.inf if self.between else now + self._desk.stall_s
        return self.events

    def revoke(self, buffer: int) -> None:
        """Touch that buffer no more: what still comes for it is dropped, what is still to go are zeros."""
        task = self._task
        if task is not None and task.verdict is Verdict.OK and task.uses(buffer):
            self._refuse(task, Verdict.REVOKED, 0, f"{_REASONS[Verdict.REVOKED]} (buffer {buffer})")

    def describe(self) -> dict[str, Any]:
        """Who is at the other end, for the log."""
        try:
            host, port, *_ = self.stream.getpeername()
            source = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        except OSError:
            source = "unknown"
        return {"source": source, "peer": self.peer[0] if self.peer else ""}

    # ---------------------------------------------------------------- the steps: True means go on at once

    def _take_hello(self) -> bool:
        if not self._fill(self._head, HELLO_SIZE):
            return False
        hello = parse_hello(bytes(self._head[:HELLO_SIZE]))
        if not secrets_match(hello.secret, self._desk.secret):
            raise Malformed("wrong secret: its descriptor is of another engine, or it guesses")
        if hello.same_machine:
            tune_for_one_machine(self.stream)
        self._incarnation, self._name_size = hello.incarnation, hello.name_size
        self._step = self._take_name
        return True

    def _take_name(self) -> bool:
        if not self._fill(self._head, self._name_size + STREAM_SIZE):
            return False
        said = bytes(self._head[: self._name_size + STREAM_SIZE])
        try:
            name = said[: self._name_size].decode()
        except UnicodeDecodeError:
            raise Malformed("a name that is no text") from None
        self.identity = said[self._name_size :]
        self.peer = (name, self._incarnation)
        return self._answer(pack_answer(Verdict.OK, 0))

    def _take_request(self) -> bool:
        if not self._fill(self._head, REQUEST_SIZE):
            return False
        request = parse_request(self._head_of_request)
        self._moved += _MESSAGE_COST
        if request.blocks == 1:
            return self._begin_one(request)
        self._request = request
        self._rows = np.empty((request.blocks, 4), np.uint64)
        self._rows[0] = request.row
        self._step = self._take_rows
        return True

    def _take_rows(self) -> bool:
        request, rows = self._request, self._rows
        assert request is not None
        if not self._fill(rows[1:].data.cast("B"), ROW_SIZE * (request.blocks - 1)):
            return False
        columns = rows.T.copy()  # array operations on strided columns take twice as long
        check_lengths(columns[3], request.total)
        admission = self._desk.registry.admit(request.opcode, columns, request.total)
        return self._begin(request, columns, admission)

    def _begin_one(self, request: Request) -> bool:
        registry, opcode, total = self._desk.registry, request.opcode, request.total
        if total <= _SHORT:
            _, address, memory = registry.find(opcode, request.row)
            if memory is not None:
                short = self._take_short if opcode == WRITE else self._give_short
                return short(request, address, memory)
        return self._begin(request, None, registry.admit_one(opcode, request.row))

    def _take_short(self, request: Request, address: int, memory: memoryview) -> bool:
        """A short WRITE into mapped memory: what is there of it in one call, and mostly that is all."""
        total = request.total
        try:
            moved = self._receive_into(memory, total, NOW)
        except OSError:  # the next call says why
            moved = 0
        if moved == total:
            self._desk.owner.check()
            self._moved += total
            return self._answer(pack_ok(request.number, total))
        payload = Piece(address, total)
        payload.advance(moved)
        self._task = Task(request, None, Mapped(payload), moved=moved)
        self._step = self._take_payload
        return True

    def _give_short(self, request: Request, address: int, memory: memoryview) -> bool:
        """A short READ from mapped memory: lead, payload and verdict in one call, if there is room."""
        total = request.total
        lead, verdict = pack_ok(request.number, 0), pack_ok(request.number, total)
        try:
            sent = self.stream.sendmsg((lead, memory, verdict), (), NOW)
        except OSError:  # the next call says why
            sent = 0
        left = 2 * ANSWER_SIZE + total - sent
        self._moved += sent
        if left == 0:
            self._step = self._take_request
            return True
        if left <= ANSWER_SIZE:
            return self._answer(verdict[-left:])
        payload = Piece(address, total)
        payload.advance(max(0, sent - ANSWER_SIZE))
        self._task = Task(request, None, Mapped(payload), moved=total - payload.left)
        return self._answer(lead[sent:], self._give_payload)

    def _begin(self, request: Request, columns: Columns | None, admission: Admission) -> bool:
        desk, vector = self._desk, admission.vector
        if vector is None:
            buffer = request.row[0] if columns is None else int(columns[0, admission.position])
            text = f"{_REASONS[admission.verdict]} (buffer {buffer})"
            if request.opcode == READ:
                return self._answer(
                    pack_answer(
                        admission.verdict, request.number, position=admission.position, text=text
                    )
                )
            payload: Payload = Bin(request.total, desk.scratch)
            self._task = Task(
                request, columns, payload, admission.verdict, admission.position, text
            )
        else:
            payload = (
                Mapped(vector) if admission.mapped else Owned(vector, desk.owner, desk.scratch)
            )
            self._task = Task(request, columns, payload)
        if request.opcode == WRITE:
            self._step = self._take_payload
            return True
        return self._answer(pack_answer(Verdict.OK, request.number), self._give_payload)

    def _take_payload(self) -> bool:
        task = self._task
        assert task is not None
        try:
            moved = task.payload.take(self._descriptor)
        except Fault as fault:
            self._refuse(task, Verdict.FAILED, 0, str(fault))
            return True if task.payload.left else self._conclude(task)
        if moved == WOULD_BLOCK:
            return False
        self._moved += moved
        task.moved += moved
        return self._conclude(task) if task.payload.left == 0 else True

    def _give_payload(self) -> bool:
        task = self._task
        assert task is not None
        try:
            moved = task.payload.give(self._descriptor, MORE)
        except Fault as fault:
            self._refuse(task, Verdict.FAILED, 0, str(fault))
            return True
        if moved == WOULD_BLOCK:
            self.events = _OUT
            return False
        self._moved += moved
        task.moved += moved
        return self._conclude(task) if task.payload.left == 0 else True

    def _conclude(self, task: Task) -> bool:
        self._task = None
        if task.request.opcode == WRITE:
            self._desk.owner.check()  # what arrived where nobody is any more did not arrive
        moved = task.moved if task.verdict is Verdict.OK else 0
        number = task.request.number
        return self._answer(
            pack_answer(task.verdict, number, moved=moved, position=task.position, text=task.text)
        )

    def _refuse(self, task: Task, verdict: Verdict, position: int, text: str) -> None:
        task.payload = Bin(task.payload.left, self._desk.scratch)
        task.verdict, task.position, task.text = verdict, position, text

    def _answer(self, reply: bytes, after: Callable[[], bool] | None = None) -> bool:
        self._reply = reply
        self._after = after or self._take_request
        self._flags = NOW if after is None else NOW | MORE
        self._step = self._send_reply
        return self._send_reply()

    def _send_reply(self) -> bool:
        try:
            sent = self.stream.send(self._reply, self._flags)
        except (BlockingIOError, InterruptedError):
            sent = 0
        if sent < len(self._reply):
            self._reply = self._reply[sent:]
            self.events = _OUT
            return False
        self._step = self._after
        return True

    def _fill(self, part: memoryview, size: int) -> bool:
        """Take what is missing of the first `size` bytes of a part; True when they are complete."""
        got = self._got
        try:
            moved = self._receive_into(part[got:size], size - got, NOW)
        except (BlockingIOError, InterruptedError):
            return False
        if moved == 0:
            raise EndOfStream
        self._got = (got + moved) % size
        return got + moved == size
