"""A batch of requests as messages of the protocol: where it is cut, and the iovecs of each message."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from tent_core.descriptor import BufferDescriptor
from tent_core.types import Opcode
from tent_core.work import Requests
from tent_tcp.protocol import MAX_REQUESTS, build_request
from tent_tcp.vectors import Pieces, Vector, address_of

MESSAGE_BYTES = 32 << 20
"""A message ends before it exceeds this, unless its only block does: what one refusal costs at most."""

_numbers = itertools.count(1)


class Generations:
    """The generation of each of a peer's buffers, by id. A large id takes no more room than a small one."""

    def __init__(self, buffers: Mapping[int, BufferDescriptor]) -> None:
        self._by_id = {b.id: b.generation for b in buffers.values()}
        self._ids = np.array(sorted(self._by_id), np.int64)
        self._values = np.array([self._by_id[i] for i in self._ids.tolist()], np.uint64)

    def unknown(self, ids: Iterable[int]) -> list[int]:
        """Those of `ids` that are no buffers of the peer."""
        return [i for i in ids if i not in self._by_id]

    def of(self, requests: Requests, start: int, stop: int) -> int | NDArray[np.uint64]:
        """By request in [start, stop), or one for all. None may be of an unknown buffer."""
        if len(requests.remote_used) == 1:
            return self._by_id[requests.remote_used[0]]
        return self._values[self._ids.searchsorted(requests.remote_ids[start:stop])]


class Message:
    """The requests [start, stop) of a batch as one message. It never changes and may be sent many times.

    `number` comes back in the answer, `total` is the payload in bytes.
    """

    __slots__ = (
        "_head",
        "_incoming",
        "_outgoing",
        "_outgoing_size",
        "number",
        "opcode",
        "start",
        "stop",
        "total",
    )

    def __init__(
        self, requests: Requests, start: int, stop: int, total: int, generations: Generations
    ) -> None:
        self.opcode = requests.opcode
        self.start, self.stop, self.total = start, stop, total
        self.number = next(_numbers)
        local = requests.local[start:stop]
        head = build_request(
            requests.opcode,
            self.number,
            total,
            requests.remote_ids[start:stop],
            generations.of(requests, start, stop),
            requests.remote[start:stop],
        )
        self._head = head  # the iovecs point into it
        self._incoming: Pieces | None = None
        if requests.opcode == Opcode.WRITE:
            pieces = np.empty((len(local) + 1, 2), np.uint64)
            pieces[1:] = local
            self._outgoing_size = head.nbytes + total
        else:
            pieces = np.empty((1, 2), np.uint64)
            self._incoming = np.ascontiguousarray(local)
            self._outgoing_size = head.nbytes
        pieces[0] = (address_of(head), head.nbytes)
        self._outgoing = pieces

    def outgoing(self) -> Vector:
        """What goes to the receiver: the request and, for a WRITE, the blocks."""
        return Vector(self._outgoing, self._outgoing_size)

    def incoming(self) -> Vector:
        """Where the payload of a READ belongs."""
        assert self._incoming is not None
        return Vector(self._incoming, self.total)

    @property
    def outgoing_size(self) -> int:
        """Bytes of `outgoing`."""
        return self._outgoing_size


def split(
    requests: Requests, generations: Generations, start: int = 0, stop: int | None = None
) -> Iterator[Message]:
    """The requests [start, stop) as messages, each made when it is asked for."""
    if stop is None:
        stop = len(requests)
    if start == 0 and stop == len(requests) <= MAX_REQUESTS and requests.total <= MESSAGE_BYTES:
        yield Message(requests, 0, stop, requests.total, generations)
        return
    ends = np.cumsum(requests.local[start:stop, 1], dtype=np.int64)
    first, done = 0, 0
    while first < stop - start:
        fit = int(ends.searchsorted(done + MESSAGE_BYTES, "right"))
        last = min(max(fit, first + 1), first + MAX_REQUESTS)
        end = int(ends[last - 1])
        yield Message(requests, start + first, start + last, end - done, generations)
        first, done = last, end
