"""The seam to verbs: all that the plugin asks of an RDMA device, and nothing more.

`tent_rdma.by_pyverbs` is the real one. Everything else in the package takes a `Verbs`, so that a stand-in of
the same shape (`tent_mock.verbs`) can count and fail without hardware. Addresses, lengths and keys are plain
integers, lengths in bytes; the columns of `QueuePair.post` are `uint64`.

Threads: a device, its registrations and its queue pairs may be made and closed from any thread, one call at a
time for each object; `QueuePair.post` and `CompletionQueue.poll` each from one thread at a time. libibverbs
itself takes locks of its own; pyverbs holds the GIL in every call, so nothing here may be asked to wait:
sleeping is done on the descriptors (`Channel.fileno`, `Device.fileno`), which poll(2) takes.
"""

from __future__ import annotations

import enum
import errno
import os
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tent_core.errors import TransportError
from tent_core.types import Opcode

Columns = NDArray[np.uint64]
"""Shape (n, 5), one row per work request: local address, lkey, remote address, rkey, length in bytes."""

SUCCESS, FLUSHED = 0, 5
"""IBV_WC_SUCCESS, and IBV_WC_WR_FLUSH_ERR: the queue pair was in error before this one's turn came."""

REMOTE_ACCESS = 10
"""IBV_WC_REM_ACCESS_ERR: the peer's NIC does not take the key, for this range or at all."""

OWN_FAULT = frozenset({1, 4, 8, 9, REMOTE_ACCESS, 11})
"""Statuses that are the request's fault and not the rail's: its key, its range, its permission. Not 2, a
local queue pair operation error: soft-RoCE says it of a port that is down."""

STATUS_NAMES = (
    "success",
    "local length error",
    "local queue pair operation error",
    "local end-to-end context error",
    "local protection error",
    "flushed",
    "memory window bind error",
    "bad response",
    "local access error",
    "remote invalid request",
    "remote access error",
    "remote operation error",
    "transport retries exceeded",
    "receiver not ready, retries exceeded",
    "local RDD violation",
    "remote invalid RD request",
    "remote aborted",
    "invalid end-to-end context number",
    "invalid end-to-end context state",
    "fatal error",
    "response time-out",
    "general error",
)
"""Of a completion, by its number (enum ibv_wc_status, ibv_poll_cq(3))."""


class VerbsError(TransportError):
    """A verb failed. `errno` is what the library answered, 0 where it said nothing."""

    def __init__(self, what: str, number: int) -> None:
        reason = os.strerror(number) if number else "the library gave no reason"
        super().__init__(f"{what}: {reason}")
        self.errno = number

    def advised(self, advice: str) -> VerbsError:
        """The same error with what to do about it."""
        if not advice:
            return self
        said = VerbsError("", self.errno)
        said.args = (f"{self}; {advice}",)
        said.__cause__ = self
        return said

    @property
    def scarce(self) -> bool:
        """Whether it failed for lack of a resource that closing something else may give back."""
        return self.errno in (errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EMFILE, errno.ENFILE)


class Event(enum.Enum):
    """What a device says of itself, unasked."""

    PORT_ACTIVE = "port active"
    PORT_DOWN = "port down"
    ADDRESS_CHANGED = "address changed"
    FATAL = "device fatal"
    QUEUE_PAIR = "a queue pair failed"
    OTHER = "other"


class Completion(NamedTuple):
    """How a signalled work request ended, and with it all that were posted before it on its queue pair."""

    wr_id: int
    status: int
    length: int
    """Bytes received; only of a receive that succeeded."""
    queue_pair: int
    """Number of the queue pair, unique on its device."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device can do (ibv_query_device(3))."""

    max_registration: int
    """Bytes of one registration."""
    max_registrations: int
    max_queue_pairs: int
    max_work_requests: int
    """Outstanding on one queue."""
    max_completions: int
    """Entries of a completion queue."""
    max_reads: int
    """RDMA READs and atomics outstanding on one queue pair, as requester and as responder."""


@dataclass(frozen=True, slots=True)
class PortState:
    """A port as it is now. `mtu` is in bytes; `lid` is 0 on Ethernet."""

    active: bool
    ethernet: bool
    lid: int
    mtu: int


