"""What the control plane and the engine say to each other: settings read, calls made, facts handed over."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tent_core.descriptor import HostIdentity, PeerKey, SegmentDescriptor
from tent_core.errors import UsageError

PROTOCOL = 1
"""Version of the contract between engines; an engine of another one is refused when it connects."""

NOTIFICATION_LIMIT = (64 << 10) - 64
"""Bytes of name (UTF-8) and payload of one notification: 64 KiB less its header."""

RANGES_LIMIT = 16_384
"""Ranges that the checksums of one notification may cover: some 300 KiB on the wire at the most."""

REASON_LIMIT = 1000
"""Characters of the reason why a batch failed, in the notification that says so."""

RELEASE_S = 1.0
"""How long the answer to a goodbye waits for what was kept for the peer to be freed."""

BOOTSTRAP_LIMIT = 1 << 20
"""Bytes of a bootstrap payload or of its answer."""

INSPECT_LIMIT = 8 << 20
"""Bytes of the document that answers an inspection."""


class ControlSettings(Protocol):
    """The `control` section, as far as the control plane reads it. Times are seconds."""

    @property
    def listen(self) -> str:
        """Where to listen: `host:port`, `[v6]:port`; port 0 takes any."""
        ...

    @property
    def advertise(self) -> str | None:
        """What peers are told: a host or `host:port`; None is the address listened on."""
        ...

    @property
    def call_timeout_s(self) -> float:
        """Deadline of a call for which the caller gave none."""
        ...

    @property
    def keepalive_time_s(self) -> float:
        """How long a connection may be silent before it is pinged."""
        ...

    @property
    def keepalive_timeout_s(self) -> float:
        """How long an answer to a ping may take before the connection counts as broken."""
        ...

    @property
    def reconnect_max_s(self) -> float:
        """The longest pause between two attempts to reconnect."""
        ...


class PeerSettings(Protocol):
    """The `peers` section, as far as the control plane reads it."""

    @property
    def grace_s(self) -> float:
        """Seconds that a peer whose connection broke has to come back before it has departed."""
        ...

    @property
    def max(self) -> int:
        """The most sessions of peers that this engine keeps."""
        ...


class SessionState(enum.Enum):
    """State of a session that a peer opened here."""

    OPEN = "open"
    """Its watch stream is up."""
    BROKEN = "broken"
    """Its watch stream is not up (yet, or any more) and it is within its grace."""
    DEPARTED = "departed"
    """It has departed, but its process lives on this machine and may still touch our memory."""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session that a peer opened here, as it was when it was asked for.

    `acknowledged` is the version up to which the peer has let go of all that was taken away; a peer that
    has not been sent a snapshot yet has -1 there, and holds nothing. `transports` are names and numbers
    of those that run in the peer's engine. `idle_since` is when the peer, as it says, began to have no use
    for this engine, on the monotonic clock; None while it has one, or has not said.
    """

    session: int
    key: PeerKey
    host: HostIdentity
    transports: Mapping[str, int]
    acknowledged: int
    state: SessionState
    same_host: bool
    idle_since: float | None = None


@dataclass(frozen=True, slots=True)
class Notification:
    """A notification as it arrived. `sequence` grows per sender and session.

    `error` says why the data that it announces is not what the sender meant to move: the sender could not
    move all of it, or a checksum did not match. `verified`: all of it was compared with a checksum, and is
    right. A plain one announces nothing, and is neither.
    """

    sender: PeerKey
    name: str
    payload: bytes
    sequence: int
    error: str | None = None
    verified: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is known to be wrong with what it announces."""
        return self.error is None


@dataclass(frozen=True, slots=True)
class Checksum:
    """What ranges of one buffer of the receiver have to be: the CRC-32C of their bytes, one after the other.

    `offsets` and `lengths` are uint64 (n,), in bytes, within the buffer of that id and generation.
    """

    buffer: int
    generation: int
    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    value: int


def check_notification(name: str, payload: bytes) -> None:
    """Raise UsageError if these cannot be a notification."""
    try:
        size = len(name.encode()) + memoryview(payload).nbytes
    except (AttributeError, TypeError, UnicodeEncodeError):
        raise UsageError(
            f"a notification is a name, which has to be text, and a payload of bytes: found {name!r} and "
            f"{type(payload).__name__}"
        ) from None
    if size > NOTIFICATION_LIMIT:
        raise UsageError(
            f"a notification of {size} bytes, name included, is beyond {NOTIFICATION_LIMIT}: "
            "write the data to a buffer of the peer and notify where it is"
        )


class ControlHandler(Protocol):
    """What an engine does for peers that opened sessions to it.

    Called on the control thread, one call at a time: each must return at once, and may not call back into
    the control plane in a way that waits.
    """

    def bootstrap(
        self, peer: PeerKey, transport: str, number: int, payload: bytes
    ) -> Future[bytes]:
        """Hand `payload` to that transport; the future ends with its answer, or with the error to report."""
        ...

    def notification(self, note: Notification) -> bool:
        """Queue `note`. False: the queue is full, and the sender tries again until its deadline."""
        ...

    def verify(self, checksums: Sequence[Checksum]) -> Future[str | None]:
        """Compare own memory with `checksums`: what is wrong, in words, or None. Never fails."""
        ...

    def session_opened(self, info: SessionInfo) -> None:
        """A peer opened a session."""
        ...

    def session_departed(self, info: SessionInfo, reason: str) -> list[Future[None]] | None:
        """The peer of a session has departed: called exactly once for each that was opened.

        Its goodbye, or its next session, is answered when the futures have ended (or RELEASE_S later), so
        that it does not come back while what was kept for it is being freed.
        """
        ...

    def inspect(self) -> Future[bytes]:
        """What the engine knows of itself and its peers: a JSON document of at most INSPECT_LIMIT bytes."""
        ...


class ConnectionListener(Protocol):
    """What an engine learns of a peer that it opened. Called on the control thread: return at once.

    Calls may come before `ControlPlane.connect` has returned.
    """

    def updated(self, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        """The peer published a newer snapshot than the one last seen here."""
        ...

    def departed(self, reason: str) -> None:
        """The peer has departed: once, and nothing follows. Let go of it, then close the connection."""
        ...

    def asked_to_retire(self) -> None:
        """The peer needs room: if nothing here uses it, let go of it, then close the connection."""
        ...
