"""A connection that this side began: its queue pairs, how it is made, broken off and destroyed."""

from __future__ import annotations

import enum
import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from tent_core.errors import TransportError
from tent_rdma.lane import Lane, Run
from tent_rdma.nic import Nic
from tent_rdma.settings import PoolSettings, Settings
from tent_rdma.verbs import QueuePair, Route, VerbsError
from tent_rdma.wire import Close, Closed, NicAddress, Open, Opened, Ready, decode

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


class Connection:
    """The initiator's end, between a NIC here and one of the peer's. Thread-safe; its lock is a leaf.

    `open` and `destroy` wait, and are called from a worker (or from whoever closes the endpoint); the rest
    returns at once.
    """

    def __init__(
        self,
        owner: Paths,
        nic: Nic,
        remote: NicAddress,
        remote_index: int,
        rail: int,
        pool: PoolSettings,
        settings: Settings,
        exchange: Exchange,
    ) -> None:
        self.owner = owner
        self.id = secrets.randbits(64)
        self.nic = nic
        self.remote = remote
        self.rail = rail
        self.pool = pool
        self.state = State.UNINIT
        self.lanes: list[Lane] = []
        self._remote_index = remote_index
        self._settings = settings
        self._exchange = exchange
        self._undrained: set[Lane] = set()
        self._drained = threading.Condition()
        self._destroying = threading.Lock()

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
            self._open()
            if not self._advance(State.HANDSHAKING, State.READY):
                raise TransportError(f"{self} was given up while it was made")
        except BaseException:
            self.destroy(0)
            raise

    def _open(self) -> None:
        nic, settings = self.nic, self._settings
        own = []
        for _ in range(self.pool.queue_pairs):
            queue_pair = nic.device.queue_pair(
                nic.chosen.port, nic.queue, nic.queue, send_depth=settings.send_depth + 1
            )
            self._add(queue_pair)
            own.append(Ready(number=queue_pair.number, psn=psn()))
        asked = Open(
            connection=self.id,
            nic=self._remote_index,
            sender=nic.address,
            service_level=self.pool.service_level,
            traffic_class=self.pool.traffic_class,
            queue_pairs=own,
        )
        answer = decode(Opened, self._exchange(asked.encode(), settings.connect_timeout))
        if len(answer.queue_pairs) != len(own):
            raise TransportError(
                f"{self}: the peer made {len(answer.queue_pairs)} queue pairs of {len(own)}"
            )
        for lane, mine, other in zip(self.lanes, own, answer.queue_pairs, strict=True):
            lane.queue_pair.connect(route(nic, self.remote, other, self.pool, settings), mine.psn)

    def _add(self, queue_pair: QueuePair) -> None:
        if not self.nic.take_credits(1):  # for its drain marker
            queue_pair.close()
            raise TransportError(
                f"{self.nic.name} has no room for completions of another queue pair"
            )
        lane = Lane(self, queue_pair, self._settings.send_depth)
        self.lanes.append(lane)
        self.nic.add_lane(lane)

    # ---------------------------------------------------------------- used

    @property
    def busy(self) -> bool:
        """Whether work is outstanding, or it is being made."""
        return self.state is State.HANDSHAKING or any(lane.busy for lane in self.lanes)

    def roomiest(self) -> Lane:
        """The lane with the most room."""
        lanes = self.lanes
        return lanes[0] if len(lanes) == 1 else max(lanes, key=lambda lane: lane.free)

    # ---------------------------------------------------------------- ended

    def break_off(self) -> bool:
        """Post no more and let what is under way end. False when that was done before."""
        with self._drained:
            if self.state >= State.DESTROYING:
                return False
            self.state = State.DESTROYING
            self._undrained = set(self.lanes)
        for lane in self.lanes:
            try:
                lane.break_off()
            except VerbsError:
                self.drained(lane)  # destroying the queue pair ends what is under way as well
        return True

    def drained(self, lane: Lane) -> None:
        """Nothing is under way on `lane` any more."""
        with self._drained:
            self._undrained.discard(lane)
            self._drained.notify_all()

    def destroy(self, timeout: float) -> list[Run]:
        """Destroy the queue pairs, once they are drained or after `timeout` seconds; what did not end well.

        Waits for another thread that is at it, and answers nothing then. A queue pair that cannot be
        destroyed stays in `lanes`: it may be asked again. The peer's end is not told.
        """
        self.break_off()
        with self._drained:
            self._drained.wait_for(lambda: not self._undrained, timeout)
        with self._destroying:
            runs: list[Run] = []
            stuck = []
            for lane in self.lanes:
                self.nic.discard_lane(lane)
                try:
                    lane.close()
                except VerbsError:
                    stuck.append(lane)
                left = lane.take_back()
                self.nic.give_credits(1 + sum(run.stop - run.start for run in left))
                runs += left
            self.lanes = stuck
            self.state = State.DESTROYED
        self.nic.resume_starved()
        return runs

    def confirm(self, timeout: float) -> None:
        """Have the peer destroy its end: nothing that was sent can be written there afterwards.

        Raises TransportError when that cannot be said.
        """
        decode(Closed, self._exchange(Close(connections=[self.id]).encode(), timeout))

    def _advance(self, old: State, new: State) -> bool:
        with self._drained:
            if self.state is not old:
                return False
            self.state = new
            return True
