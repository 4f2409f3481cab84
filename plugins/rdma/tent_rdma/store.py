"""How many connections a NIC keeps, and which of this side's makes room for another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from tent_core.errors import TransportError
from tent_rdma.connection import Connection, State
from tent_rdma.nic import Nic
from tent_rdma.sieve import Sieve
from tent_rdma.verbs import VerbsError

T = TypeVar("T")


class Full(TransportError):
    """No room for another connection on a NIC, and none that could be let go."""

    scarce = True
    """Idle peers may hold what is lacking: as of a VerbsError."""


class _Store:
    def __init__(self) -> None:
        self.count = 0
        """Connections on the NIC, whoever began them, from before they are made until they are destroyed."""
        self.ours: set[Connection] = set()
        """Those that this side began, ready or on their way out."""
        self.sieve: Sieve[Connection] = Sieve()
        """Those of them that may be evicted."""


class Stores:
    """The connections on every NIC. Thread-safe; its lock is a leaf, nothing is made or destroyed under it.

    `evict(connection)` destroys one that was retired (`Connection.retire`); it is called from the thread that
    needs the room.
    """

    def __init__(self, nics: Sequence[Nic], most: int, evict: Callable[[Connection], None]) -> None:
        self._most = most
        self._evict = evict
        self._lock = threading.Lock()
        self._stores = {nic.index: _Store() for nic in nics}
        self._stuck: set[Connection] = set()

    def make(self, nic: Nic, make: Callable[[], T]) -> T:
        """Call `make` with room for one more connection; evicts one of ours at the cap, or when it fails for
        lack of resources, and then tries once more. Raises Full, and what `make` raises."""
        store = self._stores[nic.index]
        self.clear_away()
        while not self._reserve(store):
            if not self._let_one_go(nic):
                raise Full(
                    f"{nic.name} keeps {self._most} connections, and none of them is idle and this side's "
                    "to close; raise max_connections, or let peers go"
                )
        try:
            try:
                return make()
            except VerbsError as error:
                if not error.scarce or not self._let_one_go(nic):
                    raise
            return make()
        except BaseException:
            self.freed(nic)
            raise

    def ready(self, connection: Connection) -> None:
        """It was made by `make`, and may be evicted when it is idle."""
        with self._lock:
            store = self._stores[connection.nic.index]
            store.ours.add(connection)
            store.sieve.add(connection)

    def touch(self, connection: Connection) -> None:
        """It is used. Takes no lock."""
        self._stores[connection.nic.index].sieve.touch(connection)

    def gone(self, connection: Connection) -> None:
        """One is destroyed, or was to be: where a queue pair is left, it keeps its place until it is."""
        with self._lock:
            store = self._stores[connection.nic.index]
            store.sieve.discard(connection)
            if connection.lanes:
                self._stuck.add(connection)
                return
            self._stuck.discard(connection)
            if connection in store.ours:
                store.ours.discard(connection)
                store.count -= 1

    def clear_away(self) -> int:
        """Try again to destroy what could not be; how many connections are left. Waits for verbs only."""
        if self._stuck:
            with self._lock:
                stuck = list(self._stuck)
            for connection in stuck:
                connection.destroy(0)
                self.gone(connection)
        return len(self._stuck)

    @property
    def stuck(self) -> int:
        """Connections of this side's with a queue pair that could not be destroyed yet."""
        return len(self._stuck)

    def freed(self, nic: Nic) -> None:
        """One that never was ready, or a peer's, is no more."""
        with self._lock:
            self._stores[nic.index].count -= 1

    def counts(self) -> dict[int, int]:
        """Connections by NIC."""
        with self._lock:
            return {index: store.count for index, store in self._stores.items()}

    def _reserve(self, store: _Store) -> bool:
        with self._lock:
            if store.count >= self._most:
                return False
            store.count += 1
            return True

    def _let_one_go(self, nic: Nic) -> bool:
        store = self._stores[nic.index]
        busy: list[Connection] = []
        try:
            while True:
                with self._lock:
                    victim = store.sieve.victim(lambda c: c.state is State.READY and not c.busy)
                    if victim is None:
                        return False
                    store.sieve.discard(victim)  # nobody else is to choose it
                if victim.retire():
                    self._evict(victim)
                    return True
                busy.append(victim)
        finally:
            with self._lock:
                for connection in busy:
                    if connection in store.ours and connection.state is State.READY:
                        store.sieve.add(connection)
