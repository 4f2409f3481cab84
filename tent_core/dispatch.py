"""Carries batches: plans groups, offers each to its candidates in turn, and settles what comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from tent_core.admission import Rules
from tent_core.alarm import Alarm
from tent_core.attempt import FirstAttempt, FirstWork
from tent_core.batch import Batch, Options, Rows
from tent_core.carry import Carry, raised
from tent_core.errors import ClosedError, TentError, TransportError
from tent_core.log import RateLimited
from tent_core.pace import BULK
from tent_core.peers import LivePeer
from tent_core.planning import Group, Planner, Trait, by_size, by_trait
from tent_core.policy import Selection
from tent_core.reshape import MergedSink, PartsSink, Sink, merge, part, parts
from tent_core.serial import SerialQueue
from tent_core.stats import Stats
from tent_core.transport import Endpoint
from tent_core.turns import Turns
from tent_core.types import Priority
from tent_core.work import Requests, Work


class Staged(Protocol):
    """Requests that go through host memory, in two hops."""

    def run(self) -> None: ...

    def cancel(self) -> None: ...


STUCK_S = 1.0
"""How long a plugin may keep the progress thread before another one steps in."""

Overrule = Callable[[LivePeer, Group], tuple[str, ...]]
Stage = Callable[[Sink, Rows, Requests, LivePeer, Selection, Options, float], Staged]
Relieve = Callable[[LivePeer], bool]
Observe = Callable[[LivePeer, str, int, int, int, float], None]


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Who waits for whom. What has a priority with a limit goes in parts of about `slice` bytes."""

    admission: Rules
    slice: int


@dataclass(frozen=True, slots=True)
class Drive:
    """What pushes the runtime on: the time with its calls, and two queues. By default each is a thread; a
    test may put in their place what it moves step by step.

    `progress` carries on what has failed, and waits for nothing; `patient` does what may wait a little: for a
    peer that is to be woken, for others to let go of what this one needs.
    """

    alarm: Alarm
    progress: SerialQueue
    patient: SerialQueue

    @classmethod
    def threads(cls) -> Drive:
        """Real time, and a thread for each."""
        return cls(Alarm("tent-alarm"), SerialQueue("tent-progress"), SerialQueue("tent-patient"))


