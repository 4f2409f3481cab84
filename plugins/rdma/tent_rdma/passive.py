"""The ends of connections that peers began: they wait for one-sided requests, and no thread serves them."""

from __future__ import annotations

import contextlib
import errno
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

CLOSE_S = 0.8
"""How long closing waits for a verb of the same connection."""


class PassiveEnd:
    """The queue pairs that answer one connection. Thread-safe; its lock is held while verbs are called."""

    def __init__(self, nic: Nic) -> None:
        self.nic = nic
        self.queue_pairs: list[QueuePair] = []
        self._lock = threading.Lock()
        self._wanted = True
        self.counted = False
        """Whether it has a place among the connections of its NIC; guarded by the lock of all ends."""

    def open(self, asked: Open, settings: Settings) -> Opened:
        """Make them. Raises VerbsError, and TransportError when it was closed meanwhile.

        What could not be destroyed again then is left in `queue_pairs`.
        """
        pool = PoolSettings(service_level=asked.service_level, traffic_class=asked.traffic_class)
        nic = self.nic
        answers = []
        with self._lock:
            if not self._wanted:
                raise TransportError(
                    f"connection {asked.connection:x} was closed while it was made"
                )
            try:
                for other in asked.queue_pairs:
                    made = nic.device.queue_pair(
                        nic.chosen.port, nic.queue, nic.queue, send_depth=1
                    )
                    self.queue_pairs.append(made)
                    own = Ready(number=made.number, psn=psn())
                    made.connect(route(nic, asked.sender, other, pool, settings), own.psn)
                    answers.append(own)
            except BaseException:
                with contextlib.suppress(VerbsError):
                    self._destroy()
                raise
        return Opened(queue_pairs=answers)

    def close(self) -> None:
        """Destroy them: nothing of the peer's can be written by them afterwards. Raises VerbsError."""
        self._wanted = False
        if not self._lock.acquire(timeout=CLOSE_S):
            raise VerbsError(f"a queue pair of {self.nic.name} is still being made", errno.EBUSY)
        try:
            self._destroy()
        finally:
            self._lock.release()

    def _destroy(self) -> None:
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
        self._closed = False

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
            if self._closed:
                raise TransportError("rdma is being stopped here")
            if key in self._ends:
                raise Malformed(f"connection {asked.connection:x} is open already")
            self._ends[key] = end
        try:
            answer = self._stores.make(nic, lambda: end.open(asked, self._settings))
        except BaseException:
            with self._lock:
                if not end.queue_pairs:
                    self._ends.pop(key, None)
            raise
        with self._lock:
            if self._ends.get(key) is end:
                end.counted = True
                return answer
        self._stores.freed(nic)  # it was closed in the very moment
        raise TransportError(f"connection {asked.connection:x} was closed while it was made")

    def close(self, peer: PeerKey, connections: Sequence[int]) -> None:
        """The peer has let go of these. Raises VerbsError, and then they may be named again."""
        self._close([(peer, connection) for connection in connections])

    def release(self, peer: PeerKey) -> None:
        """The peer has gone: destroy all of its ends. Raises VerbsError."""
        with self._lock:
            keys = [key for key in self._ends if key[0] == peer]
        self._close(keys)

    def close_all(self) -> None:
        """Destroy every end, and take no more. Raises VerbsError."""
        with self._lock:
            self._closed = True
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
                counted = self._ends.pop(key, None) is end and end.counted
            if counted:
                self._stores.freed(end.nic)
        if failure is not None:
            raise failure
