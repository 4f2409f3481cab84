"""What the engine holds of a peer: it takes work, posts it on the paths, and posts again what they lost."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping

from tent_core.descriptor import SegmentDescriptor
from tent_core.errors import TransportError, Unreachable
from tent_core.transport import Endpoint, Peer
from tent_core.types import Opcode
from tent_core.work import Requests, Work
from tent_rdma.lane import Lane, Run
from tent_rdma.nic import Nic
from tent_rdma.paths import DEFAULT_POOL, Loss, NoRail, Paths, Shared
from tent_rdma.remote_keys import NAME, RemoteKeys
from tent_rdma.slicing import Rule
from tent_rdma.transfer import Prepared, Transfer, prepare
from tent_rdma.verbs import VerbsError
from tent_rdma.wire import SegmentAttribute, decode

CLOSE_S = 0.8
"""Within which a closing endpoint lets what is under way end; the contract gives it a second."""


class RdmaEndpoint(Endpoint):
    """Thread-safe. `_lock` is a leaf; one thread at a time posts, and others leave it to that one."""

    def __init__(
        self, peer: Peer, shared: Shared, on_close: Callable[[RdmaEndpoint], None]
    ) -> None:
        """Connects nothing yet. Raises Unreachable, Malformed."""
        attribute = peer.segment.attributes.get(NAME)
        if attribute is None:
            raise Unreachable(f"peer {peer.key} does not serve rdma")
        remote = decode(SegmentAttribute, attribute.payload).nics
        self._peer = peer
        self._shared = shared
        self._on_close = on_close
        self._keys = RemoteKeys(peer, len(remote))
        self.paths = Paths(peer, shared, remote, self.resume, self._lost)
        settings = shared.settings
        self._rule = Rule(settings.slice, settings.largest_slice, self.paths.primary)
        self._group = settings.group
        self._spin = settings.spin / 1e6
        self._lock = threading.Lock()
        self._waiting: deque[Transfer] = deque()
        self._posting = False
        self._post_again = False
        self._closed: str | None = None

    # ---------------------------------------------------------------- the contract

    def submit(self, work: Work) -> None:
        transfer = Transfer(work, self._prepare(work.requests), self._pool(work), self)
        with self._lock:
            if self._closed is not None:
                raise TransportError(f"rdma to {self._peer.key} is closed: {self._closed}")
            self._waiting.append(transfer)
        self._post()
        if work.may_block:
            self._look_for(work)
        if not work.finished:
            self._arm()

    def refresh(self, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        self._keys.refresh(new)

    def close(self, reason: str) -> None:
        with self._lock:
            if self._closed is not None:
                return
            self._closed = reason
            waiting, self._waiting = list(self._waiting), deque()
        cause = TransportError(f"rdma to {self._peer.key} was closed: {reason}")
        for transfer in waiting:
            for start, stop in transfer.take_all():
                transfer.fail(start, stop, cause, fenced=True)
        for run in self.paths.close(CLOSE_S):
            run.transfer.fail(run.start, run.stop, cause, fenced=_harmless(run))
        self._on_close(self)

    def holdings(self) -> Mapping[str, int]:
        return self.paths.holdings()

    # ---------------------------------------------------------------- preparing

    def _prepare(self, requests: Requests) -> Prepared:
        if requests.reused and requests.derived is not None:
            kept: Prepared = requests.derived
            return kept
        local = self._shared.registrations.lookup(requests.local_used)
        prepared = prepare(requests, local, self._keys.lookup(requests), self._rule)
        if requests.reused:
            requests.derived = prepared
        return prepared

    def _pool(self, work: Work) -> str:
        pool = work.qp_pool or DEFAULT_POOL
        pools = self._shared.settings.pools
        if pool != DEFAULT_POOL and pool not in pools:
            raise TransportError(
                f"the policy asks for the queue-pair pool {pool!r}, and rdma has "
                f"{', '.join(sorted({DEFAULT_POOL, *pools}))}: add it under transports.rdma.pools"
            )
        return pool

    # ---------------------------------------------------------------- posting

    def resume(self) -> None:
        """There may be room, or a connection, where there was none."""
        self._post()
        self._arm()

    def ended(self, runs: Collection[Run]) -> None:
        """Runs ended well: report them, and post what waits."""
        self.paths.completed(runs)
        for run in runs:
            run.transfer.done(run.start, run.stop)
        if self._waiting:
            self.resume()

    def _post(self) -> None:
        with self._lock:
            if self._posting:
                self._post_again = True
                return
            self._posting = True
        while True:
            while self._post_one():
                pass
            with self._lock:
                if not self._post_again:
                    self._posting = False
                    return
                self._post_again = False

    def _post_one(self) -> bool:
        """Post the next run; False when nothing waits, or nothing can be posted now."""
        with self._lock:
            transfer = self._waiting[0] if self._waiting else None
            if transfer is None:
                return False
            count = min(-(-transfer.waiting // self.paths.primary), self._group)
            length = transfer.size(count)
        try:
            found = self.paths.lane_for(transfer, length)
        except NoRail as error:
            with self._lock:
                left = []
                if self._waiting and self._waiting[0] is transfer:
                    self._waiting.popleft()
                    left = transfer.take_all()
            for start, stop in left:
                transfer.fail(start, stop, error, fenced=True)
            return True
        if found is None:
            return False
        rail, lane = found
        nic = lane.connection.nic
        credits = nic.take_credits(min(count, lane.free), self)
        if not credits:
            return False
        with self._lock:
            if not self._waiting or self._waiting[0] is not transfer:  # closed meanwhile
                nic.give_credits(credits)
                return True
            start, stop = transfer.take(credits)
            if not transfer.waiting:
                self._waiting.popleft()
        nic.give_credits(credits - (stop - start))
        self._post_run(transfer, start, stop, rail, lane)
        return True

    def _post_run(self, transfer: Transfer, start: int, stop: int, rail: int, lane: Lane) -> None:
        nic = lane.connection.nic
        columns = transfer.columns(start, stop, nic.index, self.paths.rails[rail].remote)
        now = time.monotonic()
        run = Run(transfer, start, stop, int(columns[:, 4].sum()), rail, now)
        self.paths.posted(rail, run.total, now)
        try:
            if lane.post(transfer.opcode, columns, run):
                return
        except VerbsError as error:
            self.paths.broken(lane, None, str(error))
        self.paths.abandoned(run)
        nic.give_credits(stop - start)
        self._again([run])

    def _again(self, runs: Collection[Run]) -> None:
        """Runs wait once more, before all others; the first of them first."""
        closed: str | None
        with self._lock:
            closed = self._closed
            if closed is None:
                for run in reversed(list(runs)):
                    run.transfer.put_back(run.start, run.stop)
                    if run.transfer not in self._waiting:
                        self._waiting.appendleft(run.transfer)
        if closed is not None:
            cause = TransportError(f"rdma to {self._peer.key} was closed: {closed}")
            for run in runs:
                run.transfer.fail(run.start, run.stop, cause, fenced=True)

    # ---------------------------------------------------------------- losing

    def _lost(self, loss: Loss) -> None:
        """A connection failed, or could not be made. In a worker."""
        again = []
        for run in loss.runs:
            if run is loss.culprit:
                run.transfer.fail(run.start, run.stop, loss.cause, fenced=True)
            elif not loss.confirmed and not _harmless(run):
                run.transfer.fail(run.start, run.stop, loss.cause, fenced=False)
            else:
                if loss.culprit is None:
                    run.transfer.excluded.add(loss.rail)
                again.append(run)
        if not loss.runs:
            with self._lock:
                for transfer in self._waiting:
                    transfer.excluded.add(loss.rail)
        self._again(again)
        self.resume()

    # ---------------------------------------------------------------- waiting

    def _look_for(self, work: Work) -> None:
        """The caller waits anyway: look for completions in its thread, for as long as `spin` says."""
        until = time.monotonic() + self._spin
        nics = self.paths.nics()
        while not work.finished and time.monotonic() < until:
            for nic in nics:
                nic.reap()

    def _arm(self) -> None:
        """From here on completions wake the poller."""
        nics: set[Nic] = self.paths.nics()
        for nic in nics:
            nic.arm()


def _harmless(run: Run) -> bool:
    """Whether a failed attempt can do no harm once its queue pair here is destroyed: a READ, since nothing
    is written to local memory any more."""
    return run.transfer.opcode is Opcode.READ
