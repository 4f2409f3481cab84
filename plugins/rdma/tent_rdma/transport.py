"""The transport as the engine sees it: NICs, pollers, workers, registrations, the ends of connections."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from tent_core.descriptor import PeerKey
from tent_core.errors import TransportError, TransportUnavailable
from tent_core.log import RateLimited
from tent_core.transport import Endpoint, LocalBuffer, Peer, Transport, TransportContext
from tent_rdma import by_pyverbs
from tent_rdma.connection import Connection
from tent_rdma.devices import choose
from tent_rdma.endpoint import RdmaEndpoint
from tent_rdma.lane import Lane, Run
from tent_rdma.nic import Listeners, Nic
from tent_rdma.passive import PassiveEnds
from tent_rdma.paths import Shared
from tent_rdma.poller import Poller
from tent_rdma.registrations import Registrations
from tent_rdma.store import Stores
from tent_rdma.verbs import Completion, Verbs, VerbsError
from tent_rdma.wire import Close, Closed, Open, SegmentAttribute, asked

WORKERS = 4
_STOP_S = 0.5


class RdmaTransport(Transport):
    """A few threads, however many peers: pollers wait for devices, workers for peers."""

    def __init__(self, load: Callable[[], Verbs] = by_pyverbs.load) -> None:
        """`load` answers verbs; TransportUnavailable says why there are none."""
        self._load = load
        self._nics: list[Nic] = []
        self._pollers: list[Poller] = []
        self._workers: ThreadPoolExecutor | None = None
        self._endpoints: set[RdmaEndpoint] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def start(self, context: TransportContext) -> None:
        settings = context.settings
        verbs = self._load()
        chosen = choose(context.topology, settings)
        self._context = context
        self._warnings = RateLimited(context.log, by=("reason",))
        self._workers = ThreadPoolExecutor(WORKERS, "tent-rdma-worker")
        listeners = Listeners(self._ended, self._broken, self._port)
        try:
            for index, device in enumerate(chosen.chosen):
                self._nics.append(Nic(verbs, index, device, listeners))
        except VerbsError as error:
            raise TransportUnavailable(str(error)) from error
        self._registrations = Registrations(self._nics, settings.largest_registration, self._spread)
        self._stores = Stores(self._nics, settings.max_connections, self._evict)
        self._passive = PassiveEnds(self._nics, self._stores, settings)
        self._shared = Shared(
            self._nics,
            context.topology,
            settings,
            self._registrations,
            self._stores,
            self._work,
            context.log,
        )
        for number in range(min(settings.pollers, len(self._nics))):
            poller = Poller(
                f"tent-rdma-poller-{number}",
                self._nics[number :: settings.pollers],
                settings.spin / 1e6,
                self._device_lost,
                context.log,
            )
            self._pollers.append(poller)
            poller.start()
        attribute = SegmentAttribute(nics=[nic.address for nic in self._nics])
        context.publish(attribute.encode())
        context.log.info("rdma_started", nics=[nic.name for nic in self._nics])

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
        raise TransportError("notifications go by the control plane")

    def remove_buffer(self, buffer: LocalBuffer, timeout: float) -> None:
        self._registrations.remove(buffer)

    def release(self, peer: PeerKey, reason: str) -> None:
        self._passive.release(peer)

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if self._pollers:
            self._context.publish(None)
        with self._lock:
            endpoints = list(self._endpoints)
        for endpoint in endpoints:
            endpoint.close("the engine stops")
        if self._workers is not None:
            self._workers.shutdown(wait=False, cancel_futures=True)
        for poller in self._pollers:
            if not poller.stop(_STOP_S):
                self._context.log.error("rdma_thread_did_not_stop", seconds=_STOP_S)
                return  # it may still use what would be closed
        if self._pollers:
            self._close_all()
        for nic in self._nics:
            self._attempt(nic.close)

    def holdings(self) -> Mapping[str, int]:
        if self._stopped or not self._pollers:
            return {}
        return {
            "threads": len(self._pollers),
            "endpoints": len(self._endpoints),
            "registrations": len(self._registrations),
            "connections": sum(self._stores.counts().values()),
            "passive_connections": len(self._passive),
        }

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
            endpoint.paths.ports_changed()
            endpoint.resume()

    def _device_lost(self, nic: Nic) -> None:
        nic.dead = True
        self._port(nic)

    # ---------------------------------------------------------------- helpers of the others

    def _evict(self, connection: Connection) -> None:
        connection.owner.evict(connection)

    def _forget(self, endpoint: RdmaEndpoint) -> None:
        with self._lock:
            self._endpoints.discard(endpoint)

    def _work(self, call: Callable[[], None]) -> None:
        assert self._workers is not None

        def guarded() -> None:
            try:
                call()
            except Exception as error:
                self._context.log.error("rdma_worker_failed", error=repr(error))

        with contextlib.suppress(RuntimeError):  # it stops, and `stop` closes everything
            self._workers.submit(guarded)

    def _spread(self, calls: Sequence[Callable[[], None]]) -> None:
        """Side by side: registering pins every page, and each device does its own share of it."""
        if len(calls) == 1:
            calls[0]()
            return
        assert self._workers is not None
        wait([self._workers.submit(call) for call in calls])

    def _close_all(self) -> None:
        self._attempt(self._passive.close_all)
        for error in self._registrations.close():
            self._context.log.error("rdma_not_deregistered", error=str(error))

    def _attempt(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except VerbsError as error:
            self._context.log.error("rdma_not_closed", error=str(error))
