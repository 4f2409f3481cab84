"""All that is kept for one peer: its process, its buffers in use here, what is under way to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tent_core import gil
from tent_core.descriptor import SegmentDescriptor
from tent_core.errors import PeerDeparted, TransportError
from tent_core.transport import BoundCall, Endpoint, Peer
from tent_core.work import Requests, Work
from tent_shm import bound, plan
from tent_shm.crowd import Crowd
from tent_shm.keeper import Keeper
from tent_shm.owner import Owner
from tent_shm.plan import Plan, Ways
from tent_shm.pool import Pool
from tent_shm.stream import runs_of
from tent_shm.targets import Targets
from tent_shm.task import Task

CLOSE_TIMEOUT_S = 0.9
SHARES_PER_THREAD = 2
"""Not one: a thread that gets no processor then holds up less, since others take what it has not begun."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What the endpoints of one transport share."""

    keeper: Keeper
    pool: Pool
    log: Any
    crowd: Crowd


class ShmEndpoint(Endpoint):
    """Copies between this process and one peer's.

    Memory is given back by whoever uses it last: a submission marks every target that it uses before it
    checks anything and until its last call has returned, and a target holds the owner for as long as it is
    mapped. So `refresh` and `close` never unmap, and never close a descriptor, under a running copy.
    """

    def __init__(
        self,
        peer: Peer,
        owner: Owner,
        ways: Ways,
        tools: Tools,
        closed: Callable[[ShmEndpoint], None],
    ) -> None:
        self._peer = peer
        self._owner = owner
        self._ways = ways
        self._tools = tools
        self._closed = closed
        self._targets = Targets(owner, lambda: peer.segment, tools.log)
        self._lock = threading.Lock()
        self._tasks: set[Task] = set()
        self._departure: PeerDeparted | None = None
        self._closing = False
        tools.keeper.watch(owner.pidfd, self._owner_ended)

    def submit(self, work: Work) -> None:
        if not self._ways.matters(work.requests.total):
            self._carry(work, 1)
            return
        with self._tools.crowd as crowd:
            self._carry(work, crowd)

    def _carry(self, work: Work, crowd: int) -> None:
        """Carry it out, as one of so many threads that copy."""
        requests = work.requests
        what: Plan | None = requests.derived
        if what is None or not what.suits(crowd) or not what.begin():
            what = self._begun(requests, crowd)
        # Among several that copy, each has to give it up, or none of them gets on.
        hold = crowd == 1 and not what.quick and work.may_block and gil.contended()
        whole = what.held if hold else what.whole
        if whole is not None and (what.quick or work.may_block) and self._owner.alive:
            moved = whole.call() == whole.answer
            if moved and self._check(what) is None:
                what.end()
                work.complete()
                return
        self._start(work, what, crowd, hold)  # which finds out, too, what was wrong

    def bind(self, requests: Requests) -> BoundCall | None:
        return bound.bind(plan.make(requests, self._targets.get, self._ways), self._owner)

    def cancel(self, work: Work) -> None:
        """What has not been begun ends at once, what is under way after its present step: the return of a
        system call is a fence."""
        with self._lock:
            tasks = [task for task in self._tasks if task.work is work]
        for task in tasks:
            task.help()  # which fails what has not been started: the threads may be busy elsewhere

    def refresh(self, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        self._targets.refresh(old, new)

    def close(self, reason: str) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            tasks = list(self._tasks)
        self._tools.keeper.unwatch(self._owner.pidfd)
        self._owner.close_when_idle(lambda: self._closed(self))
        cause = self._departure or TransportError(f"the connection was closed: {reason}")
        self._targets.let_all_go(cause)
        for task in tasks:
            task.help()  # which fails what has not been started: the threads may be busy elsewhere
        if not self._owner.wait_closed(CLOSE_TIMEOUT_S):
            self._tools.log.warning("shm_copy_outlives_close", peer=str(self._peer.key))

    def holdings(self) -> Mapping[str, int]:
        return {"mappings": self._targets.mappings, "tasks": len(self._tasks)}

    def _begun(self, requests: Requests, crowd: int) -> Plan:
        """A new plan, with its targets marked as in use."""
        what = plan.make(requests, self._targets.get, self._ways, crowd)
        if not what.begin():
            raise what.gone or TransportError("the peer is just unregistering a buffer")
        if requests.reused and not what.refusals:
            requests.derived = what
        return what

    def _check(self, what: Plan) -> Exception | None:
        """Why the peer or a buffer may be used no more. Only while the plan is begun."""
        if not self._owner.alive:
            return self._departed()
        return what.gone

    def _start(self, work: Work, what: Plan, crowd: int, hold: bool) -> None:
        """Carry out what one call cannot: here, if the caller waits anyway, and by the pool's threads."""
        for refusal in what.refusals:
            for start, stop in runs_of(refusal.rows, len(work)):
                work.refuse(refusal.cause, start, stop)
        if not what.streams:
            return
        pool = self._tools.pool
        # Where others compute, each share would wait for the GIL of its own.
        threads = len(pool) if self._ways.split(what.total, crowd) and not hold else 1
        parts = threads * SHARES_PER_THREAD if threads > 1 else 1
        task = Task(work, what, parts, lambda: self._check(what), self._ended)
        with self._lock:
            self._tasks.add(task)
        for _ in range(threads - 1 if work.may_block else threads):
            pool.submit(task.help)
        if work.may_block or self._closing:
            task.help()

    def _ended(self, task: Task) -> None:
        with self._lock:
            self._tasks.discard(task)
        task.plan.end()

    def _owner_ended(self) -> None:
        if self._owner.begin():
            self._departed()
            self._owner.end()

    def _departed(self) -> PeerDeparted:
        """The process has gone: remember why, and tell the engine once. Only while the owner is in use."""
        with self._lock:
            known = self._departure
            if known is None:
                self._departure = PeerDeparted(
                    f"peer {self._peer.key} (process {self._owner.pid}) is gone: {self._owner.fate}"
                )
            departure = self._departure
        assert departure is not None
        if known is None:
            self._peer.suspect(departure)
        return departure
