"""The ends of connections that peers began: they wait for one-sided requests, and no thread serves them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tent_core.descriptor import PeerKey
from tent_core.errors import TransportError
from tent_rdma.connection import psn, route
from tent_rdma.nic import Nic
from tent_rdma.settings import PoolSettings, Settings
from tent_rdma.store import Stores
from tent_rdma.verbs import QueuePair, VerbsError
from tent_rdma.wire import Malformed, Open, Opened, Ready


class PassiveEnd:
    """The queue pairs that answer one connection."""

    def __init__(self, nic: Nic) -> None:
        self.nic = nic
        self.queue_pairs: list[QueuePair] = []

    def open(self, asked: Open, settings: Settings) -> Opened:
        """Make them. Raises VerbsError, and then nothing of it is left."""
        pool = PoolSettings(service_level=asked.service_level, traffic_class=asked.traffic_class)
        nic = self.nic
        answers = []
        try:
            for other in asked.queue_pairs:
                made = nic.device.queue_pair(nic.chosen.port, nic.queue, nic.queue, send_depth=1)
                self.queue_pairs.append(made)
                own = Ready(number=made.number, psn=psn())
                made.connect(route(nic, asked.sender, other, pool, settings), own.psn)
                answers.append(own)
        except BaseException:
            self.close()
            raise
        return Opened(queue_pairs=answers)

    def close(self) -> None:
        """Destroy them: nothing of the peer's can be written by them afterwards. Raises VerbsError."""
        while self.queue_pairs:
            self.queue_pairs[-1].close()
            self.queue_pairs.pop()


class PassiveEnds:
    """All of one engine, by peer and connection. Thread-safe; its lock is a leaf."""

    def __init__(self, nics: Sequence[Nic], stores: Stores, settings: Settings) -> None:
        self._nics = nics
        self._stores = stores
        self._settings = settings
        self._lock = threading.Lock()
        self._ends: dict[tuple[PeerKey, int], PassiveEnd] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def open(self, peer: PeerKey, asked: Open) -> Opened:
        """A peer begins a connection. Raises Malformed, TransportError, VerbsError."""
        if asked.nic >= len(self._nics):
            raise Malformed(f"asked for NIC {asked.nic}: there are {len(self._nics)} here")
        nic = self._nics[asked.nic]
        if asked.sender.link_layer != nic.chosen.link_layer:
            raise TransportError(
                f"{nic.name} here is {nic.chosen.link_layer}, and {asked.sender.name} there is "
                f"{asked.sender.link_layer}"
            )
        key = (peer, asked.connection)
        end = PassiveEnd(nic)
        with self._lock:
            if key in self._ends:
                raise Malformed(f"connection {asked.connection:x} is open already")
            self._ends[key] = end
        try:
            return self._stores.make(nic, lambda: end.open(asked, self._settings))
        except BaseException:
            with self._lock:
                self._ends.pop(key, None)
            raise

    def close(self, peer: PeerKey, connections: Sequence[int]) -> None:
        """The peer has let go of these. Raises VerbsError, and then they may be named again."""
        self._close([(peer, connection) for connection in connections])

    def release(self, peer: PeerKey) -> None:
        """The peer has gone: destroy all of its ends. Raises VerbsError."""
        with self._lock:
            keys = [key for key in self._ends if key[0] == peer]
        self._close(keys)

    def close_all(self) -> None:
        """Destroy every end. Raises VerbsError."""
        with self._lock:
            keys = list(self._ends)
        self._close(keys)

    def _close(self, keys: Sequence[tuple[PeerKey, int]]) -> None:
        failure: VerbsError | None = None
        for key in keys:
            with self._lock:
                end = self._ends.get(key)
            if end is None:
                continue
            try:
                end.close()
            except VerbsError as error:
                failure = failure or error
                continue
            with self._lock:
                self._ends.pop(key, None)
            self._stores.freed(end.nic)
        if failure is not None:
            raise failure