@dataclass(frozen=True, slots=True)
class Route:
    """What a queue pair has to know of its other end, and how its packets are marked.

    `gid` is text as ibv_devinfo shows it; `gid_index` is the local one. `timeout` is the exponent of the time
    for an acknowledgement, 4.096 microseconds * 2^timeout (14 is 67 ms); `retries` is at most 7.
    """

    port: int
    gid_index: int
    gid: str
    lid: int
    number: int
    psn: int
    mtu: int
    service_level: int = 0
    traffic_class: int = 0
    timeout: int = 14
    retries: int = 7
    reads: int = 1
    """RDMA READs outstanding, the lesser of both sides' limits."""


class Registration(Protocol):
    """Pinned memory. Work requests name address `iova` + offset for the byte at that offset."""

    lkey: int
    rkey: int
    iova: int
    length: int

    def close(self) -> None:
        """Unpin. Idempotent; raises VerbsError, and then it may be asked again."""
        ...


class Channel(Protocol):
    """Where armed completion queues say that something has completed."""

    def fileno(self) -> int:
        """Readable when an event waits."""
        ...

    def take(self, queue: CompletionQueue) -> None:
        """Take (and acknowledge) one event of `queue`; only when `fileno` is readable."""
        ...

    def close(self) -> None: ...


class CompletionQueue(Protocol):
    """Where work requests say how they ended."""

    def poll(self, limit: int) -> list[Completion]:
        """Up to `limit` completions that are there, oldest first; never waits."""
        ...

    def arm(self) -> None:
        """Ask for one event at the next completion. Poll once more after it, or one may be missed."""
        ...

    def close(self) -> None: ...


class QueuePair(Protocol):
    """A reliable connection, made in RESET and brought to INIT; `number` is its own."""

    number: int

    def connect(self, route: Route, psn: int) -> None:
        """To RTR and RTS: it receives and sends from now on. `psn` is the first of ours (24 bits)."""
        ...

    def post(self, opcode: Opcode, columns: Columns, wr_id: int) -> None:
        """Post one-sided requests, in order, the last one signalled with `wr_id`; none if this raises."""
        ...

    def post_send(self, wr_id: int, address: int, lkey: int, length: int) -> None:
        """Post a signalled SEND."""
        ...

    def post_receive(self, wr_id: int, address: int, lkey: int, length: int) -> None:
        """Post room for one SEND of the other end."""
        ...

    def to_error(self) -> None:
        """To ERR: what is outstanding completes as FLUSHED, in order, and nothing is sent any more."""
        ...

    def close(self) -> None:
        """Destroy. Idempotent; raises VerbsError, and then it may be asked again."""
        ...


class Device(Protocol):
    """An open device with a protection domain."""

    name: str
    limits: Limits

    def port(self, number: int) -> PortState: ...

    def register(
        self, address: int, length: int, *, remote_read: bool, remote_write: bool
    ) -> Registration:
        """Pin memory of this process; its `iova` is its address. ENOMEM: over the memlock limit."""
        ...

    def register_dmabuf(
        self, fd: int, offset: int, length: int, *, remote_read: bool, remote_write: bool
    ) -> Registration:
        """Register device memory that its driver exported; ENOTSUP where this library cannot."""
        ...

    def channel(self) -> Channel: ...

    def completion_queue(self, depth: int, channel: Channel | None = None) -> CompletionQueue: ...

    def queue_pair(
        self,
        port: int,
        sends: CompletionQueue,
        receives: CompletionQueue,
        *,
        send_depth: int,
        receive_depth: int = 1,
        remote_read: bool = True,
        remote_write: bool = True,
    ) -> QueuePair:
        """A queue pair in INIT. What peers may do by it is bounded by the registrations as well."""
        ...

    def fileno(self) -> int:
        """Readable when `next_event` has one."""
        ...

    def next_event(self) -> Event:
        """Take one asynchronous event; only when `fileno` is readable."""
        ...

    def close(self) -> None:
        """Close domain and device; everything made of it must be closed before."""
        ...


class Verbs(Protocol):
    """The library."""

    def devices(self) -> list[str]:
        """Names of the devices that user space can open. Raises VerbsError when the kernel has no verbs."""
        ...

    def open(self, name: str) -> Device: ...
