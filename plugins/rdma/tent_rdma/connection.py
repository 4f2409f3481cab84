"""A connection that this side began: its queue pairs, how it is made, broken off and destroyed."""

from __future__ import annotations

import enum
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from tent_core.errors import TransportError
from tent_rdma.lane import Fault, Lane, Run
from tent_rdma.nic import Nic
from tent_rdma.settings import PoolSettings, Settings
from tent_rdma.verbs import QueuePair, Route, VerbsError
from tent_rdma.wire import NicAddress, Open, Opened, Ready, decode

if TYPE_CHECKING:
    from tent_rdma.paths import Paths

Exchange = Callable[[bytes, float], bytes]
"""Hand a bootstrap message to the peer, with a time-out in seconds; its answer. Raises TransportError."""


class State(enum.IntEnum):
    """Of a connection; it only ever grows."""

    UNINIT = 0
    HANDSHAKING = 1
    READY = 2
    DESTROYING = 3
    DESTROYED = 4


def route(
    nic: Nic, remote: NicAddress, other: Ready, pool: PoolSettings, settings: Settings
) -> Route:
    """The way from a NIC here to a queue pair of the peer's."""
    return Route(
        port=nic.chosen.port,
        gid_index=nic.chosen.gid_index,
        gid=remote.gid,
        lid=remote.lid,
        number=other.number,
        psn=other.psn,
        mtu=min(nic.port.mtu, remote.mtu),
        service_level=pool.service_level,
        traffic_class=pool.traffic_class,
        timeout=settings.acknowledge_timeout,
        retries=settings.retries,
        reads=min(nic.address.reads, remote.reads),
    )


def psn() -> int:
    """A first packet sequence number that late packets of an earlier connection do not have."""
    return secrets.randbits(24)


def _room(lane: Lane) -> int:
    return 0 if lane.broken else lane.free


_LEAST_S = 0.1
"""How long a thread that destroys a connection waits at least for another that makes or destroys it."""


