"""The transport as the engine sees it: the receiver process, the thread that watches it, the endpoints."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from tent_core import address
from tent_core.descriptor import PeerKey, SegmentDescriptor
from tent_core.errors import TransportError, TransportUnavailable, Unreachable
from tent_core.log import RateLimited
from tent_core.transport import Endpoint, LocalBuffer, Peer, Transport, TransportContext
from tent_core.types import Permission
from tent_tcp.dialing import Target
from tent_tcp.endpoint import NAME, TcpEndpoint, make_target
from tent_tcp.mover import Mover
from tent_tcp.process import ReceiverProcess
from tent_tcp.protocol import SECRET_SIZE, STOPPED, Attribute, Malformed, parse_fence
from tent_tcp.reactor import Reactor
from tent_tcp.receiver.orders import MAX_DESCRIPTORS
from tent_tcp.syscalls import allow_ptrace_by_children

_START_S = 25.0
_ORDER_S = 5.0
_RELEASE_S = 0.9
_STOP_S = 0.5
_BACKLOG = 1024
_TOKEN_SIZE = 16

_listening: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Ports that no receiver serves yet. A forked child that kept one would keep it open after this process."""


def _close_in_forked_child() -> None:
    for listener in list(_listening):
        listener.close()


os.register_at_fork(after_in_child=_close_in_forked_child)


