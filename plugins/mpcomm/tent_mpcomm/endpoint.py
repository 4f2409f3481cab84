"""The way to one peer: which connection carries, who makes it, and what is under way on it."""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, NamedTuple

from tent_core.errors import TransportError
from tent_core.transport import Endpoint, Peer
from tent_core.work import Requests, Work
from tent_mpcomm.attribute import HandshakeAddress
from tent_mpcomm.links import Instance, Link
from tent_mpcomm.poller import Pace
from tent_mpcomm.registry import Connection, RangeId, coverage
from tent_mpcomm.transfers import Posting, Rows

if TYPE_CHECKING:
    from tent_mpcomm.transport import MpcommTransport

CLOSE_TIMEOUT_S = 0.9
_RENEWALS = 3
_POSTED_AT_ONCE = 4
"""Transfers that `submit` posts itself for a caller that does not wait: about 10 microseconds' worth."""


class _Renewed(TransportError):
    """The peer's library is another one than was connected to; its host id was replaced."""


class _Way(NamedTuple):
    instance: Instance
    link: Link
    connection: Connection


class MpcommEndpoint(Endpoint):
    """Carries requests to one peer.

    A submission whose ranges are covered by the keys at hand goes out at once. Any other one first makes the
    connection or asks for keys, once for all that wait: in its own thread if it waits anyway, else in one of
    the transport's.
    """

    def __init__(self, transport: MpcommTransport, peer: Peer) -> None:
        self._transport = transport
        self._peer = peer
        self._way: _Way | None = None
        self._closed = ""
        self._doubt(transport.instance)

    # ---------------------------------------------------------------- the data path

    def submit(self, work: Work) -> None:
        transport = self._transport
        wanted = work.requests.remote_generations.items()
        way = self._way
        instance = transport.begin(work.deadline if work.may_block else 0.0)
        if instance is not None:
            if (
                way is not None
                and way.instance is instance
                and way.connection.covers(wanted)
                and way.link.failures < transport.retire_after
                and not self._closed
            ):
                self._carry(work, way)
                return
            transport.end()
        if work.may_block:
            self._prepare_and_carry(work)
        else:
            transport.later(lambda: self._prepare_or_refuse(work))

    def _carry(self, work: Work, way: _Way) -> None:
        """Post it; the use of the instance that the caller began ends with its last transfer."""
        transport = self._transport
        posting = Posting(
            work,
            _rows(work.requests),
            way.instance.comm,
            way.link.host_id,
            transport.window,
            lambda posting, cause: self._ended(posting, way.link, cause),
        )
        transport.postings.add(posting, self)
        if self._closed:
            posting.give_up(self._closing())  # since nobody may have seen it
        if not work.may_block:
            if len(posting) <= _POSTED_AT_ONCE:
                posting.step()
            if not posting.over:
                transport.poller.add(posting)
            return
        pace = Pace(*transport.pace)
        while posting.waits:
            if posting.step():
                pace.moved()
            elif posting.waits:
                time.sleep(pace.next())
        if not posting.over:
            transport.poller.add(posting)

    def _ended(self, posting: Posting, link: Link, cause: TransportError | None) -> None:
        """The library holds nothing of a posting any more."""
        transport = self._transport
        transport.postings.discard(posting)
        if cause is None:
            link.failures = 0
        else:
            link.failures += 1
            if link.failures == 1 and not self._closed:
                self._peer.suspect(cause)
        transport.end()

    # ---------------------------------------------------------------- making ready

    def _prepare_or_refuse(self, work: Work) -> None:
        try:
            self._prepare_and_carry(work)
        except TransportError as error:
            work.refuse(error)
        except Exception as error:  # a mistake of ours: what it has started is unknown
            work.fail(TransportError(f"mpcomm raised {error!r}"), fenced=False)

    def _prepare_and_carry(self, work: Work) -> None:
        transport = self._transport
        deadline = min(work.deadline, time.monotonic() + 2 * transport.connect_timeout)
        instance = transport.begin(deadline)
        if instance is None:
            raise TransportError(transport.obstacle or "MPComm is being made anew here; try again")
        try:
            way = self._prepare(instance, work.requests.remote_generations.items(), deadline)
        except BaseException:
            transport.end()
            raise
        self._way = way
        self._carry(work, way)

    def _prepare(self, instance: Instance, wanted: AbstractSet[RangeId], deadline: float) -> _Way:
        for _ in range(_RENEWALS):
            link = instance.link(self._peer.key)
            if link.failures >= self._transport.retire_after:
                self._retire(instance, link, deadline)
                continue
            calls = _Calls(self, instance, link, deadline)
            try:
                connection = instance.registry.ready(
                    link.host_id, wanted, calls=calls, deadline=deadline
                )
            except _Renewed:
                continue
            return _Way(instance, link, connection)
        raise TransportError(f"the MPComm of {self._peer.key} is made anew again and again")

    def _retire(self, instance: Instance, link: Link, deadline: float) -> None:
        """Transfers fail although the peer is there: go on under a new host id, if it really is there."""
        self.hello(instance, link, deadline)
        if instance.renew(link):
            self._transport.unused(instance, link.host_id)
            self._transport.log.warning(
                "mpcomm_connection_retired",
                peer=str(self._peer.key),
                host_id=link.host_id,
                failures=link.failures,
            )

    def hello(self, instance: Instance, link: Link, deadline: float) -> str:
        """Ask the peer's transport whether it is there, and which instance of the library it runs; "" if it
        cannot say. Raises TransportError: nothing that could block for ever is called then."""
        self._check_open()
        if not self._transport.address_of(self._peer)[1]:
            return ""  # a peer that did not publish the address does not speak this protocol
        payload = f"{instance.life}.{link.number}".encode()
        timeout = max(0.05, min(self._transport.connect_timeout, deadline - time.monotonic()))
        return self._peer.bootstrap(payload, timeout).decode("ascii", "replace")

    def probe(self, address: HandshakeAddress, deadline: float) -> str:
        """Make sure that somebody accepts at a port; the IPv4 address that did. Raises TransportError.

        The library's own calls have no deadline and stop every thread meanwhile, so this comes before them.
        """
        self._check_open()
        timeout = max(0.05, min(self._transport.connect_timeout, deadline - time.monotonic()))
        try:
            found = socket.getaddrinfo(
                address.host, address.port, socket.AF_INET, socket.SOCK_STREAM
            )
            host = str(found[0][4][0])
            with socket.create_connection((host, address.port), timeout):
                return host
        except OSError as error:
            raise TransportError(
                f"nobody answers at {address}, where {self._peer.key} has its MPComm: {error}; it listens "
                "on all interfaces of that host, so see `advertise_host` there, and firewalls"
            ) from error

    def connected(self, instance: Instance, link: Link, address: HandshakeAddress) -> None:
        """The library has a connection to the peer now."""
        self._transport.used(instance, link.host_id)
        self._transport.log.info(
            "mpcomm_connected",
            peer=str(self._peer.key),
            address=str(address),
            host_id=link.host_id,
        )

    def resumed(self, instance: Instance, link: Link) -> None:
        """It still had one."""
        self._transport.used(instance, link.host_id)

    def lost(self, instance: Instance, link: Link) -> None:
        """It has one to an instance that the peer runs no more."""
        self._transport.unused(instance, link.host_id)
        self._transport.log.info(
            "mpcomm_connection_lost", peer=str(self._peer.key), host_id=link.host_id
        )

    def covered(self, ranges: Collection[RangeId]) -> None:
        """A query was answered."""
        self._transport.log.info("mpcomm_keys", peer=str(self._peer.key), ranges=len(ranges))

    @property
    def peer(self) -> Peer:
        """The peer."""
        return self._peer

    @property
    def address(self) -> HandshakeAddress:
        """Where its handshake port is, by its newest snapshot. Raises Unreachable."""
        return self._transport.address_of(self._peer)[0]

    # ---------------------------------------------------------------- its end

    def close(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = reason or "closed"
        transport = self._transport
        mine = transport.postings.of(self)
        for posting in mine:
            posting.give_up(self._closing())
        if mine:
            transport.poller.wake()
        instance = transport.instance
        link = instance.link(self._peer.key)
        instance.registry.take_over(link.host_id)
        self._doubt(instance)
        transport.unused(instance, link.host_id)
        until = time.monotonic() + CLOSE_TIMEOUT_S
        late = [p for p in mine if not p.reported.wait(max(0.0, until - time.monotonic()))]
        if late:
            transport.log.warning(
                "mpcomm_transfers_outlive_close", peer=str(self._peer.key), batches=len(late)
            )
        transport.closed(self)

    def holdings(self) -> Mapping[str, int]:
        return {
            "connections": int(self._way is not None and not self._closed),
            "under_way": len(self._transport.postings.of(self)),
        }

    def _doubt(self, instance: Instance) -> None:
        instance.registry.doubt(instance.link(self._peer.key).host_id)

    def _closing(self) -> TransportError:
        return TransportError(f"the connection to {self._peer.key} was closed: {self._closed}")

    def _check_open(self) -> None:
        if self._closed:
            raise self._closing()


class _Calls:
    """What the owner of a connection does; implements `registry.Calls`."""

    def __init__(
        self, endpoint: MpcommEndpoint, instance: Instance, link: Link, deadline: float
    ) -> None:
        self._endpoint = endpoint
        self._instance = instance
        self._link = link
        self._deadline = deadline
        self._greeted = False

    def connect(self) -> HandshakeAddress:
        life = self._endpoint.hello(self._instance, self._link, self._deadline)
        address = self._endpoint.address  # now: the peer may just have made its library anew
        host = self._endpoint.probe(address, self._deadline)
        self._instance.comm.connect(self._link.host_id, host, address.port)
        self._link.life = life
        self._greeted = True
        self._endpoint.connected(self._instance, self._link, address)
        return address

    def query(self, address: HandshakeAddress) -> Collection[RangeId]:
        if not self._greeted:
            self.verify()
        host = self._endpoint.probe(address, self._deadline)
        snapshot = self._endpoint.peer.segment  # before the reply: see `coverage`
        replied = self._instance.comm.query(self._link.host_id, host, address.port)
        covered = coverage(snapshot.buffers, replied)
        self._endpoint.covered(covered)
        return covered

    def verify(self) -> None:
        life = self._endpoint.hello(self._instance, self._link, self._deadline)
        if life == self._link.life:
            self._endpoint.resumed(self._instance, self._link)
            return
        if self._instance.renew(self._link):
            self._endpoint.lost(self._instance, self._link)
        raise _Renewed("another instance of the library answers")


def _rows(requests: Requests) -> Rows:
    rows: Rows | None = requests.derived
    if rows is None:
        rows = Rows.of(requests)
        if requests.reused:
            requests.derived = rows
    return rows
