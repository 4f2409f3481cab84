"""The contract between the engine and a transport, in the order in which it is called.

A transport package declares itself once (`TransportDeclaration`, returned by the `tent_transport` hook).
The engine then makes one `Transport` per engine and calls:

    start(context)                     once; raises TransportUnavailable when it cannot run here
    add_buffers([...])                 for every registration; answers what to publish for each
    connect(peer) -> Endpoint          at the first transfer to a peer that is a candidate
      endpoint.submit(work)            on the data path, from any thread, many at once
      endpoint.bind(requests) -> call  for one request that was prepared: what carries it out directly
      endpoint.refresh(old, new)       the peer published a new snapshot
      endpoint.close(reason)           the peer departed, was retired, or the engine stops
    bootstrap(peer, payload) -> bytes  the other side's `peer.bootstrap`, answered here
    exchange(peer, message) -> Future  with the capability `notifications`: carry one of the engine's messages
    remove_buffer(buffer)              an unregistration: nothing of ours may touch the memory afterwards
    release(peer, reason)              the peer departed: free what its side made here
    stop()                             once; after it nothing of the transport is left

Threads: `submit` comes from application threads, `bootstrap`, `exchange` and the rest from threads of the
engine: one call at a time of each of these three, and many at once of `submit`. No lock of the engine is held
during any call. A transport owns its threads and processes; their number does not grow with peers, and none
outlives the engine however it dies. Nothing may wait without a deadline.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tent_core.descriptor import HostIdentity, PeerKey, SegmentDescriptor
from tent_core.types import Capabilities, Permission
from tent_core.work import Requests, Work

if TYPE_CHECKING:
    from tent_core.log import Logger
    from tent_core.models import Model
    from tent_core.topology import Topology

Resume = Callable[[Work], None]
"""Goes on with one request that a bound call has started: like `submit` of the work that it is given, except
that nothing has to be started any more."""

BoundCall = Callable[[], "bool | Resume"]
"""Carries out one request, in the calling thread; many threads may call at once. True: every byte is where it
belongs, and its owner sees it. False: nothing of it has been started, or what has can move no more bytes, so
that `submit` may begin from the start. A Resume: it takes longer than a call should keep its thread, about a
hundred microseconds beside the copying; the core hands it a work then. Raises as `submit` does."""

API_VERSION = (1, 0)
"""Major and minor version of this contract; a plugin of another major version is not loaded."""

EXCHANGE_LIMIT = (64 << 10) - 32
"""Bytes of a message, or of its answer, that the engine gives a transport to carry: 64 KiB less room for a
header of the transport's."""


@dataclass(frozen=True, slots=True)
class TransportDeclaration:
    """What a package says of its transport when it is asked.

    `name` must equal the entry-point name, `number` is wire-stable or private (1000 to 1999). `factory`
    makes a transport that has done nothing yet. `settings` is a `tent_core.section.Section`,
    or a pydantic model class with `extra="forbid"`, which has every engine that uses it import pydantic: it
    checks this transport's part of the YAML, without `enable`, which is the core's.
    `obstacle` answers why the transport cannot run on this machine, with the remedy, or "" if it knows of
    nothing: `tent plugins` asks it; an engine asks `Transport.start`.
    """

    name: str
    number: int
    factory: Callable[[], Transport]
    settings: Model
    capabilities: Capabilities
    api_version: tuple[int, int] = API_VERSION
    summary: str = ""
    obstacle: Callable[[], str] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LocalBuffer:
    """One registered range of this engine, as transports see it, alive until `remove_buffer` returned.

    `memory_fd` is the descriptor of the memfd that backs memory made by `allocate` (the buffer starts at
    offset 0 of it and spans it whole, sealed against shrinking and growing), else -1.
    """

    id: int
    generation: int
    name: str
    address: int
    length: int
    location: str
    permission: Permission
    memory_fd: int = -1


class Peer(Protocol):
    """A live peer, as transports see it. Its identity never changes; its snapshot does."""

    @property
    def key(self) -> PeerKey: ...

    @property
    def segment(self) -> SegmentDescriptor:
        """The newest snapshot known."""
        ...

    def bootstrap(self, payload: bytes, timeout: float) -> bytes:
        """Hand `payload` to this transport's `bootstrap` at the peer; its answer. Raises TransportError."""
        ...

    def begin_bootstrap(self, payload: bytes, timeout: float) -> Future[bytes]:
        """The same without waiting. The future is resolved in a thread of the engine that must not be kept;
        after `timeout`, and a second, count it as failed. Raises, or fails with, TransportError."""
        ...

    def suspect(self, cause: Exception) -> None:
        """Tell the engine that the peer seems to have gone (a stream broke, its process ended)."""
        ...


