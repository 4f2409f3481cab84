"""Carries batches: plans groups, offers each to its candidates in turn, and settles what comes back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tent_core.admission import Rules
from tent_core.alarm import Alarm
from tent_core.batch import Batch, Options, Rows
from tent_core.carry import Carry
from tent_core.errors import ClosedError, TransportError
from tent_core.log import RateLimited
from tent_core.peers import LivePeer
from tent_core.planning import Group, Planner, Trait, by_size, by_trait
from tent_core.reshape import MergedSink, PartsSink, Sink, merge, part, parts
from tent_core.serial import SerialQueue
from tent_core.stats import Stats
from tent_core.work import Requests, Work

Overrule = Callable[[LivePeer, Group], tuple[str, ...]]
Relieve = Callable[[LivePeer], bool]
Observe = Callable[[LivePeer, str, int, int, int], None]


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Who waits for whom. What has a priority with a limit goes in parts of about `slice` bytes."""

    admission: Rules
    slice: int


class Dispatcher:
    """The data path of one engine, from checked requests to settled batches. Thread-safe, without a lock.

    The submitting thread offers work to transports; whichever thread reports the last request of a
    sub-batch settles it; what has to move to another candidate is carried on by the progress thread, or by
    the submitting thread if it waits anyway. One more thread has the alarms, and only sets others going.
    """

    def __init__(
        self,
        planner: Planner,
        stats: Stats,
        log: Any,
        max_attempts: int,
        scheduling: Scheduling,
        on_poll: bool,
    ) -> None:
        """`on_poll`: whether a thread that polls may carry on what has failed."""
        self.planner = planner
        self.stats = stats
        self.log = log
        self.max_tries = 1 + max_attempts
        self.limits = scheduling.admission.limits
        self.slice = scheduling.slice
        self.progress = SerialQueue("tent-progress")
        self.alarm = Alarm("tent-alarm")
        self._push = self.progress.help if on_poll else None
        self.overrule: Overrule | None = None
        self.observe: Observe | None = None
        self.relieve: Relieve | None = None
        self._failures = RateLimited(log)

    def close(self, timeout: float) -> None:
        """End its threads, and log the failures that were only counted so far."""
        self.alarm.close(timeout)
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
        return [self._merged(group) for group in groups]

    def _merged(self, group: Group) -> Group:
        """With neighbours joined, unless they would be larger than a candidate takes."""
        limits = [
            capabilities.largest_request
            for name in group.selection.candidates
            if (capabilities := self.planner.facts[name].capabilities) is not None
            and capabilities.largest_request is not None
        ]
        merged = merge(group.requests, min(limits, default=None))
        if merged is None:
            return group
        return Group(merged[0], group.rows, group.selection, merged[1])

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
        may_block: bool,
    ) -> None:
        """Set all groups going. With `may_block` the calling thread may carry them out itself."""
        sliced = self.limits.get(options.priority) is not None
        for group in groups:
            names = group.selection.candidates
            if self.overrule is not None:
                names = self.overrule(peer, group)
            requests, rows, selection = group.requests, group.rows, group.selection
            sink: Sink = batch
            if group.merge is not None:
                sink, rows = MergedSink(batch, rows, group.merge), None
            if sliced and requests.total > self.slice and not self._schedules_itself(names):
                pieces, spans = parts(requests, self.slice)
                whole = PartsSink(sink, rows, pieces)
                work: list[tuple[Sink, Requests, Rows]] = [
                    (whole.part(start, stop), part(requests, pieces, start, stop), None)
                    for start, stop in spans
                ]
            else:
                work = [(sink, requests, rows)]
            carries = [
                Carry(self, to, peer, some, at, selection, names, options, deadline, may_block)
                for to, some, at in work
            ]
            if not may_block:
                batch.carried_by(carries, self._push)
            for carry in carries:
                carry.run()

    def _schedules_itself(self, names: tuple[str, ...]) -> bool:
        """Whether the first candidate does its own slicing: what is cut for it would only be slower."""
        facts = self.planner.facts.get(names[0]) if names else None
        able = facts.capabilities if facts is not None else None
        return able is not None and able.self_scheduling

    def feasible(
        self, peer: LivePeer, groups: list[Group], options: Options, deadline: float
    ) -> bool | None:
        """Whether the groups can be expected to be done by `deadline`, behind what is under way; None where
        nothing is known of how fast their transports have been."""
        left = deadline - time.monotonic()
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
        """Run `call` in the progress thread: what must not run in the thread that learned of it.

        After the close of the engine it runs at once: there is nothing to wait for any more, and who waits
        for a batch that a transport was late to report must not wait for ever."""
        try:
            self.progress.submit(call)
        except ClosedError:
            call()

    def watch(self, carry: Carry, work: Work, attempt_s: float | None) -> None:
        """`work` is under way: see to it that the attempt does not take longer than it may."""
        if attempt_s is not None:
            cause = TransportError(f"the attempt took longer than its {attempt_s:g} s")
            carry.watched(
                self.alarm.at(
                    time.monotonic() + attempt_s,
                    lambda: self.later(lambda: carry.abandon(work, cause)),
                )
            )
        stall_s = carry.stall_s
        if stall_s is not None:
            self._look_at(carry, work, stall_s, work.progress)

    def _look_at(self, carry: Carry, work: Work, stall_s: float, before: int) -> None:
        """Look again in `stall_s` seconds whether a byte has moved."""

        def look() -> None:
            if work.finished:
                return
            if work.progress == before:
                cause = TransportError(f"no byte moved for {stall_s:g} s: it stalled")
                self.later(lambda: carry.abandon(work, cause))
            else:
                self._look_at(carry, work, stall_s, work.progress)

        carry.watched(self.alarm.at(time.monotonic() + stall_s, look))

    def count(self, peer: LivePeer, name: str, work: Work, n: int, failed: int) -> None:
        """Account a finished sub-batch of `n` requests, log the first of a peer and the failures, tell
        observers."""
        moved = work.requests.total if not failed else int(work.moved.sum())
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
            self.observe(peer, name, n, moved, failed)
