"""All that is kept for one peer: its process, the mappings of its buffers, what is under way to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tent_core.descriptor import BufferDescriptor, SegmentDescriptor
from tent_core.errors import PeerDeparted, StaleHandle, TransportError
from tent_core.inflight import InFlight, begin_all
from tent_core.transport import Endpoint, Peer
from tent_core.types import BufferState, Permission
from tent_core.work import Work
from tent_shm import mapping, plan
from tent_shm.attribute import BufferAttribute
from tent_shm.keeper import Keeper
from tent_shm.owner import Owner
from tent_shm.plan import Plan, Target, Ways
from tent_shm.pool import Pool
from tent_shm.settings import Settings
from tent_shm.stream import runs_of
from tent_shm.task import Task

NAME = "shm"
CLOSE_TIMEOUT_S = 0.9


@dataclass(frozen=True, slots=True)
class Tools:
    """What the endpoints of one transport share."""

    settings: Settings
    keeper: Keeper
    pool: Pool
    log: Any


class ShmEndpoint(Endpoint):
    """Copies between this process and one peer's.

    Memory is given back by whoever uses it last: a submission marks every target that it uses before it
    checks anything and until its last call has returned, and a target marks the endpoint for as long as it
    is mapped. So `refresh` and `close` never unmap, and never close a descriptor, under a running copy.
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
        self._lock = threading.Lock()
        self._targets: dict[int, Target] = {}
        self._mapped: set[mapping.Mapping] = set()
        self._tasks: set[Task] = set()
        self._marks = InFlight()
        self._gone: Exception | None = None
        self._closing = False
        tools.keeper.watch(owner.pidfd, self._owner_ended)

    def submit(self, work: Work) -> None:
        what = self._marked_plan(work)
        if what.quick is not None:
            cause = self._check(what)
            answer = what.quick() if cause is None else None
            if cause is None:
                cause = self._check(what)
            if cause is not None or answer == what.quick_answer:
                _unmark(what)
                if cause is None:
                    work.complete()
                else:
                    work.fail(cause)
                return
        self._start(work, what)

    def refresh(self, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        for number, target in list(self._targets.items()):
            was, now = old.buffers.get(number), new.buffers.get(number)
            if was is None or was.generation != target.buffer.generation:
                continue  # registered after `old`: another step of the snapshot speaks of it
            if now is None or now.generation != was.generation or now.state is not BufferState.LIVE:
                self._let_go(target, StaleHandle(f"the peer has unregistered buffer {was.name!r}"))

    def close(self, reason: str) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            if self._gone is None:
                self._gone = TransportError(
                    f"the connection to {self._peer.key} was closed: {reason}"
                )
            targets, tasks = list(self._targets.values()), list(self._tasks)
        for target in targets:
            self._let_go(target, self._gone)
        for task in tasks:
            task.help()  # which fails what has not been started: the threads may be busy with others' work
        self._tools.keeper.unwatch(self._owner.pidfd)
        self._marks.shut()
        self._marks.when_drained(self._release_owner)
        if not self._marks.wait_drained(CLOSE_TIMEOUT_S):
            self._tools.log.warning(
                "shm_copy_outlives_close", peer=str(self._peer.key), reason=reason
            )

    def holdings(self) -> Mapping[str, int]:
        return {
            "mappings": len(self._mapped),
            "processes": int(not self._closing),
            "tasks": len(self._tasks),
        }

    # ---------------------------------------------------------------- submissions

    def _marked_plan(self, work: Work) -> Plan:
        """The plan for `work`, with a mark on each of its targets."""
        requests = work.requests
        what: Plan | None = requests.derived
        if (
            what is not None
            and what.segment is self._peer.segment
            and begin_all(what.marks) is None
        ):
            return what
        what = plan.make(requests, self._peer.segment, self._target, self._ways)
        if begin_all(what.marks) is not None:
            raise what.gone or TransportError("a buffer of the peer is just being unregistered")
        if requests.reused and not what.refusals:
            requests.derived = what
        return what

    def _check(self, what: Plan) -> Exception | None:
        """Why the peer or a buffer may be used no more. Only for who holds a mark."""
        if self._gone is not None:
            return self._gone
        if not self._owner.alive:
            return self._departed()
        return what.gone

    def _start(self, work: Work, what: Plan) -> None:
        """Carry out what is not quick: here, if the caller waits anyway, and in the threads of the pool."""
        for refusal in what.refusals:
            for start, stop in runs_of(refusal.rows, len(work)):
                work.refuse(refusal.cause, start, stop)
        if not what.streams:
            return
        settings, pool = self._tools.settings, self._tools.pool
        threads = settings.copy_threads if what.weight >= settings.split_bytes else 1
        task = Task(work, what, threads, lambda: self._check(what), self._ended)
        with self._lock:
            self._tasks.add(task)
        for _ in range(threads - 1 if work.may_block else threads):
            pool.submit(task.help)
        if work.may_block:
            task.help()

    def _ended(self, task: Task) -> None:
        with self._lock:
            self._tasks.discard(task)
        _unmark(task.plan)

    # ---------------------------------------------------------------- targets

    def _target(self, number: int) -> Target:
        """The target of a buffer of the newest snapshot, made now if there is none. Raises TentError."""
        described = self._peer.segment.buffers.get(number)
        if described is None:
            raise StaleHandle(f"buffer {number} of {self._peer.key} is registered no more")
        target = self._targets.get(number)
        if target is not None and target.buffer.generation == described.generation:
            return target
        with self._lock:
            target = self._targets.get(number)
            if target is None or target.buffer.generation != described.generation:
                before, target = target, self._open(described)
                self._targets[number] = target
                if before is not None:
                    self._release_when_idle(
                        before, StaleHandle(f"buffer {number} was registered anew")
                    )
        return target

    def _open(self, described: BufferDescriptor) -> Target:
        if not self._marks.begin():
            raise self._gone or TransportError("the connection is closed")
        try:
            mapped = self._map(described)
        except BaseException:
            self._marks.end()
            raise
        if mapped is not None:
            self._mapped.add(mapped)
        return Target(described, mapped)

    def _map(self, described: BufferDescriptor) -> mapping.Mapping | None:
        """Map a buffer, or answer None where its owner's memory is to be used: it was not made by `allocate`,
        or it cannot be mapped. Raises TransportError where neither is possible."""
        attribute = described.attributes.get(NAME)
        if attribute is None:
            raise TransportError(f"buffer {described.name!r} is not offered by shm")
        denied = self._owner.memory_denied
        try:
            file = BufferAttribute.decode(attribute.payload).file
            if file is not None:
                if file.size < described.length:
                    raise TransportError(f"{file.size} bytes are too few for {described.length}")
                writable = described.permission is Permission.GLOBAL_READ_WRITE
                return mapping.Mapping(self._owner.keeper, file, writable=writable)
        except (OSError, TransportError) as error:
            if denied is not None:
                raise TransportError(
                    f"buffer {described.name!r} can neither be mapped ({error}) nor copied ({denied})"
                ) from error
            self._tools.log.warning(
                "shm_buffer_not_mapped", buffer=described.name, reason=str(error)
            )
            return None
        if denied is not None:
            raise TransportError(
                f"buffer {described.name!r} was not made by allocate(), and {denied}"
            )
        return None

    def _let_go(self, target: Target, cause: Exception) -> None:
        with self._lock:
            if self._targets.get(target.buffer.id) is target:
                del self._targets[target.buffer.id]
        self._release_when_idle(target, cause)

    def _release_when_idle(self, target: Target, cause: Exception) -> None:
        target.gone = cause
        target.marks.shut()
        target.marks.when_drained(partial(self._release, target))

    def _release(self, target: Target) -> None:
        if target.mapping is not None:
            target.mapping.unmap()
            self._mapped.discard(target.mapping)
        self._marks.end()

    # ---------------------------------------------------------------- the peer's process

    def _owner_ended(self) -> None:
        if self._marks.begin():
            self._departed()
            self._marks.end()

    def _departed(self) -> Exception:
        """The process has gone: remember why, and tell the engine once. Only for who holds a mark."""
        with self._lock:
            first = self._gone is None
            if self._gone is None:
                self._gone = PeerDeparted(
                    f"peer {self._peer.key} (process {self._owner.pid}) is gone: {self._owner.fate}"
                )
            gone = self._gone
        if first:
            self._peer.suspect(gone)
        return gone

    def _release_owner(self) -> None:
        self._owner.close()
        self._closed(self)


def _unmark(what: Plan) -> None:
    for marks in what.marks:
        marks.end()