class Connection:
    """The initiator's end, between a NIC here and one of the peer's. Thread-safe.

    `open` and `destroy` wait, and are called from a worker (or from whoever closes the endpoint); the rest
    returns at once. Locks: `_verbs`, held while queue pairs are made, connected or destroyed, but not while
    the peer is asked; then the lanes', then `_drained`, a leaf.
    """

    def __init__(
        self,
        owner: Paths,
        nic: Nic,
        remote: NicAddress,
        remote_index: int,
        rail: int,
        pool_name: str,
        settings: Settings,
        exchange: Exchange,
    ) -> None:
        self.owner = owner
        self.id = secrets.randbits(64)
        self.nic = nic
        self.remote = remote
        self.rail = rail
        self.pool_name = pool_name
        self.pool = settings.pools.get(pool_name) or PoolSettings()
        self.state = State.UNINIT
        self.lanes: list[Lane] = []
        """Those with a queue pair; one that cannot be destroyed stays."""
        self.asked = False
        """Whether the peer was asked for its end, so that there may be one."""
        self.user = 0
        """Identifies the transfer that used it last; for its paths."""
        self._remote_index = remote_index
        self._settings = settings
        self._exchange = exchange
        self._undrained: set[Lane] = set()
        self._left: list[Run] = []
        self._faults: list[Fault] = []
        self._drained = threading.Condition()
        self._verbs = threading.Lock()

    def __str__(self) -> str:
        return f"connection {self.id:x} from {self.nic.name} to {self.remote.name} of the peer"

    # ---------------------------------------------------------------- made

    def open(self) -> None:
        """Make the queue pairs, have the peer make theirs, and connect them.

        Raises VerbsError or TransportError, and then nothing of it is left here.
        """
        if not self._advance(State.UNINIT, State.HANDSHAKING):
            raise TransportError(f"{self} was given up before it was made")
        try:
            own = self._make()
            answer = self._ask(own)
            self._connect(own, answer)
        except BaseException:
            self.destroy(0)
            raise

    def _make(self) -> list[Ready]:
        own = []
        for _ in range(self.pool.queue_pairs):
            with self._verbs:
                self._must_be_wanted()
                queue_pair = self._queue_pair()
            own.append(Ready(number=queue_pair.number, psn=psn()))
        return own

    def _ask(self, own: list[Ready]) -> list[Ready]:
        asked = Open(
            connection=self.id,
            nic=self._remote_index,
            sender=self.nic.address,
            service_level=self.pool.service_level,
            traffic_class=self.pool.traffic_class,
            queue_pairs=own,
        )
        self.asked = True
        answer = decode(Opened, self._exchange(asked.encode(), self._settings.connect_timeout))
        if len(answer.queue_pairs) != len(own):
            raise TransportError(
                f"{self}: the peer made {len(answer.queue_pairs)} queue pairs of {len(own)}"
            )
        return answer.queue_pairs

    def _connect(self, own: list[Ready], others: list[Ready]) -> None:
        with self._verbs:
            self._must_be_wanted()
            for lane, mine, other in zip(self.lanes, own, others, strict=True):
                way = route(self.nic, self.remote, other, self.pool, self._settings)
                lane.queue_pair.connect(way, mine.psn)
            if not self._advance(State.HANDSHAKING, State.READY):
                self._must_be_wanted()

    def _must_be_wanted(self) -> None:
        if self.state is not State.HANDSHAKING:
            raise TransportError(f"{self} was given up while it was made")

    def _queue_pair(self) -> QueuePair:
        nic, depth = self.nic, self._settings.send_depth
        if not nic.take_marker():
            raise TransportError(f"{nic.name} has no room for completions of another queue pair")
        try:
            made = nic.device.queue_pair(
                nic.chosen.port, nic.queue, nic.queue, send_depth=depth + 1
            )
        except BaseException:
            nic.give_marker()
            raise
        lane = Lane(self, made, depth)
        self.lanes.append(lane)
        nic.add_lane(lane)
        return made

    # ---------------------------------------------------------------- used

    @property
    def busy(self) -> bool:
        """Whether work is outstanding, or it is being made."""
        return self.state is State.HANDSHAKING or any(lane.busy for lane in self.lanes)

    def roomiest(self) -> Lane | None:
        """The lane with the most room; None if there is none at all."""
        lane: Lane | None = max(self.lanes, key=_room, default=None)
        return lane if lane is not None and _room(lane) > 0 else None

    # ---------------------------------------------------------------- ended

    def retire(self) -> bool:
        """Break it off if it is ready and nothing is under way, else leave it as it is."""
        with ExitStack() as locks:
            lanes = list(self.lanes)
            for lane in lanes:
                locks.enter_context(lane.lock)
            if any(lane.busy for lane in lanes) or not self._advance(State.READY, State.DESTROYING):
                return False
            for lane in lanes:
                lane.broken = True
        return True

    def break_off(self) -> bool:
        """Post no more and let what is under way end. False when that was done before."""
        with self._drained:
            if self.state >= State.DESTROYING:
                return False
            self.state = State.DESTROYING
            lanes = list(self.lanes)
            self._undrained = set(lanes)
        waits = False
        for lane in lanes:
            try:
                if lane.break_off() and self.nic.hears:
                    waits = True
                    continue
            except VerbsError:
                pass  # destroying the queue pair ends what is under way as well
            self.drained(lane)
        if waits:
            self.nic.arm()
        return True

    def drained(self, lane: Lane) -> None:
        """Nothing is under way on `lane` any more."""
        with self._drained:
            self._undrained.discard(lane)
            self._drained.notify_all()

    def destroy(self, timeout: float) -> bool:
        """Destroy the queue pairs, once they are drained or after `timeout` seconds; whether all are.

        If not, it may be asked again: one could not be destroyed and stays in `lanes`, or another thread is
        at it. What did not end well is had from `take_back`. The peer's end is not told.
        """
        deadline = time.monotonic() + timeout
        self.break_off()
        with self._drained:
            self._drained.wait_for(lambda: not self._undrained, timeout)
        if not self._verbs.acquire(timeout=max(deadline - time.monotonic(), _LEAST_S)):
            return False
        freed = 0
        try:
            for lane in list(self.lanes):
                self.nic.discard_lane(lane)
                try:
                    lane.close()
                except VerbsError:
                    continue
                freed += self._empty(lane)
                self.lanes.remove(lane)
                self.nic.give_marker()
                self.drained(lane)  # for whoever still waits for that
            self.state = State.DESTROYED
            return not self.lanes
        finally:
            self._verbs.release()
            self.nic.give_credits(freed)

    def take_back(self) -> tuple[list[Run], list[Fault]]:
        """What did not end well, and what of that is to blame itself: once, each is answered to one caller.
        For when it is destroyed, or given up on."""
        self.nic.give_credits(sum(self._empty(lane) for lane in list(self.lanes)))
        with self._drained:
            left, self._left = self._left, []
            faults, self._faults = self._faults, []
        return left, faults

    def _empty(self, lane: Lane) -> int:
        """Keep what is outstanding on a lane for `take_back`; how many work requests that were."""
        runs = lane.take_back()
        with self._drained:
            self._left += runs
            if runs and lane.fault is not None:
                self._faults.append(lane.fault)
        return sum(run.stop - run.start for run in runs)

    def _advance(self, old: State, new: State) -> bool:
        with self._drained:
            if self.state is not old:
                return False
            self.state = new
            return True
