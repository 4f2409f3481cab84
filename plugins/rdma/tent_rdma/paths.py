"""The rails to one peer and the connections on them: which one carries what, and what replaces it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tent_core.errors import TransportError, Unreachable
from tent_core.topology import Topology
from tent_core.transport import Peer
from tent_rdma.connection import Connection, State
from tent_rdma.devices import pair, ranks
from tent_rdma.lane import Lane, Run
from tent_rdma.nic import Nic
from tent_rdma.rails import Rails
from tent_rdma.registrations import Registrations
from tent_rdma.settings import PoolSettings, Settings
from tent_rdma.store import Stores
from tent_rdma.transfer import Transfer
from tent_rdma.verbs import STATUS_NAMES, Completion
from tent_rdma.wire import NicAddress

DEFAULT_POOL = "default"
OWN_FAULT = frozenset({1, 4, 8, 9, 10, 11})
"""Statuses that are the request's fault and not the rail's: its key, its range, its permission. Not 2, a local
queue pair operation error: soft-RoCE says it of a port that is down."""


class NoRail(TransportError):
    """No rail to the peer is left for a transfer."""


@dataclass(frozen=True)
class Shared:
    """What the endpoints of one engine share. `work(call)` runs it in a worker, for what waits."""

    nics: Sequence[Nic]
    topology: Topology
    settings: Settings
    registrations: Registrations
    stores: Stores
    work: Callable[[Callable[[], None]], None]
    log: Any


@dataclass(frozen=True, slots=True)
class Rail:
    """A NIC here, and one of the peer's by its place in the peer's attribute."""

    nic: Nic
    remote: int
    spare: bool
    """Only for when no other can be used."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A connection failed: what had not ended well on it, in order, and what may be done about it."""

    rail: int
    runs: list[Run]
    cause: TransportError
    culprit: Run | None
    """The run that is to blame itself, so that no other rail would help it."""
    confirmed: bool
    """The peer has destroyed its end: nothing of these runs can be written any more."""


