"""A batch of requests as messages of the protocol: where it is cut, and the iovecs of each message."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tent_core.types import Opcode
from tent_core.work import Requests
from tent_tcp.protocol import (
    MAX_REQUESTS,
    REQUEST_SIZE,
    build_request,
    pack_ok,
    request_words,
)
from tent_tcp.syscalls import MessageHeader
from tent_tcp.vectors import IOVEC_SIZE, Piece, Vector, address_of

MESSAGE_BYTES = 32 << 20
"""A message ends before it exceeds this, unless its only block does: what one refusal costs at most."""

SHORT_BYTES = 128 << 10
"""A message of one block of up to this size is short: it is sent, and mostly answered, in one call each."""

_numbers = itertools.count(1)


def generations_of(requests: Requests, start: int, stop: int) -> int | NDArray[np.uint64]:
    """The generation of the buffer of each request in [start, stop), or one for all of them."""
    known, used = requests.remote_generations, requests.remote_used
    if len(used) == 1:
        return known[used[0]]
    ids = np.array(sorted(used), np.int64)  # which may be any numbers
    generations = np.array([known[i] for i in ids.tolist()], np.uint64)
    return generations[ids.searchsorted(requests.remote_ids[start:stop])]


class Short:
    """What a message of one short block needs to be sent as a whole, and what answers it if all went well.

    `header` is the address of a MessageHeader, `lead` comes before the payload of a READ, and `verdict` after
    it or alone. `payload` is the address of the block here.
    """

    __slots__ = ("_header", "header", "lead", "payload", "verdict")

    def __init__(self, number: int, total: int, payload: int, pieces: int, count: int) -> None:
        self._header = MessageHeader(pieces=pieces, count=count)
        self.header = ctypes.addressof(self._header)
        self.lead = pack_ok(number, 0)
        self.verdict = pack_ok(number, total)
        self.payload = payload


class Message:
    """The requests [start, stop) of a batch as one message. It never changes and may be sent many times.

    `number` comes back in the answer, `total` is the payload in bytes, `size` that of `outgoing`. `short` is
    there for one short block.
    """

    __slots__ = (
        "_head",
        "_pieces",
        "_pieces_count",
        "_requests",
        "number",
        "opcode",
        "short",
        "size",
        "start",
        "stop",
        "total",
    )

    def __init__(self, requests: Requests, start: int, stop: int, total: int) -> None:
        self.opcode = requests.opcode
        self.start, self.stop, self.total = start, stop, total
        self.number = next(_numbers)
        self._requests = requests  # READ: the iovecs are its local column
        self.short: Short | None = None
        if stop - start == 1:
            self._build_one()
        else:
            self._build_many()

    def _build_one(self) -> None:
        """Head and iovecs in one array: a block alone is not worth an array operation."""
        requests, start = self._requests, self.start
        buffer = int(requests.remote_ids[start])
        generation = requests.remote_generations[buffer]
        row = (buffer, generation, int(requests.remote[start, 0]), self.total)
        head = (ctypes.c_uint64 * 12)(*request_words(self.opcode, self.number, row))
        address = ctypes.addressof(head)
        head[8], head[9] = address, REQUEST_SIZE
        payload = head[10] = int(requests.local[start, 0])
        head[11] = self.total
        self._head: object = head
        self._pieces = address + 64
        self._set_size(REQUEST_SIZE, 1)
        if self.total <= SHORT_BYTES:
            count = self._pieces_count
            self.short = Short(self.number, self.total, payload, self._pieces, count)

    def _build_many(self) -> None:
        requests, start, stop = self._requests, self.start, self.stop
        head = build_request(
            self.opcode,
            self.number,
            self.total,
            requests.remote_ids[start:stop],
            generations_of(requests, start, stop),
            requests.remote[start:stop],
        )
        write = self.opcode == Opcode.WRITE
        pieces = np.empty((stop - start + 1 if write else 1, 2), np.uint64)
        pieces[0] = (address_of(head), head.nbytes)
        if write:
            pieces[1:] = requests.local[start:stop]
        self._head = (head, pieces)
        self._pieces = address_of(pieces)
        self._set_size(head.nbytes, stop - start)

    def _set_size(self, head_size: int, blocks: int) -> None:
        write = self.opcode == Opcode.WRITE
        self._pieces_count = 1 + blocks if write else 1
        self.size = head_size + self.total if write else head_size

    def outgoing(self) -> Vector:
        """What goes to the receiver: the request and, for a WRITE, the blocks."""
        return Vector(self._pieces, self._pieces_count, self.size, self._head)

    def incoming(self) -> Vector | Piece:
        """Where the payload of a READ belongs."""
        local = self._requests.local
        if self.stop - self.start == 1:
            return Piece(int(local[self.start, 0]), self.total)
        first = address_of(local) + IOVEC_SIZE * self.start
        return Vector(first, self.stop - self.start, self.total, local)


def messages_of(requests: Requests) -> Iterator[Message]:
    """All of the requests as messages; those of requests that were prepared are made once and kept there."""
    if not requests.reused:
        return split(requests)
    kept = requests.derived
    if not isinstance(kept, tuple):
        kept = requests.derived = tuple(split(requests))
    return iter(kept)


def split(requests: Requests, start: int = 0, stop: int | None = None) -> Iterator[Message]:
    """The requests [start, stop) as messages, each made when it is asked for."""
    if stop is None:
        stop = len(requests)
    if start == 0 and stop == len(requests) <= MAX_REQUESTS and requests.total <= MESSAGE_BYTES:
        yield Message(requests, 0, stop, requests.total)
        return
    ends = np.cumsum(requests.local[start:stop, 1], dtype=np.int64)
    first, done = 0, 0
    while first < stop - start:
        fit = int(ends.searchsorted(done + MESSAGE_BYTES, "right"))
        last = min(max(fit, first + 1), first + MAX_REQUESTS)
        end = int(ends[last - 1])
        yield Message(requests, start + first, start + last, end - done)
        first, done = last, end
