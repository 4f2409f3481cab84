"""What an engine says of its memory: immutable snapshots that peers hold copies of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from tent_core.types import BufferState, MemoryKind, Permission, memory_kind


def _nothing() -> Mapping[Any, Any]:
    return MappingProxyType({})


class PeerKey(NamedTuple):
    """Identity of a peer: the same name with another incarnation is another peer."""

    name: str
    incarnation: bytes  # 16 random bytes made when the engine starts

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation[:4].hex()}"


@dataclass(frozen=True, slots=True)
class Attribute:
    """An opaque payload of one transport, of a segment (an endpoint) or of a buffer (a key).

    Carries number and name: hosts that use one private number for different transports do not match.
    """

    number: int
    name: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """Which process on which machine this is. A pid alone is no identity.

    `boot_id` tells machines (and boots of one) apart, `pid_namespace` is the inode of the pid namespace,
    `start_time` is the process's start in clock ticks since boot (field 22 of /proc/PID/stat).
    """

    boot_id: str
    pid_namespace: int
    pid: int
    start_time: int

    def same_machine(self, other: HostIdentity) -> bool:
        """Whether both processes run under one kernel."""
        return bool(self.boot_id) and self.boot_id == other.boot_id


@dataclass(frozen=True, slots=True)
class BufferDescriptor:
    """One registered range as its owner publishes it.

    `(id, generation)` is the identity of a registration: ids are dense and reused, generations are not.
    `address` is in the owner's address space. `attributes` is keyed by transport name.
    """

    id: int
    generation: int
    name: str
    address: int
    length: int
    location: str
    permission: Permission
    state: BufferState = BufferState.LIVE
    attributes: Mapping[str, Attribute] = field(default_factory=_nothing)

    @property
    def end(self) -> int:
        """One past the last address."""
        return self.address + self.length

    @property
    def kind(self) -> MemoryKind:
        """The kind of memory at `location`."""
        return memory_kind(self.location)


@dataclass(frozen=True, slots=True)
class Device:
    """A NIC as the owner publishes it; `numa_node` is -1 where the machine does not say."""

    name: str
    numa_node: int = -1
    kind: str = "net"


@dataclass(frozen=True, slots=True)
class SegmentDescriptor:
    """An immutable snapshot of a segment. `version` grows by one with every change.

    `transports` are the names and numbers of those that run in that engine, whether they published an
    attribute or not. `attributes` is keyed by transport name, `buffers` by buffer id.
    """

    name: str
    incarnation: bytes
    version: int
    host: HostIdentity
    transports: Mapping[str, int] = field(default_factory=_nothing)
    attributes: Mapping[str, Attribute] = field(default_factory=_nothing)
    devices: tuple[Device, ...] = ()
    buffers: Mapping[int, BufferDescriptor] = field(default_factory=_nothing)

    @property
    def key(self) -> PeerKey:
        """The identity of the engine that offers this segment."""
        return PeerKey(self.name, self.incarnation)
