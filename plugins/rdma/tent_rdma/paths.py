"""The rails to one peer and the connections on them: which one carries what, and what replaces it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tent_core.errors import TransportError, Unreachable
from tent_core.scarcity import lacks_resources
from tent_core.topology import Topology
from tent_core.transport import Peer
from tent_core.types import Opcode
from tent_rdma.connection import Connection, State
from tent_rdma.devices import pair
from tent_rdma.distances import Distances
from tent_rdma.farewells import Farewells
from tent_rdma.lane import Fault, Lane, Run
from tent_rdma.nic import Nic
from tent_rdma.notice_channels import NoticeChannels
from tent_rdma.notices import NoticeChannel
from tent_rdma.notifications import Notifications
from tent_rdma.rails import Rails
from tent_rdma.registrations import Registrations
from tent_rdma.settings import Settings
from tent_rdma.store import Stores
from tent_rdma.transfer import Exclusion, Transfer
from tent_rdma.verbs import OWN_FAULT, STATUS_NAMES, Completion
from tent_rdma.wire import NicAddress

DEFAULT_POOL = "default"
CONNECTS = 4
"""Workers at most that connect to one peer, so that a few that do not answer cannot occupy all."""


class NoRail(TransportError):
    """No rail to the peer is left for a transfer."""


@dataclass(frozen=True)
class Shared:
    """What the endpoints of one engine share.

    `connect(call)` and `recover(call)` run it in workers, for what waits: of different ones, so that peers
    that do not answer cannot keep others from recovering. `at(owner, when, call)` runs it on a poller's
    thread once time.monotonic() is `when`, never if that is infinite; of each owner only the last counts.
    """

    nics: Sequence[Nic]
    topology: Topology
    settings: Settings
    registrations: Registrations
    stores: Stores
    connect: Callable[[Callable[[], None]], bool]
    recover: Callable[[Callable[[], None]], bool]
    at: Callable[[object, float, Callable[[], None]], None]
    notifications: Notifications
    channels: NoticeChannels
    log: Any


@dataclass(frozen=True, slots=True)
class Rail:
    """A NIC here, and one of the peer's by its place in the peer's attribute."""

    nic: Nic
    remote: int
    node: int
    """The NUMA node of the peer's."""
    spare: bool
    """Only for when no other can be used."""

    @property
    def here(self) -> int:
        """The index of the NIC here."""
        return self.nic.index


@dataclass(frozen=True, slots=True)
class Loss:
    """A connection failed: what had not ended well on it, in order, and what may be done about it."""

    rail: int
    pool: str
    runs: list[Run]
    cause: TransportError
    blamed: bool
    """Whether the rail is to blame, so that another one may help."""
    faults: list[Fault]
    """What is to blame itself, of each queue pair the first."""
    confirmed: bool
    """The peer has destroyed its end: nothing of these runs can be written any more."""
    destroyed: bool
    """Its queue pairs here are: nothing is written here any more."""

    def harmless(self, run: Run) -> bool:
        """Whether no byte of the run can be moved any more."""
        return self.confirmed or (run.transfer.opcode is Opcode.READ and self.destroyed)


