"""The memory that this engine has the library pin, and shows to peers: each address once."""

from __future__ import annotations

from collections.abc import Sequence

from tent_core.errors import TransportError
from tent_core.transport import LocalBuffer
from tent_core.types import Permission
from tent_mpcomm.adapter import Comm


class _Entry:
    """An address that the library knows; by (id, generation) of each buffer, whether peers may reach it."""

    __slots__ = ("length", "node", "published", "registered", "users")

    def __init__(self, length: int, node: int) -> None:
        self.length = length
        self.node = node
        self.users: dict[tuple[int, int], bool] = {}
        self.registered = True
        self.published = False


class Publication:
    """What is registered, in whichever instance of the library is the present one. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, comm: Comm, buffer: LocalBuffer) -> None:
        """Register and publish, before anybody is told of it. Raises TransportError; nothing is left."""
        entry = self._entries.get(buffer.address)
        if entry is None:
            entry = _Entry(buffer.length, node_of(buffer.location))
            comm.register(buffer.address, buffer.length)
            self._entries[buffer.address] = entry
        elif buffer.length > entry.length:
            # The library knows a range by its address. A longer one would need another key, and the old one
            # is in use: at peers, perhaps, where nobody can wait for it.
            raise TransportError(
                f"buffer {buffer.name!r} is {buffer.length} bytes long, and MPComm has {entry.length} bytes "
                "registered at the same address: unregister those first, or register the longer buffer first"
            )
        entry.users[buffer.id, buffer.generation] = (
            buffer.permission is not Permission.LOCAL_READ_WRITE
        )
        try:
            self._show(comm, buffer.address, entry)
        except TransportError:
            self.remove(comm, buffer)
            raise

    def remove(self, comm: Comm, buffer: LocalBuffer) -> None:
        """The buffer is gone; with the last one at its address the key dies. Raises TransportError: again."""
        entry = self._entries.get(buffer.address)
        if entry is None or (buffer.id, buffer.generation) not in entry.users:
            return
        if len(entry.users) > 1:
            del entry.users[buffer.id, buffer.generation]
            self._show(comm, buffer.address, entry)
            return
        if entry.published:
            comm.unpublish(buffer.address)
            entry.published = False
        if entry.registered:
            comm.unregister(buffer.address)
        del self._entries[buffer.address]

    def restore(self, comm: Comm) -> Sequence[str]:
        """Register and publish everything in a new instance; what it refuses, in words."""
        refused = []
        for address, entry in self._entries.items():
            entry.published = entry.registered = False
            try:
                comm.register(address, entry.length)
                entry.registered = True
                self._show(comm, address, entry)
            except TransportError as error:
                refused.append(str(error))
        return refused

    def _show(self, comm: Comm, address: int, entry: _Entry) -> None:
        wanted = entry.registered and any(entry.users.values())
        if wanted and not entry.published:
            comm.publish(address, entry.length, entry.node)
        elif entry.published and not wanted:
            comm.unpublish(address)
        entry.published = wanted


def node_of(location: str) -> int:
    """The NUMA node of host memory such as `cpu:1`; -1 for anything else."""
    kind, _, number = location.partition(":")
    return int(number) if kind == "cpu" and number.isdecimal() else -1
