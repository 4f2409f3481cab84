"""The transport as the engine sees it: NICs, pollers, workers, registrations, the ends of connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from tent_core.descriptor import PeerKey
from tent_core.errors import TransportError, TransportUnavailable
from tent_core.log import RateLimited
from tent_core.transport import Endpoint, LocalBuffer, Peer, Transport, TransportContext
from tent_core.types import Capabilities
from tent_rdma import by_pyverbs
from tent_rdma.advice import raise_memlock
from tent_rdma.connection import Connection
from tent_rdma.devices import choose
from tent_rdma.endpoint import VERBS_S, RdmaEndpoint
from tent_rdma.lane import Lane, Run
from tent_rdma.nic import Listeners, Nic
from tent_rdma.notice_channels import NoticeChannels
from tent_rdma.notifications import Notifications
from tent_rdma.passive import PassiveEnds
from tent_rdma.paths import Shared
from tent_rdma.poller import Poller
from tent_rdma.registrations import Registrations
from tent_rdma.store import Stores
from tent_rdma.verbs import Completion, Verbs, VerbsError
from tent_rdma.wire import Close, Closed, Open, SegmentAttribute, asked
from tent_rdma.workers import Workers, within

WORKERS = 32
"""Threads at most that connect, and as many that let go of connections that failed: each of these waits for
its peer for some seconds where that does not answer."""
STOP_S, CLOSE_S = 1.8, 1.0
"""Seconds for `stop`, and of them for what is under way to end; the contract gives it two."""
NOTICES_S = 0.3
"""Seconds for a channel of notifications to let go of what is outstanding."""
RELEASE_S = 0.9
"""Seconds for `release`; the contract gives it one."""


class RdmaTransport(Transport):
    """A few threads, however many peers: pollers wait for devices, workers for peers."""

    def __init__(self, load: Callable[[], Verbs] = by_pyverbs.load) -> None:
        """`load` answers verbs; TransportUnavailable says why there are none."""
        self._load = load
        self._nics: list[Nic] = []
        self._pollers: list[Poller] = []
        self._workers: list[Workers] = []
        self._endpoints: set[RdmaEndpoint] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def start(self, context: TransportContext) -> None:
        settings = context.settings
        verbs = self._load()
        chosen = choose(context.topology, settings)
        self._context = context
        raise_memlock()
        self._warnings = RateLimited(context.log, by=("reason",))
        connect = Workers("tent-rdma-connect", WORKERS, context.log)
        recover = Workers("tent-rdma-recover", WORKERS, context.log)
        self._workers = [connect, recover]
        listeners = Listeners(self._ended, self._broken, self._port, self._nic_lost)
        try:
            for index, device in enumerate(chosen.chosen):
                self._nics.append(Nic(verbs, index, device, listeners))
        except VerbsError as error:
            raise TransportUnavailable(str(error)) from error
        self._registrations = Registrations(self._nics, settings.largest_registration, side_by_side)
        self._stores = Stores(self._nics, settings.max_connections, self._evict)
        self._passive = PassiveEnds(self._nics, self._stores, settings)
        watching: list[Poller] = []
        for index in range(len(self._nics)):
            if index < settings.pollers:
                poller = Poller(
                    f"tent-rdma-poller-{index}",
                    self._nics[index :: settings.pollers],
                    settings.spin / 1e6,
                    context.log,
                )
                self._pollers.append(poller)
            watching.append(self._pollers[index % settings.pollers])
        self._notifications = Notifications(
            context.notified, recover.submit, context.log, drain_timeout=NOTICES_S
        )
        self._channels = NoticeChannels(self._nics, watching, self._notifications, settings)
        self._shared = Shared(
            self._nics,
            context.topology,
            settings,
            self._registrations,
            self._stores,
            connect.submit,
            recover.submit,
            self._at,
            self._notifications,
            self._channels,
            context.log,
        )
        for poller in self._pollers:
            poller.start()
        attribute = SegmentAttribute(nics=[nic.address for nic in self._nics])
        context.publish(attribute.encode())
        context.log.info("rdma_started", nics=[nic.name for nic in self._nics])

    def capabilities(self, declared: Capabilities) -> Capabilities:
        return replace(declared, notifications=self._context.settings.notifications)

    def add_buffers(self, buffers: Sequence[LocalBuffer]) -> Sequence[bytes | None]:
        answers: list[bytes | None] = []
        for buffer in buffers:
            try:
                answers.append(self._registrations.add(buffer).encode())
            except VerbsError as error:
                self._warnings.warning(
                    "rdma_buffer_declined", reason=str(error), buffer=buffer.name
                )
                answers.append(None)
        return answers

    def connect(self, peer: Peer) -> Endpoint:
        endpoint = RdmaEndpoint(peer, self._shared, self._forget)
        with self._lock:
            self._endpoints.add(endpoint)
        return endpoint

    def bootstrap(self, peer: PeerKey, payload: bytes) -> bytes:
        message = asked(payload)
        if isinstance(message, Open):
            return self._passive.open(peer, message).encode()
        if isinstance(message, Close):
            self._passive.close(peer, message.connections)
            return Closed().encode()
        return self._channels.answer(peer, message).encode()

    def exchange(self, peer: PeerKey, message: bytes) -> Future[bytes] | None:
        return self._notifications.exchange(peer, message)

    def remove_buffer(self, buffer: LocalBuffer, timeout: float) -> None:
        self._registrations.remove(buffer)

    def release(self, peer: PeerKey, reason: str) -> None:
        self._stores.clear_away()
        if not within(RELEASE_S, "tent-rdma-release", lambda: self._release(peer)):
            raise TransportError(
                f"the queue pairs of {peer} are still being destroyed: a verb hangs"
            )

    def _release(self, peer: PeerKey) -> None:
        self._notifications.release(peer)
        self._passive.release(peer)

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if self._pollers:
            self._context.publish(None)
        if not self._nics:
            return
        began = time.monotonic()
        with self._lock:
            endpoints = list(self._endpoints)
        # In a thread of its own, which goes on where a verb hangs for longer than this may take.
        thread = threading.Thread(
            target=self._close_everything,
            args=(endpoints, began + CLOSE_S),
            name="tent-rdma-stop",
            daemon=True,
        )
        thread.start()
        thread.join(CLOSE_S + VERBS_S)
        for endpoint in endpoints:
            endpoint.settle()
        thread.join(max(began + STOP_S - time.monotonic(), 0))
        if thread.is_alive():
            self._context.log.error("rdma_did_not_stop", seconds=STOP_S, left=self._left())

    def _close_everything(self, endpoints: Sequence[RdmaEndpoint], deadline: float) -> None:
        for endpoint in endpoints:
            endpoint.stop_posting("the engine stops")
        for endpoint in endpoints:
            endpoint.destroy(deadline)
        for endpoint in endpoints:
            endpoint.settle()
        if self._pollers and not self._notifications.stop(NOTICES_S):
            self._context.log.error("rdma_notifications_did_not_stop", seconds=NOTICES_S)
        for workers in self._workers:
            workers.stop(max(deadline - time.monotonic(), VERBS_S))
        for poller in self._pollers:
            if not poller.stop(STOP_S):
                self._context.log.error("rdma_thread_did_not_stop", seconds=STOP_S)
                return  # it may still use what would be closed
        if self._pollers:
            self._attempt(self._passive.close_all)
            self._stores.clear_away()
            for error in self._registrations.close():
                self._context.log.error("rdma_not_deregistered", error=str(error))
        for nic in self._nics:
            self._attempt(nic.close)

    def _left(self) -> dict[str, int]:
        if not self._pollers:
            return {}
        return {
            "threads": len(self._pollers),
            "endpoints": len(self._endpoints),
            "registrations": len(self._registrations),
            "connections": sum(self._stores.counts().values()),
            "passive_connections": len(self._passive),
            "stuck_connections": self._stores.stuck,
        }

    def holdings(self) -> Mapping[str, int]:
        return {} if self._stopped else self._left()

    # ---------------------------------------------------------------- what happens on NICs

    def _ended(self, runs: Collection[Run]) -> None:
        if len({run.transfer.endpoint for run in runs}) == 1:
            next(iter(runs)).transfer.endpoint.ended(runs)
            return
        by_endpoint: dict[RdmaEndpoint, list[Run]] = {}
        for run in runs:
            by_endpoint.setdefault(run.transfer.endpoint, []).append(run)
        for endpoint, its in by_endpoint.items():
            endpoint.ended(its)

    def _broken(self, lane: Lane, completion: Completion) -> None:
        lane.connection.owner.broken(lane, completion)

    def _port(self, nic: Nic) -> None:
        with self._lock:
            endpoints = list(self._endpoints)
        for endpoint in endpoints:
            endpoint.ports_changed()

    def _nic_lost(self, nic: Nic, error: VerbsError) -> None:
        self._context.log.error("rdma_device_failed", nic=nic.name, error=str(error))
        self._port(nic)

    # ---------------------------------------------------------------- helpers of the others

    def _evict(self, connection: Connection) -> None:
        connection.owner.evict(connection)

    def _forget(self, endpoint: RdmaEndpoint) -> None:
        with self._lock:
            self._endpoints.discard(endpoint)

    def _at(self, owner: object, when: float, call: Callable[[], None]) -> None:
        self._pollers[0].at(owner, when, call)

    def _attempt(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except VerbsError as error:
            self._context.log.error("rdma_not_closed", error=str(error))


def side_by_side(calls: Sequence[Callable[[], None]]) -> None:
    """Make calls in threads of their own, and wait for all. Registering pins every page, and each device does
    its own share of that; it must not wait for workers that wait for peers."""
    threads = []
    for call in calls[1:]:
        thread = threading.Thread(target=call, name="tent-rdma-register", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are no more threads to be had
            call()
        else:
            threads.append(thread)
    for call in calls[:1]:
        call()
    for thread in threads:
        thread.join()
