"""The transport as the engine sees it: an instance of the library, what it shows to peers, and its end."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tent_core import address as addresses
from tent_core.descriptor import PeerKey
from tent_core.errors import ClosedError, TransportError, TransportUnavailable, Unreachable
from tent_core.log import RateLimited
from tent_core.serial import SerialQueue
from tent_core.topology import Topology
from tent_core.transport import Endpoint, LocalBuffer, Peer, Transport, TransportContext
from tent_core.types import Capabilities, MemoryKind
from tent_mpcomm.adapter import Adapter, Comm
from tent_mpcomm.attribute import HandshakeAddress, Malformed, check_host, decode
from tent_mpcomm.endpoint import MpcommEndpoint
from tent_mpcomm.environment import OF_THIS_PROCESS, Environment, settle
from tent_mpcomm.ledger import Ledger
from tent_mpcomm.links import Instance
from tent_mpcomm.poller import Poller
from tent_mpcomm.publication import Publication
from tent_mpcomm.settings import Settings
from tent_mpcomm.usage import Usage

NAME = "mpcomm"

_PORT_TRIES = 8
_TURN_S = 10.0
_REPLACE_TRIES, _REPLACE_PAUSE_S = 3, 0.5
_STOP_S = 0.5
_REPORT_S = 0.05
_GREETING_S = 1.0
_HELLO = re.compile(rb"[0-9a-f]{16}\.[0-9]{1,9}")


class MpcommTransport(Transport):
    """Drives one instance of the library at a time.

    Threads: the poller; made lazily, one that connects and asks for keys for those who do not wait, and one
    that makes the library anew.

    Locks, in order: `_turn`, held by whoever changes what the library knows of this engine's memory, or
    replaces the instance; `_state`, a leaf, which guards `usage` and `instance`. No lock is held while a
    transfer is submitted or looked at, nor while a connection is made.
    """

    def __init__(self, adapter: Adapter, environment: Environment = OF_THIS_PROCESS) -> None:
        """The library is handed in; `environment` is that of the process but in tests."""
        self._adapter = adapter
        self._environment = environment
        self._context: TransportContext | None = None
        self._give_back: Callable[[], None] | None = None
        self._values: Mapping[str, str] = {}
        self._devices = ""
        self._publication = Publication()
        self._turn = threading.Lock()
        self._state = threading.Condition(threading.Lock())
        self._endpoints: set[MpcommEndpoint] = set()
        self._stopped = False
        self._process = os.getpid()
        self._later = SerialQueue("tent-mpcomm-connect")
        self._anew = SerialQueue("tent-mpcomm-anew")
        self._running = False
        self._settings = Settings()
        self.instance: Instance
        self.obstacle = ""
        """Why nothing can be carried any more, if so."""
        self.postings = Ledger()
        self.poller: Poller

    # ---------------------------------------------------------------- the contract

    def start(self, context: TransportContext) -> None:
        if self._adapter.obstacle:
            raise TransportUnavailable(self._adapter.obstacle)
        self.log = context.log
        self._context = context
        if self._adapter.warning:
            context.log.warning("mpcomm_version_unknown", reason=self._adapter.warning)
        self._settings, self._values = settle(context.settings, os.environ)
        settings = self._settings
        self._devices = "" if settings.nic_filter is not None else device_list(context.topology)
        self._advertise_host = _advertised(settings.advertise_host or context.advertise_host)
        self._usage = Usage(settings.max_retained)
        self._warnings = RateLimited(context.log, by=("reason",))
        self.window = settings.window
        self.retire_after = settings.retire_after
        self.connect_timeout = settings.connect_timeout
        self.pace = (settings.spin / 1e6, settings.poll_interval / 1e6)
        self._give_back = self._environment.claim(self._values)
        self.instance = Instance(self._make())
        self.poller = Poller(*self.pace, context.log)
        self.poller.start()
        self._running = True
        self._publish()
        if addresses.is_loopback(context.listen_host):
            context.log.warning(
                "mpcomm_listens_on_all_interfaces",
                port=self.instance.comm.port,
                engine_listens=context.listen_host,
                advice="it hands out keys to anybody: keep it behind a firewall",
            )

    def capabilities(self, declared: Capabilities) -> Capabilities:
        if self._settings.gpu:
            return declared
        pairs = frozenset(p for p in declared.memory_pairs if MemoryKind.GPU not in p)
        return replace(declared, memory_pairs=pairs)

    def add_buffers(self, buffers: Sequence[LocalBuffer]) -> Sequence[bytes | None]:
        with self._taking_turn("register memory"):
            return [None if self.obstacle else self._add(buffer) for buffer in buffers]

    def connect(self, peer: Peer) -> Endpoint:
        self.address_of(peer)  # or it is no candidate at all
        endpoint = MpcommEndpoint(self, peer)
        with self._state:
            self._endpoints.add(endpoint)
        return endpoint

    def bootstrap(self, peer: PeerKey, payload: bytes) -> bytes:
        """A peer is about to connect: say which instance runs. It comes before the library's own handshake,
        which nobody would see here, and whose caller cannot give it up."""
        if not _HELLO.fullmatch(payload):
            raise TransportError(f"{payload[:64]!r} is no greeting of tent-mpcomm")
        with self._state:
            self._state.wait_for(
                lambda: self._stopped or self.obstacle or not self._usage.replacing, _GREETING_S
            )
            if self._stopped or not self._usage.announced(peer, payload.decode("ascii")):
                raise TransportError(
                    self.obstacle or "MPComm is being made anew, or stops; try again"
                )
            return self.instance.life.encode("ascii")

    def remove_buffer(self, buffer: LocalBuffer, timeout: float) -> None:
        patience = max(timeout / 2, timeout - _REPORT_S)  # so that the reason is heard in time
        if using := self.postings.wait_unused(buffer.id, patience):
            raise TransportError(
                f"MPComm still has {using} batches under way that use buffer {buffer.name!r}, and cannot be "
                "told to give them up: its memory stays alive; unregister it again later"
            )
        with self._taking_turn("unregister memory", timeout):
            if self.obstacle:
                return  # nothing is registered any more
            self._publication.remove(self.instance.comm, buffer)

    def release(self, peer: PeerKey, reason: str) -> None:
        with self._state:
            self._usage.left(peer)
        self._replace_if_due()

    def stop(self) -> None:
        if self._stopped or os.getpid() != self._process:
            return  # in a forked child the library's threads do not exist
        with self._state:
            self._stopped = True
            self._state.notify_all()
        context = self._context
        if context is not None and self._running:
            context.publish(None)
            for endpoint in list(self._endpoints):
                endpoint.close("the engine stops")
            self._later.close(_STOP_S)
            self._anew.close(_STOP_S)
            if self.postings.wait_unused(None, _STOP_S):
                context.log.warning("mpcomm_transfers_outlive_stop", batches=len(self.postings))
            if self.poller.stop(_STOP_S) is None:
                context.log.error("mpcomm_thread_did_not_stop", seconds=_STOP_S)
            for posting in self.postings.all():
                posting.release_all()
            self.instance.comm.close()
            self._warnings.flush()
        if self._give_back is not None:
            self._give_back()
            self._give_back = None

    def holdings(self) -> Mapping[str, int]:
        if not self._running or self._stopped:
            return {}
        with self._state:
            usage = self._usage
            return {
                "threads": 1,
                "ranges": len(self._publication),
                "outgoing_connections": usage.outgoing,
                "incoming_connections": usage.incoming,
                "retained_connections": usage.retained,
                "under_way": len(self.postings),
            }

    # ---------------------------------------------------------------- for endpoints

    def begin(self, deadline: float) -> Instance | None:
        """The instance, which is not replaced until `end`; None if it is just being replaced until then."""
        with self._state:
            while not self._usage.begin():
                left = min(deadline - time.monotonic(), _TURN_S)
                if self.obstacle or left <= 0 or not self._state.wait(left):
                    return None
            return self.instance

    def end(self) -> None:
        """A use has ended."""
        with self._state:
            self._usage.end()
            due = self._usage.users == 0 and self._usage.over
        if due:
            self._replace_if_due()

    def used(self, instance: Instance, host_id: str) -> None:
        """An endpoint has a connection."""
        with self._state:
            if instance is self.instance:
                self._usage.connected(host_id)

    def unused(self, instance: Instance, host_id: str) -> None:
        """No endpoint uses it any more; the library keeps it."""
        with self._state:
            if instance is self.instance:
                self._usage.unused(host_id)

    def closed(self, endpoint: MpcommEndpoint) -> None:
        """An endpoint is gone."""
        with self._state:
            self._endpoints.discard(endpoint)
        self._replace_if_due()

    def address_of(self, peer: Peer) -> tuple[HandshakeAddress, bool]:
        """Where a peer's handshake port is now, and whether the peer said so itself. Raises Unreachable."""
        segment = peer.segment
        attribute = segment.attributes.get(NAME)
        try:
            if attribute is not None:
                address = decode(attribute.payload)
            elif self._settings.remote_port is not None:
                host = addresses.parse(segment.name).host
                address = HandshakeAddress(check_host(host), self._settings.remote_port)
            else:
                raise Unreachable(
                    f"peer {peer.key} publishes no handshake address of MPComm; if it runs one all the same, "
                    "set `remote_port` here"
                )
        except (Malformed, addresses.AddressError) as error:
            raise Unreachable(f"peer {peer.key}: {error}") from error
        same = self._get_context().host.same_machine(segment.host)
        if addresses.is_loopback(address.host) and not same:
            raise Unreachable(
                f"peer {peer.key} advertises {address}, which is loopback, and is on another machine: set "
                "`advertise_host` there"
            )
        return address, attribute is not None

    def later(self, call: Callable[[], None]) -> None:
        """Run what connects, in a thread of the transport's. Raises TransportError once it stops."""
        try:
            self._later.submit(call)
        except ClosedError as error:
            raise TransportError("the transport mpcomm has stopped") from error

    # ---------------------------------------------------------------- the instance

    def _make(self) -> Comm:
        """An instance of the library at the port that was asked for, or at one that is free."""
        context, wanted = self._get_context(), self._settings.listen_port
        host_id = f"{context.key.name}#{context.key.incarnation.hex()}"
        refusal: TransportError | None = None
        for _ in range(1 if wanted else _PORT_TRIES):
            port = wanted or _free_port()
            try:
                with self._environment.applied(self._values):
                    return self._adapter.make(host_id, self._devices, port)
            except TransportError as error:
                refusal = error
                if not _taken(port):
                    break
        if wanted and _taken(wanted):
            raise TransportUnavailable(
                f"port {wanted} is taken, and MPComm listens on all interfaces: set `listen_port` to "
                f"another, or leave it out for any that is free ({refusal})"
            ) from refusal
        raise TransportUnavailable(
            f"{refusal}; devices: {self._devices or 'the library chooses'}. Does `gid_index` fit them? "
            "See its own log, and `tent doctor`"
        ) from refusal

    def _publish(self) -> None:
        context, settings, comm = self._get_context(), self._settings, self.instance.comm
        address = HandshakeAddress(self._advertise_host, settings.advertise_port or comm.port)
        context.publish(address.encode())
        context.log.info(
            "mpcomm_started",
            version=self._adapter.version,
            port=comm.port,
            advertised=str(address),
            devices=comm.devices,
        )

    def _replace_if_due(self) -> None:
        with self._state:
            if self._stopped or not self._usage.try_replace():
                return
        with contextlib.suppress(ClosedError):  # it stops, and so does everything that is kept
            self._anew.submit(self._replace)

    def _replace(self) -> None:
        """Nobody uses the instance, and it keeps too much of those who did: make another one."""
        context = self._get_context()
        with self._turn:
            self.instance.comm.close()
            made = self._made_again()
            if made is None:
                return
            refused = self._publication.restore(made.comm)
            with self._state:
                stopped = self._stopped
                if not stopped:
                    self.instance = made
        if stopped:
            made.comm.close()
            return
        self._publish()  # before anybody is told that it is there
        with self._state:
            freed = self._usage.retained
            self._usage.replaced()
            self._state.notify_all()
        context.log.info("mpcomm_made_anew", freed_connections=freed)
        for reason in refused:
            self._warnings.warning("mpcomm_memory_declined", reason=reason)

    def _made_again(self) -> Instance | None:
        """Another instance; None when that cannot be had, and this transport carries nothing any more."""
        reason = ""
        for attempt in range(_REPLACE_TRIES):
            if attempt:
                with self._state:
                    self._state.wait_for(lambda: self._stopped, _REPLACE_PAUSE_S)
            try:
                return Instance(self._make())
            except TransportUnavailable as error:
                reason = str(error)
        context = self._get_context()
        context.publish(None)
        context.log.error("mpcomm_not_made_anew", reason=reason)
        with self._state:
            self.obstacle = f"MPComm could not be made anew here: {reason}"
            self._state.notify_all()
        return None

    # ---------------------------------------------------------------- the rest is private

    def _get_context(self) -> TransportContext:
        assert self._context is not None
        return self._context

    @contextmanager
    def _taking_turn(self, doing: str, timeout: float = _TURN_S) -> Iterator[None]:
        if not self._turn.acquire(timeout=timeout):
            raise TransportError(f"MPComm cannot {doing} yet: it is being made anew; try again")
        try:
            yield
        finally:
            self._turn.release()

    def _add(self, buffer: LocalBuffer) -> bytes | None:
        try:
            self._publication.add(self.instance.comm, buffer)
        except TransportError as error:
            self._warnings.warning(
                "mpcomm_memory_declined", reason=str(error), buffer=buffer.name, bytes=buffer.length
            )
            return None
        return b""


def device_list(topology: Topology) -> str:
    """The RDMA devices with a port that is up, as the library takes them; "" leaves the choice to it."""
    return ",".join(
        device.name
        for device in topology.rdma_devices
        if any(port.state == "ACTIVE" for port in device.ports)
    )


def _advertised(host: str) -> str:
    try:
        return check_host(host)
    except Malformed as error:
        raise TransportUnavailable(
            f"{error}; set `advertise_host` of mpcomm to an IPv4 address of this host"
        ) from error


def _free_port() -> int:
    """A port that nobody has at this moment. The library takes 0 for its default port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _taken(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
        return False