class TransportContext(Protocol):
    """What an engine gives to each of its transports."""

    @property
    def key(self) -> PeerKey:
        """Name and incarnation of this engine."""
        ...

    @property
    def host(self) -> HostIdentity: ...

    @property
    def settings(self) -> Any:
        """An instance of the declared settings model."""
        ...

    @property
    def topology(self) -> Topology: ...

    @property
    def log(self) -> Logger:
        """Bound to engine and transport."""
        ...

    @property
    def advertise_host(self) -> str:
        """The host that this engine advertises; a transport does so too unless its settings say otherwise."""
        ...

    @property
    def listen_host(self) -> str:
        """The address on which the engine listens (loopback unless told otherwise)."""
        ...

    def publish(self, payload: bytes | None) -> None:
        """Set (or with None withdraw) this transport's attribute of the segment."""
        ...

    def notified(self, peer: PeerKey, message: bytes) -> bytes:
        """A message arrived that the engine of `peer` gave to `Transport.exchange`; the answer to send back.

        From any thread but one that `exchange` or the answer of an exchange needs; waits for the control
        thread, at most a second or two. Raises TransportError for what is no message of this peer (say so to
        the other side, whose `exchange` then fails) and once the engine closes. The same message may come
        twice, and after it was given up.
        """
        ...


class Endpoint(abc.ABC):
    """All that a transport keeps for one live peer. Made by `Transport.connect`, owned by the engine."""

    @abc.abstractmethod
    def submit(self, work: Work) -> None:
        """Start (and if `work.may_block`, maybe finish) the requests. From any thread, many at once.

        What is neither refused (`work.refuse`) nor covered by an exception is accepted, and will be
        reported exactly once. Raising TransportError refuses all of it: nothing may have been started.
        The engine keeps every buffer involved alive, and refuses revocations, until all is reported.
        """

    def bind(self, requests: Requests) -> BoundCall | None:
        """A call that carries out this one request, again and again, with as little as can be between the
        application and the bytes; None if `submit` does as well, as for long ones.

        An offer: it is called for requests that an application prepared, of a length that it will post again,
        and may cost a little. The call is made while every buffer involved is alive and the endpoint open, as
        `submit` is, and never with a deadline of the application's: what takes long it leaves to a Resume.
        """
        return None

    def cancel(self, work: Work) -> None:
        """`work.cancelled` was just set: interrupt what is under way, if that can be done. Best effort, from
        any thread; its requests are still reported, what did not complete with Status.CANCELED."""

    def refresh(self, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        """The peer's snapshot changed. Buffers gone from `new`, or REVOKING in it, have no work in flight:
        let go of them (unmap, forget keys) before returning, since the acknowledgement follows."""

    @abc.abstractmethod
    def close(self, reason: str) -> None:
        """Release everything within a second: fail what is pending, close sockets, unmap. Idempotent.

        Called from another thread than those in `submit`: interrupt them, let each clean up what it uses.
        """

    def holdings(self) -> Mapping[str, int]:
        """What is held for this peer, counted (streams, mappings, queue_pairs ...), for `engine.stats()`."""
        return {}


class Transport(abc.ABC):
    """One transport of one engine."""

    @abc.abstractmethod
    def start(self, context: TransportContext) -> None:
        """Make ready to serve and to connect. Raises TransportUnavailable with the reason and the remedy."""

    def capabilities(self, declared: Capabilities) -> Capabilities:
        """What it can do in this engine: what was declared, or less where its settings say so. Asked once,
        after `start`."""
        return declared

    def add_buffers(self, buffers: Sequence[LocalBuffer]) -> Sequence[bytes | None]:
        """Buffers were registered; answer, for each, the attribute to publish (b"" if there is nothing to
        say), or None where this transport cannot offer or use it. Raises TransportError for all."""
        return [b"" for _ in buffers]

    @abc.abstractmethod
    def connect(self, peer: Peer) -> Endpoint:
        """Make an endpoint for a peer whose snapshot carries this transport's attribute.

        Raises Unreachable when this transport can never reach that peer (another user, another host):
        it is then no candidate for it. Raises TransportError for what may pass.
        """

    def bootstrap(self, peer: PeerKey, payload: bytes) -> bytes:
        """Answer a peer's bootstrap message. The payload is from outside: check it. Raises TransportError."""
        raise NotImplementedError("this transport needs no bootstrap")

    def exchange(self, peer: PeerKey, message: bytes) -> Future[bytes] | None:
        """Carry an opaque message, EXCHANGE_LIMIT bytes at most, to the engine of `peer`; its answer.

        The transport there calls `TransportContext.notified`, and the future gets what that answered. Only
        asked of transports with the capability `notifications`; the control plane carries what they do not.
        None says that there is no channel to that peer now. A channel may be made by an endpoint that exists,
        and be used by both sides whoever made it; nothing is connected that would outlive that endpoint and,
        at the other side, `release`.

        Returns soon, without waiting for the peer. A future that fails, or has no answer after a quarter of a
        second, costs no more than that time: the control plane carries the same message then (it is
        numbered, so one that arrives after all changes nothing), and the transport is left alone for a
        while. Raises, or fails with, TransportError.
        """
        return None

    def remove_buffer(self, buffer: LocalBuffer, timeout: float) -> None:
        """The buffer is being unregistered. When this returns, no request that arrives here can touch it and
        none is touching it. Raises TransportError if that cannot be said within `timeout` seconds.

        With the capability `owner_checked` it is called before the peers have let go of the buffer, which is
        what stops them; without it after they have."""

    def release(self, peer: PeerKey, reason: str) -> None:
        """A peer that opened this engine departed or retired: free within a second what was made for it here.

        What this side opened hangs on the endpoint, which is closed apart."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Release everything, within two seconds. Idempotent; also called when `start` failed half-way."""

    def holdings(self) -> Mapping[str, int]:
        """What is held beside the endpoints, counted (threads, processes, accepted streams ...)."""
        return {}
