"""The wire-stable vocabulary: enums whose numbers travel between processes of different versions.

Numbers are never renumbered or reused; new ones are appended. `tests/test_types.py` pins each number,
its proto value and its YAML name by literal.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

PRIVATE_NUMBERS = range(1000, 2000)
"""Transport numbers that packages from outside may use without asking (mock is 1000)."""


class TransportType(enum.IntEnum):
    """Numbers of the transports that the wire contract knows. 1000 to 1999 are private use."""

    UNSPEC = 0
    RDMA = 1
    MNNVL = 2
    SHM = 3
    NVLINK = 4
    GDS = 5
    IO_URING = 6
    TCP = 7
    ASCEND = 8
    SUNRISE_LINK = 9
    TPU = 10
    UB = 11
    MPCOMM = 12


class Status(enum.IntEnum):
    """State of one task. COMPLETED means: every byte is where it belongs and its owner sees it."""

    INITIAL = 0
    PENDING = 1
    INVALID = 2
    CANCELED = 3
    COMPLETED = 4
    TIMEOUT = 5
    FAILED = 6

    @property
    def terminal(self) -> bool:
        """True when the task will never change again."""
        return self >= Status.INVALID


class Priority(enum.IntEnum):
    """Order in which queued work is served."""

    __hash__ = int.__hash__  # an enum's own is a function in Python, and these are in keys

    HIGH = 0
    MEDIUM = 1
    LOW = 2


class Intent(enum.IntEnum):
    """What a transfer is for; a policy entry may match on it."""

    __hash__ = int.__hash__  # an enum's own is a function in Python, and these are in keys

    UNSPEC = 0
    FOREGROUND_GET = 1
    BACKGROUND_PREFETCH = 2
    MIGRATION = 3
    CHECKPOINT = 4
    WEIGHT_LOADING = 5
    STAGING_INTERNAL = 6


class Permission(enum.IntEnum):
    """What peers may do with a buffer. The owner itself may always read and write it."""

    LOCAL_READ_WRITE = 0
    GLOBAL_READ_ONLY = 1
    GLOBAL_READ_WRITE = 2


class Opcode(enum.IntEnum):
    """Direction of a request, seen from the initiator."""

    READ = 0
    WRITE = 1


class BufferState(enum.IntEnum):
    """LIVE buffers may be used; REVOKING ones refuse every new request while old ones end."""

    LIVE = 0
    REVOKING = 1


class MemoryKind(enum.StrEnum):
    """The kinds of memory between which a transport can say that it moves bytes."""

    DRAM = "dram"
    GPU = "gpu"
    FILE = "file"


class Reach(enum.IntEnum):
    """How far a transport gets; each level includes the ones below it."""

    NONE = 0
    PROCESS = 1
    HOST = 2
    NETWORK = 3


class MemoryPair(NamedTuple):
    """A local and a remote kind of memory between which a transport moves bytes."""

    local: MemoryKind
    remote: MemoryKind


DRAM_TO_DRAM = frozenset({MemoryPair(MemoryKind.DRAM, MemoryKind.DRAM)})
DRAM_AND_GPU = frozenset(
    MemoryPair(local, remote)
    for local in (MemoryKind.DRAM, MemoryKind.GPU)
    for remote in (MemoryKind.DRAM, MemoryKind.GPU)
)
"""What a NIC moves that reaches GPU memory by itself."""


@dataclass(frozen=True, slots=True)
class Retained:
    """What a transport's library cannot free for a departed peer, so that it can be bounded and counted.

    `pinned_bytes` and `descriptors` are per departed peer; `what` says in words what stays.
    """

    what: str
    pinned_bytes: int = 0
    descriptors: int = 0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do. Everything defaults to no, and nothing is ever assumed.

    `owner_checked` says that the owner's side checks each request against what is registered at that
    moment (as tcp's receiver does), or can kill access by itself (as a deregistered RDMA key does): a
    revocation then need not wait for peers that can reach the memory only over such transports.
    `largest_request` is in bytes; None is no limit. `notifications` says that it may carry the engine's
    notifications (`Transport.exchange`).
    """

    memory_pairs: frozenset[MemoryPair] = frozenset()
    reach: Reach = Reach.NONE
    owner_checked: bool = False
    notifications: bool = False
    cancellation: bool = False
    bandwidth_estimate: bool = False
    nic_load: bool = False
    device_choice: bool = False
    qp_pools: bool = False
    partial_progress: bool = False
    self_scheduling: bool = False
    largest_request: int | None = None
    retained_per_peer: Retained | None = None

    def moves(self, local: MemoryKind, remote: MemoryKind) -> bool:
        """Whether bytes can go between `local` memory here and `remote` memory at the peer."""
        return MemoryPair(local, remote) in self.memory_pairs

    def touches(self, kind: MemoryKind) -> bool:
        """Whether memory of this kind can take part in any transfer of this transport."""
        return any(kind in pair for pair in self.memory_pairs)


def transport_number(name: str) -> int | None:
    """The number that the wire contract gives to the YAML name `name`, or None. Never UNSPEC's."""
    member = TransportType.__members__.get(name.upper()) if name == name.lower() else None
    return int(member) if member else None


def transport_name(number: int) -> str | None:
    """The YAML name of a number that the wire contract knows, or None. Unspec has no name to select."""
    try:
        member = TransportType(number)
    except ValueError:
        return None
    return member.name.lower() if member else None


def memory_kind(location: str) -> MemoryKind:
    """The kind of memory at a location such as `cpu:0`, `cuda:1`, `file:/kv` or `*` (any host memory)."""
    device = location.partition(":")[0]
    if device in ("cpu", "*"):
        return MemoryKind.DRAM
    return MemoryKind.FILE if device == "file" else MemoryKind.GPU