class Dispatcher:
    """The data path of one engine, from checked requests to settled batches. Thread-safe, without a lock.

    The submitting thread offers work to transports; whichever thread reports the last request of a
    sub-batch settles it; what has to move to another candidate is carried on by the progress thread, or by
    the submitting thread if it waits anyway. One more thread has the alarms, and only sets others going,
    and one does what may wait. Each starts when it is first needed.
    """

    def __init__(
        self,
        planner: Planner,
        stats: Stats,
        log: Any,
        max_attempts: int,
        scheduling: Scheduling,
        on_poll: bool,
        drive: Drive,
    ) -> None:
        """`on_poll`: whether a thread that polls may carry on what has failed."""
        self.planner = planner
        self.stats = stats
        self.log = log
        self.max_tries = 1 + max_attempts
        self.limits = scheduling.admission.limits
        self.slice = scheduling.slice
        self.progress = drive.progress
        self.alarm = drive.alarm
        self.now = drive.alarm.now
        self._patient = drive.patient
        self._spare = SerialQueue("tent-progress-spare")
        self._guarding = False
        self._cancelling = frozenset(
            name for name in planner.facts if planner.able(name).cancellation
        )
        self._push = self.progress.help if on_poll else None
        self.overrule: Overrule | None = None
        self.observe: Observe | None = None
        self.relieve: Relieve | None = None
        self.stage: Stage | None = None
        self.turns: Turns | None = None
        self.taking_turns: frozenset[Priority] = frozenset()
        """The priorities that take turns with other processes."""
        self._failures = RateLimited(log)

    def close(self, timeout: float) -> None:
        """End its threads, and log the failures that were only counted so far."""
        self.alarm.close(timeout)
        self._patient.close(timeout)
        self._spare.close(timeout)
        self.progress.close(timeout)
        self._failures.flush()

    # ---------------------------------------------------------------- planning

    def groups(
        self,
        peer: LivePeer,
        requests: Requests,
        local: dict[int, Trait],
        remote: dict[int, Trait],
        options: Options,
        rows: Rows,
    ) -> list[Group]:
        """Which rows go to which candidates. Cached per peer until anything that selection reads changes."""
        groups: list[Group] = []
        for some, chosen, here, there in by_trait(requests, local, remote):
            where = chosen if rows is None else rows if chosen is None else rows[chosen]
            groups += by_size(some, where, self.plan(peer, here, there, options))
        alone = len(groups) == 1 and self._unruled(options)
        return [self._merged(group, alone) for group in groups]

    def _unruled(self, options: Options) -> bool:
        """Whether transfers with these options wait for nobody, and have no limits on each attempt."""
        return (
            self.overrule is None
            and options.attempt_s is None
            and options.stall_s is None
            and not self._limited(options)
        )

    def _limited(self, options: Options) -> bool:
        """Whether transfers with these options may have to wait for room, or for a turn."""
        priority = options.priority
        return self.limits.get(priority) is not None or priority in self.taking_turns

    def _merged(self, group: Group, alone: bool) -> Group:
        """With neighbours joined, unless they would be larger than a candidate takes."""
        selection = group.selection
        merged = merge(group.requests, lambda: self._largest(selection.candidates))
        if merged is not None:
            return Group(merged[0], group.rows, selection, merged[1])
        if alone and selection.untimed:
            return Group(group.requests, group.rows, selection, None, True)
        return group

    def _largest(self, names: tuple[str, ...]) -> int | None:
        """The largest request that all of these transports take, or None."""
        limits = [self.planner.able(name).largest_request for name in names]
        return min((limit for limit in limits if limit is not None), default=None)

    def plan(self, peer: LivePeer, here: Trait, there: Trait, options: Options) -> Any:
        """The plan for requests between buffers of these traits."""
        plans = peer.plans
        key = (here, there, options.priority, options.intent, options.policy, options.transport)
        plan = plans.get(key)
        if plan is None:
            plan = plans[key] = self.planner.plan(
                here,
                there,
                options,
                same_machine=peer.same_machine,
                same_process=peer.same_process,
                unreachable=dict(peer.unreachable),
            )
        return plan

    # ---------------------------------------------------------------- carrying

    def start(
        self,
        batch: Batch,
        peer: LivePeer,
        groups: list[Group],
        options: Options,
        deadline: float,
        began: float,
        may_block: bool,
    ) -> None:
        """Set all groups going, at `began`. With `may_block` the calling thread may carry them out itself."""
        first, traffic = groups[0] if groups else None, peer.traffic
        if first is not None and first.direct and not traffic.troubled and began < deadline:
            endpoint = peer.endpoints.ready.get(first.selection.candidates[0])
            paced = traffic.pacing and first.requests.total >= BULK
            if endpoint is not None and not paced:
                attempt = FirstWork(self, batch, peer, first, options, deadline, began, may_block)
                self.first(attempt, endpoint, endpoint.submit)
                return
        limited = self._limited(options)
        for group in groups:
            requests, rows, selection = group.requests, group.rows, group.selection
            names = selection.candidates
            if self.overrule is not None:
                names = self.overrule(peer, group)
            sink: Sink = batch
            if group.merge is not None:
                sink, rows = MergedSink(batch, rows, group.merge), None
            if selection.route is not None and self.stage is not None:
                staged = self.stage(sink, rows, requests, peer, selection, options, deadline)
                batch.carried_by([staged], self._push)
                staged.run()
                continue
            work: Iterable[tuple[Sink, Requests, Rows]] = ((sink, requests, rows),)
            if limited and requests.total > self.slice and not self._schedules_itself(names):
                work = self._parts(sink, requests, rows)
            carries = [
                Carry(
                    self,
                    to,
                    peer,
                    some,
                    at,
                    selection,
                    names,
                    options,
                    deadline,
                    may_block,
                    limited,
                )
                for to, some, at in work
            ]
            if not may_block:
                batch.carried_by(carries, self._push)
            for carry in carries:
                carry.run()

    def first(self, work: FirstWork, endpoint: Endpoint, submit: Callable[[Work], None]) -> None:
        """Have the endpoint of its first candidate carry the work, by `submit`.

        A Carry takes 2 of 15 microseconds of a write of 4 KiB: it is made only once this attempt has failed.
        """
        attempt: FirstAttempt | None = None  # nobody can cancel what a thread waits for
        if not work.may_block:
            cancels = work.name in self._cancelling
            attempt = work.attempt = FirstAttempt(work, endpoint if cancels else None)
            work.batch.carried_by((attempt,), self._push)
        try:
            submit(work)
        except TentError as error:
            work.refuse(error)
        except Exception as error:
            work.fail(raised(self.log, work.name, error), fenced=False)
        work.submitting = 0
        if work.inline is not None:
            work.inline.go_on(work)
        elif attempt is not None and attempt.cancelled:
            attempt.cancel()  # by somebody who came before the transport knew the work

    def _parts(
        self, sink: Sink, requests: Requests, rows: Rows
    ) -> Iterator[tuple[Sink, Requests, Rows]]:
        """Bulk in parts, each with a sink of its own."""
        pieces, spans = parts(requests, self.slice)
        whole = PartsSink(sink, rows, pieces)
        for start, stop in spans:
            yield whole.part(start, stop), part(requests, pieces, start, stop), None

    def _schedules_itself(self, names: tuple[str, ...]) -> bool:
        """Whether the first candidate does its own slicing: what is cut for it would only be slower."""
        return bool(names) and self.planner.able(names[0]).self_scheduling

    def feasible(
        self, peer: LivePeer, groups: list[Group], options: Options, deadline: float
    ) -> bool | None:
        """Whether the groups can be expected to be done by `deadline`, behind what is under way; None where
        nothing is known of how fast their transports have been."""
        left = deadline - self.now()
        if left <= 0.0:
            return False
        if peer.traffic.troubled:
            return None  # which transport will carry it is not known before it is tried
        sizes: Counter[str] = Counter()
        for group in groups:
            if group.selection.candidates:
                sizes[group.selection.candidates[0]] += group.requests.total
        in_line = self.limits.get(options.priority) is not None
        seconds = [peer.traffic.seconds_for(n, s, in_line=in_line) for n, s in sizes.items()]
        known = [s for s in seconds if s is not None]
        if known and max(known) > left:
            return False
        return True if known and len(known) == len(seconds) else None

    def later(self, call: Callable[[], None]) -> None:
        """Run `call` in the progress thread: what must not run in the thread that learned of it."""
        self._queued(self.progress, call)
        if not self._guarding:
            self._guarding = True
            self.alarm.at(self.now() + STUCK_S, self._guard)

    def _guard(self) -> None:
        """A plugin that does not come back to the progress thread harms only itself: another thread makes the
        calls that wait behind it."""
        busy = self.progress.busy_for()
        if busy >= STUCK_S:
            self._failures.warning("progress_stuck", seconds=round(busy, 1))
            with suppress(ClosedError):
                self._spare.submit(self._catch_up)
        self._guarding = busy > 0
        if self._guarding:
            self.alarm.at(self.now() + STUCK_S, self._guard)

    def _catch_up(self) -> None:
        while self.progress.busy_for() >= STUCK_S and self.progress.help():
            pass

    def patiently(self, call: Callable[[], None]) -> None:
        """Run `call`, which may wait a little, where it keeps up only others of its kind."""
        self._queued(self._patient, call)

    def _queued(self, queue: SerialQueue, call: Callable[[], None]) -> None:
        try:
            queue.submit(partial(self._make, call))
        except ClosedError:
            self._make(call)  # the engine has stopped: what is left only ends

    def _make(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            self.log.exception("runtime_raised")
            raise

    def watch(
        self,
        carry: Carry,
        work: Work,
        name: str,
        attempt_s: float | None,
        stall_s: float | None,
    ) -> None:
        """Transport `name` has `work`: see to it that the attempt does not take longer than it may."""
        if attempt_s is not None:
            cause = TransportError(f"the attempt took longer than its {attempt_s:g} s")
            self._look_at(carry, work, attempt_s, partial(carry.abandon, work, name, cause))
        if stall_s is not None:
            stalled = TransportError(f"no byte moved for {stall_s:g} s: it stalled")
            self._look_for_stall(carry, work, stall_s, partial(carry.abandon, work, name, stalled))

    def _look_at(
        self, carry: Carry, work: Work, seconds: float, give_up: Callable[[], None]
    ) -> None:
        def look() -> None:
            if not work.finished:
                self.later(give_up)

        carry.watched(work, self.alarm.at(self.now() + seconds, look))

    def _look_for_stall(
        self, carry: Carry, work: Work, stall_s: float, give_up: Callable[[], None]
    ) -> None:
        """Look again in `stall_s` seconds whether a byte has moved."""
        before = work.progress

        def look() -> None:
            if work.finished:
                return
            if work.progress == before:
                self.later(give_up)
            else:
                self._look_for_stall(carry, work, stall_s, give_up)

        carry.watched(work, self.alarm.at(self.now() + stall_s, look))

    def count(
        self, peer: LivePeer, name: str, work: Work, n: int, failed: int, began: float
    ) -> None:
        """Account a finished sub-batch of `n` requests, log the first of a peer and the failures, tell
        observers. `began` is when the attempt did."""
        moved = work.requests.total if not work.causes else int(work.moved.sum())
        cause = work.causes[0].cause if work.causes else None
        kind = type(cause).__name__ if cause is not None else None
        if self.stats.count(name, peer.counters, n, moved, failed, kind) and failed < n:
            self.log.info("peer_reached", peer=str(peer.key), transport=name)
        if work.surplus:
            self.stats.count_surplus(work.surplus)
            self._failures.warning("surplus_reports", transport=name, requests=work.surplus)
        if failed:
            self._failures.warning(
                "transfers_failed",
                transport=name,
                peer=str(peer.key),
                requests=failed,
                cause=str(cause),
            )
        if self.observe is not None:
            self.observe(peer, name, n, moved, failed, self.now() - began)