class TcpTransport(Transport):
    """One receiver process and two threads, however many peers; see the README for the picture.

    One thread listens to the receiver, so that a revocation never waits for anything else; its id also tells
    the receiver whose memory it reaches. The other carries what nobody waits for in a thread of theirs, and
    runs the callbacks of those who submitted it.

    The receiver, and the thread that listens to it, start with the first buffer that peers may reach: an
    engine that only reads from and writes to others needs neither.
    """

    def __init__(self) -> None:
        self._context: TransportContext | None = None
        self._link: Reactor | None = None
        self._carrier: Reactor | None = None
        self._receiver: ReceiverProcess | None = None
        self._mover: Mover | None = None
        self._endpoints: set[TcpEndpoint] = set()
        self._listener: socket.socket | None = None
        self._private: dict[int, LocalBuffer] = {}
        self._obstacle = ""
        self._stopped = False
        self._process = os.getpid()

    def start(self, context: TransportContext) -> None:
        self._context = context
        settings = context.settings
        self._warnings = RateLimited(context.log, by=("reason",))
        self._listener, advertised = self._listen(context)
        _listening.add(self._listener)
        self._carrier = Reactor("tent-tcp-carrier", context.log)
        self._carrier.start()
        self._mover = Mover(self._carrier, settings)
        # What the receiver reads first, to see whether it reaches this memory, and whose it is.
        self._page = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN_SIZE), _TOKEN_SIZE)
        self._secret = secrets.token_bytes(SECRET_SIZE)
        context.publish(Attribute(self._secret, advertised).encode())
        context.log.info("tcp_listens", address=advertised)

    def add_buffers(self, buffers: Sequence[LocalBuffer]) -> Sequence[bytes | None]:
        if self._receiver is None:
            if all(b.permission is Permission.LOCAL_READ_WRITE for b in buffers):
                self._private.update((b.id, b) for b in buffers)
                return [b"" for _ in buffers]
            self._start_receiver()
            # Peers that ask for these are told that they may not.
            private = [b for b in self._private.values() if b.memory_fd >= 0 or not self._obstacle]
            self._private.clear()
            self._add_all(private)
        served = [b.memory_fd >= 0 or not self._obstacle for b in buffers]
        if not all(served):
            self._warnings.warning(
                "tcp_registered_memory_declined", reason=self._obstacle, buffers=served.count(False)
            )
        self._add_all([b for b, serve in zip(buffers, served, strict=True) if serve])
        return [b"" if serve else None for serve in served]

    def connect(self, peer: Peer) -> Endpoint:
        assert self._mover is not None
        endpoint = TcpEndpoint(
            peer,
            self._get_context().settings,
            self._mover,
            self._target,
            self._endpoints.discard,
        )
        self._endpoints.add(endpoint)
        return endpoint

    def bootstrap(self, peer: PeerKey, payload: bytes) -> bytes:
        """A peer has lost a stream, and asks that nothing of it be written any more.

        A receiver that has ended writes nothing. One that does not answer is left alone: it may only be short
        of processor time, and to end it would take every other peer's streams away; so the write that was
        lost stays of unknown outcome until it answers.
        """
        try:
            stream, seconds = parse_fence(payload)
        except Malformed as error:
            raise TransportError(f"tcp: a message of peer {peer}: {error}") from None
        receiver = self._receiver
        if receiver is not None and not receiver.ended:
            seconds = min(seconds, _ORDER_S)
            deadline = time.monotonic() + seconds
            try:
                receiver.order(
                    "fence",
                    seconds,
                    name=peer.name,
                    incarnation=peer.incarnation.hex(),
                    stream=stream.hex(),
                )
            except TransportError:
                if not receiver.ends(deadline - time.monotonic()):
                    raise
        return STOPPED

    def remove_buffer(self, buffer: LocalBuffer, timeout: float) -> None:
        self._private.pop(buffer.id, None)
        receiver = self._receiver
        if receiver is None or receiver.ended:
            return  # a process that has ended touches nothing
        try:
            receiver.order("remove", timeout, buffer=buffer.id, generation=buffer.generation)
        except TransportError:
            if not receiver.ended:
                raise

    def release(self, peer: PeerKey, reason: str) -> None:
        receiver = self._receiver
        if receiver is not None and not receiver.ended:
            receiver.order(
                "release", _RELEASE_S, name=peer.name, incarnation=peer.incarnation.hex()
            )

    def stop(self) -> None:
        if self._stopped or os.getpid() != self._process:
            return  # a forked child shares the sockets; to shut them down would be to end its parent's
        self._stopped = True
        context, receiver = self._context, self._receiver
        if context is not None and self._mover is not None:
            context.publish(None)
        if self._listener is not None:
            self._listener.close()
        for endpoint in list(self._endpoints):
            endpoint.close("the engine stops")
        if receiver is not None:
            receiver.stop(_STOP_S)
        if self._mover is not None:
            self._mover.close_all("the transport tcp has stopped")
        for reactor in (self._carrier, self._link):
            if reactor is not None and not reactor.stop(_STOP_S) and context is not None:
                context.log.error("tcp_thread_did_not_stop", thread=reactor.name, seconds=_STOP_S)
        if receiver is not None:
            receiver.close()

    def holdings(self) -> Mapping[str, int]:
        receiver = self._receiver
        if self._mover is None or self._stopped:
            return {}
        counters = {} if receiver is None or receiver.ended else receiver.counters.read()
        return {
            "threads": 1 if receiver is None else 2,
            "processes": int(receiver is not None and not receiver.ended),
            "endpoints": len(self._endpoints),
            "accepted_streams": counters.get("streams", 0),
        }

    # ---------------------------------------------------------------- the rest is private

    def _get_context(self) -> TransportContext:
        assert self._context is not None
        return self._context

    def _listen(self, context: TransportContext) -> tuple[socket.socket, str]:
        """The listening socket, and what to advertise: what was bound."""
        settings = context.settings
        host = address.parse_host(settings.listen or context.listen_host)
        own = host if settings.listen is not None and not address.is_wildcard(host) else None
        shown = address.parse_host(settings.advertise or own or context.advertise_host)
        try:
            family, _, _, _, where = address.look_up(
                host, settings.port, socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.create_server(
                where, family=family, backlog=_BACKLOG, dualstack_ipv6=_is_any(family, host)
            )
        except OSError as error:
            raise TransportUnavailable(_why_not_listening(host, settings.port, error)) from error
        return listener, str(address.Address(shown, listener.getsockname()[1]))

    def _start_receiver(self) -> None:
        """From now on peers are served. Raises TransportError; it may be tried again."""
        context, listener = self._get_context(), self._listener
        if listener is None:
            raise TransportError("the transport tcp has stopped")
        settings = context.settings
        link = Reactor("tent-tcp-link", context.log)
        task = link.start()
        receiver: ReceiverProcess | None = None
        try:
            receiver = ReceiverProcess(link, listener, self._heard, self._receiver_ended)
            pledge = receiver.pledge(_ORDER_S)
            answer = receiver.order(
                "serve",
                _START_S,
                task=task,
                page=ctypes.addressof(self._page),
                token=self._page.raw.hex(),
                pledge=pledge.hex(),
                secret=self._secret.hex(),
                handshake_s=settings.handshake_timeout,
                stall_s=settings.stall_timeout,
                socket_buffer=settings.socket_buffer,
                max_streams=settings.max_streams,
                spin_s=settings.receiver_spin / 1e6,
            )
        except (OSError, TransportError) as error:
            if receiver is not None:
                receiver.stop(_STOP_S)
            link.stop(_STOP_S)
            if receiver is not None:
                receiver.close()
            raise TransportError(
                f"the receiver process of tcp cannot be started: {error}"
            ) from error
        listener.close()  # the receiver alone holds it from now on
        self._listener, self._link, self._receiver = None, link, receiver
        self._obstacle = self._overcome(answer["obstacle"])
        context.log.info("tcp_receiver_started", pid=receiver.pid)

    def _overcome(self, obstacle: str) -> str:
        """Why the receiver cannot reach registered memory, after what can be done about it was done."""
        if not obstacle:
            return ""
        assert self._receiver is not None
        with contextlib.suppress(OSError):
            allow_ptrace_by_children()
            answer = self._receiver.order("probe", _ORDER_S, token=self._page.raw.hex())
            obstacle = answer["obstacle"]
        if obstacle:
            self._get_context().log.warning("tcp_registered_memory_not_offered", reason=obstacle)
        return obstacle

    def _add_all(self, buffers: Sequence[LocalBuffer]) -> None:
        for start in range(0, len(buffers), MAX_DESCRIPTORS):
            self._add(buffers[start : start + MAX_DESCRIPTORS])

    def _add(self, buffers: Sequence[LocalBuffer]) -> None:
        assert self._receiver is not None
        descriptors: list[int] = []
        rows = []
        for b in buffers:
            position = -1
            if b.memory_fd >= 0:
                position = len(descriptors)
                descriptors.append(b.memory_fd)
            rows.append([b.id, b.generation, b.address, b.length, int(b.permission), position])
        answer = self._receiver.order("add", _ORDER_S, descriptors, buffers=rows)
        if answer["failed"]:
            for b in buffers:
                self.remove_buffer(b, _ORDER_S)
            buffer, reason = answer["failed"][0]
            raise TransportError(f"the receiver cannot serve buffer {buffer}: {reason}")

    def _target(self, snapshot: SegmentDescriptor) -> Target:
        context = self._get_context()
        attribute = snapshot.attributes.get(NAME)
        if attribute is None:
            raise Unreachable(f"peer {snapshot.key} does not serve tcp")
        same = context.host.same_machine(snapshot.host)
        key = context.key
        return make_target(context.settings, key.name, key.incarnation, same, attribute.payload)

    # ---------------------------------------------------------------- in the link's thread

    def _heard(self, message: dict[str, Any]) -> None:
        event = message.pop("event")
        if event == "receiver_failed":
            self._get_context().log.error("tcp_receiver_failed", **message)
        else:
            self._warnings.warning(f"tcp_{event}", **message)

    def _receiver_ended(self, reason: str) -> None:
        """Peers see their streams break; from now on they find no attribute. This side can still connect."""
        context = self._get_context()
        context.log.error(
            "tcp_receiver_ended", reason=reason, effect="peers cannot reach this engine by tcp"
        )
        context.publish(None)


def _is_any(family: socket.AddressFamily, host: str) -> bool:
    """Whether to take IPv4 as well: on the IPv6 wildcard address, where the machine can."""
    return family == socket.AF_INET6 and address.is_wildcard(host) and socket.has_dualstack_ipv6()


def _why_not_listening(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is taken; set `port` to another, or to 0 for any that is free"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine; set `listen` to one of its own"
    return f"cannot listen on {address.Address(host, port)}: {error}"
