"""What the engine holds of a peer: it takes work, posts it on the paths, and posts again what they lost."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from tent_core.descriptor import SegmentDescriptor
from tent_core.errors import TransportError, Unreachable
from tent_core.slicing import Rule
from tent_core.transport import Endpoint, Peer
from tent_core.types import Opcode, Status
from tent_core.work import Requests, Work
from tent_rdma.connection import Connection
from tent_rdma.lane import Lane, Run
from tent_rdma.nic import Nic
from tent_rdma.paths import DEFAULT_POOL, Loss, NoRail, Paths, Shared
from tent_rdma.remote_keys import NAME, RemoteKeys
from tent_rdma.transfer import Prepared, Transfer, prepare
from tent_rdma.verbs import REMOTE_ACCESS, VerbsError
from tent_rdma.waiting import Waiting
from tent_rdma.wire import SegmentAttribute, decode
from tent_rdma.workers import within

Registered = tuple[int, int]
"""A buffer of the peer's: identifier and generation."""

LONG = 1 << 20
"""Bytes of work requests that are posted together, if that is a quarter of a group at least: queue pairs and
posting threads take turns then, and what has arrived is reported sooner. Short ones go in full groups, which
costs Python the least."""

CLOSE_S, VERBS_S = 0.7, 0.2
"""Seconds in which a closing endpoint lets what is under way end, and then for verbs that destroy; the
contract gives it a second."""


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
        self._waiting = Waiting()
        self._timer = math.inf
        """When `_expire` is called, or before."""
        self._leaving: list[Connection] = []
        self._posting = False
        self._post_again = False
        self._closed: str | None = None
        self._open_notices = self.paths.open_notices
        if settings.notifications:
            shared.notifications.attach(peer.key, self._open_notices)

    # ---------------------------------------------------------------- the contract

    def submit(self, work: Work) -> None:
        transfer = Transfer(work, self._prepare(work.requests), self._pool(work), self)
        with self._lock:
            if self._closed is not None:
                raise TransportError(f"rdma to {self._peer.key} is closed: {self._closed}")
            self._waiting.add(transfer)
        for_others = self._post()
        if work.may_block:
            self._look_for(work)
        if for_others or not work.finished:
            self._arm()
        if not work.finished and work.deadline < self._timer and transfer in self._waiting:
            self._set_timer(work.deadline)

    def refresh(self, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        self._keys.refresh(new)

    def close(self, reason: str) -> None:
        self.stop_posting(reason)
        deadline = time.monotonic() + CLOSE_S
        within(CLOSE_S + VERBS_S, "tent-rdma-closing", lambda: self.destroy(deadline))
        self.settle()

    def stop_posting(self, reason: str) -> None:
        """The first step of closing: fail what waits, let what is under way end. Returns at once."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = reason
            lots = self._take_away(self._waiting.all())
        self._fail_lots(lots, self._closing())
        leaving = self.paths.close()
        with self._lock:
            self._leaving += leaving

    def destroy(self, deadline: float) -> None:
        """The second: destroy the connections, as soon as nothing is under way, or at `deadline` on the
        monotonic clock, and the channel for notifications. A verb may hold it up."""
        self._shared.notifications.detach(self._peer.key, self._open_notices)
        self.paths.destroy(self._leaving, deadline)

    def settle(self) -> None:
        """The last: report what had not ended, also where the second step was held up. Idempotent."""
        cause = self._closing()
        for connection in self._leaving:
            runs, _ = connection.take_back()
            for run in runs:
                harmless = run.transfer.opcode is Opcode.READ and not connection.lanes
                run.transfer.fail(run.start, run.stop, cause, fenced=harmless)
        self._shared.at(self, math.inf, self._expire)
        self._on_close(self)

    def _closing(self) -> TransportError:
        return TransportError(f"rdma to {self._peer.key} was closed: {self._closed}")

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

    def _post(self) -> bool:
        """Post what can be posted, unless another thread is at it. Whether others have left theirs to this
        one: they may have armed before it was posted."""
        for_others = False
        with self._lock:
            if self._posting:
                self._post_again = True
                return False
            self._posting = True
        try:
            while True:
                while self._post_one():
                    pass
                with self._lock:
                    if not self._post_again:
                        self._posting = False
                        return for_others
                    self._post_again = False
                for_others = True
        except BaseException:
            self._posting = False  # others are to go on
            raise

    def _post_one(self) -> bool:
        """Post the next run; False when nothing waits, or nothing can be posted now."""
        with self._lock:
            heads = self._waiting.heads()
        return any(self._post_from(transfer) for transfer in heads)

    def _post_from(self, transfer: Transfer) -> bool:
        """Post the next run of a transfer; False when that is not possible now."""
        with self._lock:
            if not self._waiting.is_head(transfer):
                return True  # closed, or another came before it: look again
            count, length = self._next_group(transfer)
        try:
            found = self.paths.lane_for(transfer, length)
        except NoRail as error:
            with self._lock:
                lots = self._take_away([transfer])
            self._fail_lots(lots, error)
            return True
        if found is None:
            return False
        rail, lane = found
        nic = lane.connection.nic
        credits = nic.take_credits(min(count, lane.free), self)
        if not credits:
            return False
        with self._lock:
            if not self._waiting.is_head(transfer):
                start = stop = 0
            else:
                start, stop = transfer.take(credits)
                self._waiting.served(transfer)
                if not transfer.waiting:
                    self._waiting.discard(transfer)
        nic.give_credits(credits - (stop - start))
        if stop > start:
            self._post_run(transfer, start, stop, rail, lane)
        return True

    def _next_group(self, transfer: Transfer) -> tuple[int, int]:
        """How many of the next slices go together, and their bytes. With the lock held."""
        count = min(-(-transfer.waiting // self.paths.primary), self._group)
        length = transfer.size(count)
        fewest = -(-self._group // 4)
        if length > LONG and count > fewest:
            count = max(count * LONG // length, fewest)
            length = transfer.size(count)
        return count, length

    def _post_run(self, transfer: Transfer, start: int, stop: int, rail: int, lane: Lane) -> None:
        nic = lane.connection.nic
        columns = transfer.columns(start, stop, nic.index, self.paths.rails[rail].remote)
        now = time.monotonic()
        run = Run(transfer, start, stop, int(columns[:, 4].sum()), rail, now)
        self.paths.posted(rail, run.total, now)
        try:
            if lane.post(transfer.opcode, columns, run):
                if (
                    not nic.usable
                ):  # it went down in this very moment: nobody saw this run under way
                    self.paths.ports_changed()
                return
        except VerbsError as error:
            self.paths.broken(lane, None, str(error))
        self.paths.abandoned(run)
        nic.give_credits(stop - start)
        self._again([run])

    def _again(self, runs: Collection[Run]) -> None:
        """Runs wait once more, before all others; the first of them first."""
        with self._lock:
            closed = self._closed is not None
            if not closed:
                for run in reversed(list(runs)):
                    run.transfer.put_back(run.start, run.stop)
                    self._waiting.add_first(run.transfer)
        if closed:
            cause = self._closing()
            for run in runs:
                run.transfer.fail(run.start, run.stop, cause, fenced=True)

    def _take_away(self, transfers: Sequence[Transfer]) -> list[tuple[Transfer, int, int]]:
        """What of transfers waits, which will not be posted any more. With the lock held."""
        lots = []
        for transfer in transfers:
            if transfer in self._waiting:
                self._waiting.discard(transfer)
                lots += [(transfer, start, stop) for start, stop in transfer.take_all()]
        return lots

    def _fail_lots(
        self,
        lots: Sequence[tuple[Transfer, int, int]],
        cause: TransportError,
        status: Status = Status.FAILED,
    ) -> None:
        for transfer, start, stop in lots:
            transfer.fail(start, stop, cause, fenced=True, status=status)

    # ---------------------------------------------------------------- losing

    def _lost(self, loss: Loss) -> None:
        """A connection failed, or could not be made. In a worker.

        What was under way goes again where that is harmless, but for what is to blame, and what is for a
        buffer that the peer has taken away: each time that was posted it would cost a connection.
        """
        culprits = [fault.run for fault in loss.faults]
        refused = _refused(loss)
        again = []
        for run in loss.runs:
            transfer, harmless = run.transfer, loss.harmless(run)
            lots = transfer.apart(run.start, run.stop, self._dead(transfer, refused))
            to_blame = run in culprits and not any(dead for dead, _, _ in lots)
            for dead, start, stop in lots:
                if dead or to_blame or not harmless:
                    transfer.fail(start, stop, loss.cause, fenced=harmless)
                else:
                    again.append(run._replace(start=start, stop=stop))
            if loss.blamed:
                self.paths.exclude(transfer, loss.rail, loss.cause)
        with self._lock:
            given_up = self._take_dead(refused)
            if not loss.runs:  # it failed before anything was under way: for what waited for it
                for transfer in self._waiting.all():
                    if transfer.pool == loss.pool:
                        self.paths.exclude(transfer, loss.rail, loss.cause)
                self._waiting.sort_again()
        self._fail_lots(given_up, loss.cause)
        self._again(again)
        self.resume()

    def _dead(self, transfer: Transfer, refused: Collection[Registered]) -> list[int]:
        """The buffers of a transfer that the peer has taken away, by what it says or by what it refuses."""
        requests = transfer.work.requests
        gone = self._keys.gone(requests)
        generations = requests.remote_generations
        return gone + [id for id in requests.remote_used if (id, generations[id]) in refused]

    def _take_dead(self, refused: Collection[Registered]) -> list[tuple[Transfer, int, int]]:
        """What waits for such buffers, and will not be posted. With the lock held."""
        taken = []
        for transfer in self._waiting.all():
            if dead := self._dead(transfer, refused):
                for start, stop in reversed(transfer.take_all()):
                    for is_dead, first, last in reversed(transfer.apart(start, stop, dead)):
                        if is_dead:
                            taken.append((transfer, first, last))
                        else:
                            transfer.put_back(first, last)
                if not transfer.waiting:
                    self._waiting.discard(transfer)
        return taken

    def ports_changed(self) -> None:
        """A port here went up or down."""
        self.paths.ports_changed()
        self.resume()

    # ---------------------------------------------------------------- deadlines

    def _set_timer(self, when: float) -> None:
        with self._lock:
            if when >= self._timer:
                return
            self._timer = when
        self._shared.at(self, when, self._expire)

    def _expire(self) -> None:
        """Give up what has waited past its deadline; what is posted ends by itself, at the latest when its
        retries are used up."""
        now = time.monotonic()
        with self._lock:
            expired = [t for t in self._waiting.all() if t.work.deadline <= now]
            lots = self._take_away(expired)
            self._timer = math.inf
            when = self._waiting.deadline()
        if lots:
            cause = TransportError(
                f"the deadline passed before it could be posted to {self._peer.key}: "
                f"{self.paths.describe()}"
            )
            self._fail_lots(lots, cause, Status.TIMEOUT)
        if when < math.inf:
            self._set_timer(when)

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


def _refused(loss: Loss) -> set[Registered]:
    """The buffers whose keys the peer's NICs do not take. A run for several does not say which."""
    refused = set()
    for run, status in loss.faults:
        requests = run.transfer.work.requests
        ids = run.transfer.buffers(run.start, run.stop)
        if status == REMOTE_ACCESS and len(set(ids.tolist())) == 1:
            refused.add((int(ids[0]), requests.remote_generations[int(ids[0])]))
    return refused