class Paths:
    """Thread-safe. Its lock comes before those of the stores and of the
    poller that `at` calls by; no verb and no peer is called under it.

    `changed()` is called when there may be a lane where there was none; `lost(loss)` when a connection
    failed and is destroyed, or could not be made; both from a worker. What was under way on a connection is
    reported by one thread only: the one that takes it out of `_ending`, or `close`.
    """

    def __init__(
        self,
        peer: Peer,
        shared: Shared,
        remote: Sequence[NicAddress],
        changed: Callable[[], None],
        lost: Callable[[Loss], None],
    ) -> None:
        """Connects nothing yet. Raises Unreachable when no NIC here and none of the peer's go together."""
        self._peer = peer
        self._shared = shared
        self._remote = remote
        self._changed = changed
        self._lost = lost
        self.rails = _pair(shared.nics, remote)
        if not self.rails:
            raise Unreachable(f"no NIC here has the link layer of one of {peer.key}")
        self._health = Rails(len(self.rails), [1.0] * len(self.rails), shared.settings)
        self._distances = Distances(
            self.rails, [nic.chosen for nic in shared.nics], shared.topology, shared.settings
        )
        self._farewells = Farewells(
            peer, shared.settings.drain_timeout, shared.recover, shared.at, shared.log
        )
        self._lock = threading.Lock()
        self._connections: dict[tuple[int, str], Connection] = {}
        self._connecting: dict[tuple[int, str], Connection | None] = {}
        """Those that are asked for, with the one that is being made."""
        self._to_connect: deque[tuple[int, str]] = deque()
        self._connectors = 0
        """Workers that are at it."""
        self._ending: set[Connection] = set()
        """Those that failed and are on their way out."""
        self._troubles: dict[int, TransportError] = {}
        """Why the last use of a rail failed."""
        self._down: set[int] = set()
        """Rails whose port here is down."""
        self._returns = [0] * len(self.rails)
        """How often each came back."""
        self._closed = False
        self.ports_changed()

    def open_notices(self) -> NoticeChannel:
        """A channel for notifications, over a rail that is up. Waits. Raises TransportError."""
        rail = next((rail for rail in self.rails if rail.nic.usable), self.rails[0])
        return self._shared.channels.open(self._peer, rail.nic, self._remote, rail.remote)

    @property
    def primary(self) -> int:
        """How many rails share the work when all is well."""
        return sum(not rail.spare for rail in self.rails)

    # ---------------------------------------------------------------- choosing

    def lane_for(self, transfer: Transfer, length: int) -> tuple[int, Lane] | None:
        """A rail and a lane with room for the next `length` bytes; None: wait for `changed` or a completion.

        Raises NoRail when nothing will help.
        """
        penalties = self._distances.between(transfer.prepared.locations)
        with self._lock:
            waits = False
            now = time.monotonic()
            for spare in (False, True):
                skip = self._excluded(transfer)
                while not self._closed:
                    index = self._health.choose(
                        length, now, partial(self._fits, transfer, spare), skip, penalties
                    )
                    if index is None:
                        break
                    skip.add(index)
                    key = (index, transfer.pool)
                    connection = self._connections.get(key)
                    if connection is None:
                        self._begin(key)
                    elif connection.state is State.READY:
                        lane = connection.roomiest()
                        if lane is not None:
                            self._used(connection, transfer)
                            return index, lane
                    waits = True
                if waits:
                    return None
            if any(
                connection.busy
                for (index, _), connection in self._connections.items()
                if index not in self._excluded(transfer)
            ):
                return None  # on probation, and being tried right now
        raise self._no_rail(transfer)

    def _no_rail(self, transfer: Transfer) -> NoRail:
        """With a lack of resources as its cause, if there was one: the engine may know of a remedy."""
        error = NoRail(f"no rail to {self._peer.key} is left: {self.describe(transfer)}")
        causes = [exclusion.cause for exclusion in list(transfer.excluded.values())]
        causes += list(self._troubles.values())
        error.__cause__ = next((c for c in causes if lacks_resources(c)), None)
        return error

    def _used(self, connection: Connection, transfer: Transfer) -> None:
        """Note a use for the order of eviction: its first user, for which it was made, does not count."""
        if connection.user != id(transfer):
            if connection.user:
                self._shared.stores.touch(connection)
            connection.user = id(transfer)

    def exclude(self, transfer: Transfer, rail: int, cause: TransportError) -> None:
        """The transfer does not use a rail any more, unless its port comes back."""
        transfer.excluded[rail] = Exclusion(cause, self._returns[rail])

    def _excluded(self, transfer: Transfer) -> set[int]:
        if not transfer.excluded:
            return set()
        returns = self._returns
        return {i for i, e in list(transfer.excluded.items()) if e.returns == returns[i]}

    def _fits(self, transfer: Transfer, spare: bool, index: int) -> bool:
        rail = self.rails[index]
        return (
            rail.spare is spare
            and rail.nic.usable
            and (not transfer.devices or rail.nic.name in transfer.devices)
        )

    def describe(self, transfer: Transfer | None = None) -> str:
        """What is the matter with each rail, in words."""
        with self._lock:
            states = self._health.state(time.monotonic())
            parts = []
            for index, (rail, state) in enumerate(zip(self.rails, states, strict=True)):
                trouble: object = self._troubles.get(index, "")
                if transfer and index in self._excluded(transfer):
                    trouble = transfer.excluded[index].cause
                why = str(trouble)
                if not rail.nic.usable:
                    why = f"{rail.nic.name} is down here"
                elif transfer and transfer.devices and rail.nic.name not in transfer.devices:
                    why = f"the policy allows only {', '.join(transfer.devices)}"
                if not rail.spare or why:
                    name = f"{rail.nic.name} to {self._remote[rail.remote].name}"
                    parts.append(f"{name} {state.condition.value}" + (f" ({why})" if why else ""))
        return "; ".join(parts)

    # ---------------------------------------------------------------- connecting

    def _begin(self, key: tuple[int, str]) -> None:
        """Have a worker connect, unless one is at it. Under the lock."""
        if key not in self._connecting:
            self._connecting[key] = None
            self._to_connect.append(key)
            if self._connectors < CONNECTS and self._shared.connect(self._connect_all):
                self._connectors += 1

    def _connect_all(self) -> None:
        """In a worker: make the connections that are asked for."""
        while True:
            with self._lock:
                if not self._to_connect:
                    self._connectors -= 1
                    return
                key = self._to_connect.popleft()
            try:
                self._connect(*key)
            except Exception as error:  # work waits for the others
                self._shared.log.error("rdma_connect_raised", error=repr(error))

    def _connect(self, index: int, pool: str) -> None:
        rail = self.rails[index]
        try:
            connection = self._shared.stores.make(rail.nic, partial(self._make, index, pool))
        except TransportError as error:
            self._not_connected(index, pool, error)
            return
        except Exception as error:  # whatever the way to the peer raised, work waits for this
            self._shared.log.error("rdma_connect_raised", error=repr(error))
            self._not_connected(index, pool, TransportError(f"cannot connect: {error!r}"))
            return
        with self._lock:
            closed = self._closed
            self._connecting.pop((index, pool), None)
            self._shared.stores.ready(connection)
            if not closed:
                self._connections[index, pool] = connection
                self._troubles.pop(index, None)
        if closed:
            self._let_go(connection, 0)
            return
        self._changed()
        self._farewells.sweep()  # it answers

    def _make(self, index: int, pool: str) -> Connection:
        rail = self.rails[index]
        connection = Connection(
            self,
            rail.nic,
            self._remote[rail.remote],
            rail.remote,
            index,
            pool,
            self._shared.settings,
            self._peer.bootstrap,
        )
        with self._lock:
            if self._closed:
                raise TransportError(f"rdma to {self._peer.key} was closed")
            self._connecting[index, pool] = connection
        try:
            connection.open()
        except BaseException:
            if connection.lanes:
                self._shared.stores.gone(connection)
            if connection.asked:
                self._farewells.owe(connection.id)
            raise
        return connection

    def _not_connected(self, index: int, pool: str, error: TransportError) -> None:
        rail = self.rails[index]
        with self._lock:
            self._connecting.pop((index, pool), None)
            if self._closed:
                return
            self._troubles[index] = error
            self._health.failed(index, time.monotonic())
        self._shared.log.warning(
            "rdma_connect_failed",
            peer=str(self._peer.key),
            nic=rail.nic.name,
            peer_nic=self._remote[rail.remote].name,
            reason=str(error),
        )
        self._lost(Loss(index, pool, [], error, True, [], True, True))
        self._farewells.sweep()

    # ---------------------------------------------------------------- accounting

    def posted(self, rail: int, total: int, now: float) -> None:
        """Bytes were posted on a rail."""
        with self._lock:
            self._health.posted(rail, total, now)

    def completed(self, runs: Collection[Run]) -> None:
        """Runs ended well."""
        now = time.monotonic()
        with self._lock:
            for run in runs:
                self._health.completed(run.rail, run.total, now)

    def abandoned(self, run: Run) -> None:
        """A run that was counted as posted was not."""
        with self._lock:
            self._health.abandoned(run.rail, run.total, time.monotonic())

    def ports_changed(self) -> None:
        """A port here went up or down."""
        broken = []
        with self._lock:
            for index, rail in enumerate(self.rails):
                if rail.nic.usable:
                    if index in self._down:
                        self._down.discard(index)
                        self._returns[index] += 1
                        self._health.up(index)
                else:
                    self._down.add(index)
                    self._health.down(index)
                    broken += [
                        c for (i, _), c in self._connections.items() if i == index and c.busy
                    ]
        for connection in broken:
            self._fail(connection, f"the port of {connection.nic.name} went down", True)

    # ---------------------------------------------------------------- failing

    def broken(self, lane: Lane, completion: Completion | None, why: str = "") -> None:
        """A lane is in error. Returns at once; a worker does the rest."""
        blamed = True
        if completion is not None:
            status = completion.status
            why = STATUS_NAMES[status] if status < len(STATUS_NAMES) else f"status {status}"
            blamed = status not in OWN_FAULT
        self._fail(lane.connection, why, blamed)

    def _fail(self, connection: Connection, why: str, blamed: bool) -> None:
        if not connection.break_off():
            return
        rail = self.rails[connection.rail]
        names = f"{rail.nic.name} to {self._remote[rail.remote].name} of {self._peer.key}"
        cause = TransportError(f"{names}: {why}")
        with self._lock:
            self._forget(connection)
            if self._closed:
                return  # `close` has it
            self._ending.add(connection)
            if blamed:
                self._troubles[connection.rail] = cause
                self._health.failed(connection.rail, time.monotonic())
        self._shared.recover(partial(self._recover, connection, cause, blamed))

    def _recover(self, connection: Connection, cause: TransportError, blamed: bool) -> None:
        """In a worker: let it drain, destroy it at both ends, and give back what was under way."""
        self._let_go(connection, self._shared.settings.drain_timeout)
        with self._lock:
            if connection not in self._ending:
                return  # closed meanwhile
        confirmed = True
        try:
            self._farewells.confirm([connection.id])
        except Exception as error:
            confirmed = False
            self._farewells.sweep_later()
            cause = TransportError(f"{cause}; and the peer did not confirm its end: {error}")
        with self._lock:
            if connection not in self._ending:
                return
            self._ending.discard(connection)
        runs, faults = connection.take_back()
        now = time.monotonic()
        with self._lock:
            for run in runs:
                self._health.abandoned(run.rail, run.total, now)
        destroyed = not connection.lanes
        key = connection.rail, connection.pool_name
        self._lost(Loss(*key, runs, cause, blamed, faults, confirmed, destroyed))

    def evict(self, connection: Connection) -> None:
        """It was retired, and makes room for another: destroy it. Waits for verbs only; the peer is told by
        a worker."""
        with self._lock:
            self._forget(connection)
        self._farewells.owe(connection.id)
        self._let_go(connection, 0)
        self._farewells.sweep_soon()
        self._changed()  # who was about to post on it looks for another

    def _forget(self, connection: Connection) -> None:
        for key, kept in list(self._connections.items()):
            if kept is connection:
                del self._connections[key]

    def _let_go(self, connection: Connection, timeout: float) -> None:
        connection.destroy(timeout)
        self._shared.stores.gone(connection)

    # ---------------------------------------------------------------- closing

    def close(self) -> list[Connection]:
        """Post no more, let what is under way end; the connections, which are to be destroyed (`destroy`),
        and of which nobody else reports anything (`Connection.take_back`). Returns at once. The peer is not
        told."""
        with self._lock:
            self._closed = True
            making = [c for c in self._connecting.values() if c is not None]
            connections = [*self._connections.values(), *making, *self._ending]
            self._connections.clear()
            self._ending.clear()
        self._farewells.close()
        for connection in connections:
            connection.break_off()
        return connections

    def destroy(self, connections: Sequence[Connection], deadline: float) -> None:
        """Destroy what `close` answered, waiting for what is under way until `deadline`."""
        for connection in connections:
            self._let_go(connection, max(deadline - time.monotonic(), 0))

    def nics(self) -> set[Nic]:
        """Those with a connection."""
        with self._lock:
            return {connection.nic for connection in self._connections.values()}

    def holdings(self) -> Mapping[str, int]:
        """What is held, counted."""
        with self._lock:
            making = [c for c in self._connecting.values() if c is not None]
            connections = [*self._connections.values(), *making, *self._ending]
        return {
            "connections": len(connections),
            "queue_pairs": sum(len(c.lanes) for c in connections),
        }


def _pair(nics: Sequence[Nic], remote: Sequence[NicAddress]) -> list[Rail]:
    """Rails, those that are meant for each other first."""
    seen: set[int] = set()
    rails = []
    for local, other in pair([nic.address for nic in nics], remote):
        rails.append(Rail(nics[local], other, remote[other].numa_node, spare=local in seen))
        seen.add(local)
    return rails
