"""Connections of the library by host id: who makes one, who waits, and which ranges its keys cover.

`Connections` decides, without a clock, a thread or the library; `Registry` waits and calls.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

from tent_core.descriptor import BufferDescriptor
from tent_core.errors import TransportError
from tent_core.types import BufferState
from tent_mpcomm.adapter import Range
from tent_mpcomm.attribute import HandshakeAddress

RangeId = tuple[int, int]
"""Buffer id and registration generation: the same address registered again is another range."""


class State(enum.Enum):
    """How far a connection is. One that was made is never made again under its host id."""

    CONNECTING = "connecting"
    CONNECTED_NO_KEYS = "connected, no keys"
    READY = "ready"


class Next(enum.Enum):
    """What a caller is to do."""

    GO = "go"
    """Every range is covered."""
    WAIT = "wait"
    """Somebody is at work on it; ask again when that has ended."""
    CONNECT = "connect"
    QUERY = "query"
    VERIFY = "verify"
    """See whether it is what it was: its peer comes back after it was let go of."""
    MISSING = "missing"
    """A query that began after this caller came has not covered what it wants."""


class Connection:
    """The library's record of one host, as far as it is known here. Changed by `Connections` alone.

    `covered` may be read by any thread at any time: it is replaced, never changed.
    """

    __slots__ = ("address", "answered", "asked", "covered", "doubted", "host_id", "owner", "state")

    def __init__(self, host_id: str) -> None:
        self.host_id = host_id
        self.address: HandshakeAddress | None = None
        """Where it was connected to; keys are asked for there as long as it lives."""
        self.state = State.CONNECTING
        self.covered: frozenset[RangeId] = frozenset()
        self.owner: int | None = None
        """The generation of the caller that is at work on it."""
        self.doubted = False
        """Whether it was let go of, so that what is at the other side now may be something else."""
        self.asked = 0
        self.answered = 0
        """Queries that were begun; the newest of them that was answered."""

    def covers(self, ranges: AbstractSet[RangeId]) -> bool:
        """Whether the library holds keys for all of these."""
        return ranges <= self.covered


class Connections:
    """The decisions. Not thread-safe, never blocks."""

    def __init__(self) -> None:
        self._known: dict[str, Connection] = {}
        self._generation = 0

    def __len__(self) -> int:
        """How many the library holds, or is about to."""
        return len(self._known)

    def get(self, host_id: str) -> Connection | None:
        """The connection to a host id, in whatever state."""
        return self._known.get(host_id)

    def asked(self, host_id: str) -> int:
        """How many queries were begun: what a caller notes when it comes."""
        connection = self._known.get(host_id)
        return 0 if connection is None else connection.asked

    def decide(
        self, host_id: str, wanted: AbstractSet[RangeId], since: int
    ) -> tuple[Next, Connection, int]:
        """What to do for these ranges, and if that is work the generation that owns the connection now.

        `since` is what `asked` said when the caller came.
        """
        connection = self._known.get(host_id)
        if connection is None:
            connection = self._known[host_id] = Connection(host_id)
            return Next.CONNECT, connection, self._own(connection)
        covered = connection.state is State.READY and connection.covers(wanted)
        if covered and not connection.doubted:
            return Next.GO, connection, 0
        if connection.owner is not None:
            return Next.WAIT, connection, 0
        if covered:
            return Next.VERIFY, connection, self._own(connection)
        if connection.answered > since:
            return Next.MISSING, connection, 0
        connection.asked += 1
        return Next.QUERY, connection, self._own(connection)

    def connected(self, connection: Connection, generation: int, address: HandshakeAddress) -> bool:
        """The owner has made it, to this address, and goes on to query; False if it is the owner no more.

        The library has it all the same, so that it is kept, unless a newer owner is making its own.
        """
        if not self._owned(connection, generation):
            if connection.host_id not in self._known:
                connection.address = address
                connection.state = State.CONNECTED_NO_KEYS
                self._known[connection.host_id] = connection
            return False
        connection.address = address
        connection.state = State.CONNECTED_NO_KEYS
        connection.asked += 1
        return True

    def answered(
        self, connection: Connection, generation: int, covered: Collection[RangeId]
    ) -> None:
        """The owner's query was answered: these ranges have keys now, and no others."""
        if self._owned(connection, generation):
            connection.owner = None
            connection.state = State.READY
            connection.doubted = False
            connection.covered = frozenset(covered)
            connection.answered = connection.asked

    def verified(self, connection: Connection, generation: int) -> None:
        """It is what it was, and its keys are as good as they were."""
        if self._owned(connection, generation):
            connection.owner = None
            connection.doubted = False

    def doubt(self, host_id: str) -> None:
        """Nobody watches its peer any more; the next use has to verify it."""
        connection = self._known.get(host_id)
        if connection is not None:
            connection.doubted = True

    def failed(self, connection: Connection, generation: int) -> None:
        """The owner has given up. What was connected stays, with the keys that it had; else nothing does."""
        if self._owned(connection, generation):
            connection.owner = None
            if connection.state is State.CONNECTING:
                del self._known[connection.host_id]

    def take_over(self, host_id: str) -> None:
        """Whoever owns it does so no more: what it does later changes nothing. One not made yet is gone."""
        connection = self._known.get(host_id)
        if connection is not None and connection.owner is not None:
            self.failed(connection, connection.owner)

    def _own(self, connection: Connection) -> int:
        self._generation += 1
        connection.owner = self._generation
        return self._generation

    def _owned(self, connection: Connection, generation: int) -> bool:
        return connection.owner == generation and self._known.get(connection.host_id) is connection