class Paths:
    """Thread-safe. Its lock is a leaf; no verb and no peer is called under it.

    `changed()` is called when there may be a lane where there was none; `lost(loss)` when a connection
    failed and is destroyed; both from a worker.
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
        self._penalties: dict[tuple[str, str], tuple[float, ...]] = {}
        self._lock = threading.Lock()
        self._connections: dict[tuple[int, str], Connection] = {}
        self._connecting: set[tuple[int, str]] = set()
        self._ending: dict[Connection, list[Run]] = {}
        """Those that failed and are on their way out, with what was under way once that is known."""
        self._troubles: dict[int, str] = {}
        """Why the last use of a rail failed."""
        self._closed = False
        self.ports_changed()

    @property
    def primary(self) -> int:
        """How many rails share the work when all is well."""
        return sum(not rail.spare for rail in self.rails)

    # ---------------------------------------------------------------- choosing

    def lane_for(self, transfer: Transfer, length: int) -> tuple[int, Lane] | None:
        """A rail and a lane with room for the next `length` bytes; None: wait for `changed` or a completion.

        Raises NoRail when nothing will help.
        """
        now = time.monotonic()
        penalties = self._penalties_of(transfer)
        with self._lock:
            waits = False
            for spare in (False, True):
                skip = set(transfer.excluded)
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
                        if lane.free > 0 and not lane.broken:
                            self._shared.stores.touch(connection)
                            return index, lane
                    waits = True
                if waits:
                    return None
            if any(
                connection.busy
                for (index, _), connection in self._connections.items()
                if index not in transfer.excluded
            ):
                return None  # on probation, and being tried right now
        raise NoRail(f"no rail to {self._peer.key} is left: {self.describe(transfer)}")

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
                why = self._troubles.get(index, "")
                if not rail.nic.usable:
                    why = f"{rail.nic.name} is down here"
                elif transfer and transfer.devices and rail.nic.name not in transfer.devices:
                    why = f"the policy allows only {', '.join(transfer.devices)}"
                if not rail.spare or why:
                    name = f"{rail.nic.name} to {self._remote[rail.remote].name}"
                    parts.append(f"{name} {state.condition.value}" + (f" ({why})" if why else ""))
        return "; ".join(parts)

    def _penalties_of(self, transfer: Transfer) -> tuple[float, ...] | None:
        places = transfer.prepared.locations
        known = self._penalties.get(places)
        if known is None:
            if len(self._penalties) > 1000:
                self._penalties.clear()
            known = self._penalties[places] = self._reckon(*places)
        return known or None

    def _reckon(self, here: str, there: str) -> tuple[float, ...]:
        """How much longer each rail takes for memory at two locations; empty when all are alike."""
        shared = self._shared
        tiers = ranks(here, [n.chosen for n in shared.nics], shared.topology, shared.settings)
        tier = {index: t for t, members in enumerate(tiers) for index in members}
        node = there.partition(":")[2] if there.startswith("cpu:") else ""
        factors = []
        for rail in self.rails:
            away = tier.get(rail.nic.index, len(tiers))
            numa = self._remote[rail.remote].numa_node
            away += bool(node) and numa >= 0 and str(numa) != node
            factors.append(shared.settings.numa_penalty**away)
        return () if len(set(factors)) == 1 else tuple(factors)

    # ---------------------------------------------------------------- connecting

    def _begin(self, key: tuple[int, str]) -> None:
        """Have a worker connect, unless one is at it. Under the lock."""
        if key not in self._connecting:
            self._connecting.add(key)
            self._shared.work(lambda: self._connect(key))

    def _connect(self, key: tuple[int, str]) -> None:
        index, pool = key
        rail = self.rails[index]
        settings = self._shared.settings

        def make() -> Connection:
            connection = Connection(
                self,
                rail.nic,
                self._remote[rail.remote],
                rail.remote,
                index,
                settings.pools.get(pool) or PoolSettings(),
                settings,
                self._peer.bootstrap,
            )
            connection.open()
            return connection

        try:
            connection = self._shared.stores.make(rail.nic, make)
        except TransportError as error:
            with self._lock:
                self._connecting.discard(key)
                self._troubles[index] = str(error)
                self._health.failed(index, time.monotonic())
            self._shared.log.warning(
                "rdma_connect_failed",
                peer=str(self._peer.key),
                nic=rail.nic.name,
                peer_nic=self._remote[rail.remote].name,
                reason=str(error),
            )
            self._lost(Loss(index, [], error, None, True))
            return
        self._shared.stores.ready(connection)
        with self._lock:
            self._connecting.discard(key)
            closed = self._closed
            if not closed:
                self._connections[key] = connection
                self._troubles.pop(index, None)
        if closed:
            self._let_go(connection)
        self._changed()

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
                    self._health.up(index)
                else:
                    self._health.down(index)
                    broken += [
                        c for (i, _), c in self._connections.items() if i == index and c.busy
                    ]
        for connection in broken:
            self._fail(connection, f"the port of {connection.nic.name} went down", None)

    # ---------------------------------------------------------------- failing

    def broken(self, lane: Lane, completion: Completion | None, why: str = "") -> None:
        """A lane is in error. Returns at once; a worker does the rest."""
        culprit = None
        if completion is not None:
            status = completion.status
            why = STATUS_NAMES[status] if status < len(STATUS_NAMES) else f"status {status}"
            if status in OWN_FAULT:
                culprit = lane.oldest()
        self._fail(lane.connection, why, culprit)

    def _fail(self, connection: Connection, why: str, culprit: Run | None) -> None:
        if not connection.break_off():
            return
        rail = self.rails[connection.rail]
        names = f"{rail.nic.name} to {self._remote[rail.remote].name} of {self._peer.key}"
        cause = TransportError(f"{names}: {why}")
        with self._lock:
            self._forget(connection)
            self._ending[connection] = []
            if culprit is None:
                self._troubles[connection.rail] = why
                self._health.failed(connection.rail, time.monotonic())
        self._shared.work(lambda: self._recover(connection, cause, culprit))

    def _recover(self, connection: Connection, cause: TransportError, culprit: Run | None) -> None:
        """In a worker: let it drain, destroy it at both ends, and give back what was under way."""
        runs = self._let_go(connection)
        with self._lock:
            kept = connection in self._ending
            if kept:
                self._ending[connection] = runs
        if not kept:  # closed meanwhile
            self._lost(Loss(connection.rail, runs, cause, culprit, False))
            return
        confirmed = True
        try:
            if not self._closed:
                connection.confirm(self._shared.settings.drain_timeout)
        except TransportError as error:
            confirmed = False
            cause = TransportError(f"{cause}; and the peer did not confirm its end: {error}")
        with self._lock:
            runs = self._ending.pop(connection, [])
            now = time.monotonic()
            for run in runs:
                self._health.abandoned(run.rail, run.total, now)
        self._lost(Loss(connection.rail, runs, cause, culprit, confirmed and not self._closed))

    def evict(self, connection: Connection) -> None:
        """It makes room for another: destroy it at both ends. Waits; called from a worker."""
        with self._lock:
            self._forget(connection)
        runs = self._let_go(connection)
        try:
            connection.confirm(self._shared.settings.drain_timeout)
            confirmed = True
        except TransportError:
            confirmed = False
        if runs:  # it was used at the very moment
            cause = TransportError(f"{connection} was closed to make room")
            self._lost(Loss(-1, runs, cause, None, confirmed))

    def _forget(self, connection: Connection) -> None:
        for key, kept in list(self._connections.items()):
            if kept is connection:
                del self._connections[key]

    def _let_go(self, connection: Connection) -> list[Run]:
        runs = connection.destroy(self._shared.settings.drain_timeout)
        self._shared.stores.gone(connection)
        return runs

    # ---------------------------------------------------------------- closing

    def close(self, within: float) -> list[Run]:
        """Destroy every connection; what was under way. The peer is not told. Bounded by `within` seconds."""
        deadline = time.monotonic() + within
        with self._lock:
            self._closed = True
            connections = list(self._connections.values())
            self._connections.clear()
        for connection in connections:
            connection.break_off()
        runs: list[Run] = []
        for connection in connections:
            runs += connection.destroy(max(deadline - time.monotonic(), 0))
            self._shared.stores.gone(connection)
        with self._lock:
            ending = list(self._ending)
        for connection in ending:
            connection.destroy(max(deadline - time.monotonic(), 0))
        with self._lock:
            for left in self._ending.values():
                runs += left
            self._ending.clear()
        return runs

    def nics(self) -> set[Nic]:
        """Those with a connection."""
        with self._lock:
            return {connection.nic for connection in self._connections.values()}

    def holdings(self) -> Mapping[str, int]:
        """What is held, counted."""
        with self._lock:
            connections = [*self._connections.values(), *self._ending]
        return {
            "connections": len(connections),
            "queue_pairs": sum(len(c.lanes) for c in connections),
        }


def _pair(nics: Sequence[Nic], remote: Sequence[NicAddress]) -> list[Rail]:
    """Rails, those that are meant for each other first."""
    seen: set[int] = set()
    rails = []
    for local, other in pair([nic.address for nic in nics], remote):
        rails.append(Rail(nics[local], other, spare=local in seen))
        seen.add(local)
    return rails