def coverage(
    buffers: Mapping[int, BufferDescriptor], replied: Iterable[Range]
) -> frozenset[RangeId]:
    """The live buffers of a snapshot whose whole memory the library was given keys for.

    The snapshot has to be older than the reply. An owner publishes memory before it publishes the descriptor,
    so that what a snapshot has, and a later reply has at its address, is that registration or a newer one.
    """
    ranges = [(r.address, r.address + r.length) for r in replied]
    exact = dict(ranges)
    return frozenset(
        (b.id, b.generation)
        for b in buffers.values()
        if b.state is BufferState.LIVE
        and (
            exact.get(b.address, 0) >= b.end
            or any(start <= b.address and b.end <= end for start, end in ranges)
        )
    )


class Calls(Protocol):
    """What may block, made by the owner of a connection. Raises TransportError."""

    def connect(self) -> HandshakeAddress:
        """Make the connection; where to."""
        ...

    def query(self, address: HandshakeAddress) -> Collection[RangeId]:
        """Fetch the keys anew; the ranges that they cover."""
        ...

    def verify(self) -> None:
        """Make sure that the peer is what was connected to."""
        ...


class Registry:
    """Single flight over `Connections`. Thread-safe; its lock is a leaf, held during no call.

    Of the calls for one host id one is made at a time.
    """

    def __init__(self) -> None:
        self._connections = Connections()
        self._changed = threading.Condition(threading.Lock())

    def __len__(self) -> int:
        return len(self._connections)

    def get(self, host_id: str) -> Connection | None:
        """The connection to a host id, if there is one."""
        with self._changed:
            return self._connections.get(host_id)

    def ready(
        self,
        host_id: str,
        wanted: AbstractSet[RangeId],
        *,
        calls: Calls,
        deadline: float,
    ) -> Connection:
        """A connection with keys to all of `wanted`, made or asked for keys now if need be.

        `deadline` is on `time.monotonic()`. Raises what `calls` raise in this thread, and TransportError when
        the peer does not publish a range, or another thread has not ended in time.
        """
        since: int | None = None
        while True:
            with self._changed:
                if since is None:
                    since = self._connections.asked(host_id)
                step, connection, generation = self._connections.decide(host_id, wanted, since)
                if step is Next.WAIT and not self._changed.wait(deadline - time.monotonic()):
                    raise TransportError(
                        f"another thread is still connecting MPComm to {host_id} "
                        f"({connection.state.value}); try again"
                    )
            if step is Next.GO:
                return connection
            if step is Next.MISSING:
                raise TransportError(_missing(host_id, wanted, connection))
            if step is not Next.WAIT:
                self._work(step, connection, generation, calls)

    def _work(self, step: Next, connection: Connection, generation: int, calls: Calls) -> None:
        covered: Collection[RangeId] | None = None
        try:
            if step is Next.VERIFY:
                calls.verify()
            else:
                if step is Next.CONNECT:
                    address = calls.connect()
                    with self._changed:
                        if not self._connections.connected(connection, generation, address):
                            return
                assert connection.address is not None
                covered = calls.query(connection.address)
        except BaseException:
            with self._changed:
                self._connections.failed(connection, generation)
                self._changed.notify_all()
            raise
        with self._changed:
            if covered is None:
                self._connections.verified(connection, generation)
            else:
                self._connections.answered(connection, generation, covered)
            self._changed.notify_all()

    def doubt(self, host_id: str) -> None:
        """Nobody watches the peer any more."""
        with self._changed:
            self._connections.doubt(host_id)

    def take_over(self, host_id: str) -> None:
        """Whoever is at work on it is waited for no more."""
        with self._changed:
            self._connections.take_over(host_id)
            self._changed.notify_all()


def _missing(host_id: str, wanted: AbstractSet[Any], connection: Connection) -> str:
    lacking = sorted(wanted - connection.covered)
    names = ", ".join(f"{i} (generation {g})" for i, g in lacking[:4])
    more = f" and {len(lacking) - 4} more" if len(lacking) > 4 else ""
    return (
        f"MPComm at {host_id} does not show buffer {names}{more}: the peer has withdrawn it, or its own "
        "MPComm has refused to register it (see the log there)"
    )
