"""Carries batches: plans groups, offers each to its candidates in turn, and settles what comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tent_core.batch import Batch, Options, Rows, Try
from tent_core.columns import subset
from tent_core.errors import PeerDeparted, TentError, TransportError, UsageError
from tent_core.failover import judge
from tent_core.log import RateLimited
from tent_core.peers import LivePeer
from tent_core.planning import Group, Planner, Trait, by_size, by_trait
from tent_core.scarcity import lacks_resources
from tent_core.serial import SerialQueue
from tent_core.stats import Stats
from tent_core.types import Status
from tent_core.work import Requests, Work

Overrule = Callable[[LivePeer, Group], tuple[str, ...]]
Relieve = Callable[[LivePeer], bool]
Observe = Callable[[LivePeer, str, int, int, int], None]


class Dispatcher:
    """The data path of one engine, from checked requests to settled batches. Thread-safe, without a lock.

    The submitting thread offers work to transports; whichever thread reports the last request of a
    sub-batch settles it; what has to move to another candidate is carried on by the progress thread, or by
    the submitting thread if it waits anyway.
    """

    def __init__(self, planner: Planner, stats: Stats, log: Any, max_attempts: int) -> None:
        self.planner = planner
        self.stats = stats
        self.log = log
        self.max_tries = 1 + max_attempts
        self.progress = SerialQueue("tent-progress")
        self.overrule: Overrule | None = None
        self.observe: Observe | None = None
        self.relieve: Relieve | None = None
        self._failures = RateLimited(log)

    def close(self, timeout: float) -> None:
        """End the progress thread, and log the failures that were only counted so far."""
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
        for part, chosen, here, there in by_trait(requests, local, remote):
            where = chosen if rows is None else rows if chosen is None else rows[chosen]
            groups += by_size(part, where, self.plan(peer, here, there, options))
        return groups

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
        self, batch: Batch, peer: LivePeer, groups: list[Group], deadline: float, may_block: bool
    ) -> None:
        """Set all groups going. With `may_block` the calling thread may carry them out itself."""
        for group in groups:
            names = group.selection.candidates
            if self.overrule is not None:
                names = self.overrule(peer, group)
            carry = _Carry(self, batch, peer, group, names, deadline, may_block)
            if may_block or not names or names[0] in peer.endpoints.ready:
                carry.run()
            else:
                # The first connect may wait, and this caller (an event loop, say) may not.
                self.progress.submit(carry.run)

    def count(self, peer: LivePeer, name: str, work: Work, failed: int) -> None:
        """Account a finished sub-batch, log the first of a peer and the failures, tell observers."""
        n = len(work)
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


class _Carry:
    """One group on its way through its candidates. One thread at a time works on it."""

    __slots__ = (
        "_batch",
        "_began",
        "_deadline",
        "_dispatcher",
        "_ended_inline",
        "_left",
        "_may_block",
        "_name",
        "_peer",
        "_relieved",
        "_requests",
        "_rows",
        "_selection",
        "_submitting",
        "_tries",
    )

    def __init__(
        self,
        dispatcher: Dispatcher,
        batch: Batch,
        peer: LivePeer,
        group: Group,
        names: tuple[str, ...],
        deadline: float,
        may_block: bool,
    ) -> None:
        self._dispatcher = dispatcher
        self._batch = batch
        self._peer = peer
        self._requests = group.requests
        self._rows = group.rows
        self._selection = group.selection
        self._left = names
        self._deadline = deadline
        self._may_block = may_block
        self._tries: tuple[Try, ...] = ()
        self._name = ""
        self._relieved = ""
        """The candidate for which idle peers were asked to let go."""
        self._began = 0.0
        self._submitting = 0
        self._ended_inline = False

    def run(self) -> None:
        """Offer the requests to candidate after candidate until one takes them or none is left."""
        while True:
            work = self._offer()
            if work is None or not self._settle(work):
                return

    def _offer(self) -> Work | None:
        """Submit to the next candidate; answers the work if it ended within this call."""
        if not self._next():
            self._exhausted()
            return None
        work = self._submit()
        if work is not None and self._may_block and self._for_lack_of_resources(work):
            work = self._submit()
        return work

    def _submit(self) -> Work | None:
        self._began = time.monotonic()
        entry = self._selection.entry
        work = Work(
            self._requests,
            self._finished,
            may_block=self._may_block,
            deadline=self._deadline,
            devices=entry.devices if entry is not None else (),
            qp_pool=entry.qp_pool if entry is not None else None,
        )
        self._ended_inline = False
        self._submitting = threading.get_ident()
        try:
            self._peer.endpoint(self._name).submit(work)
        except TentError as error:
            work.refuse(error)
        except Exception as error:
            # A broken plugin: what it may have started is unknown.
            cause = TransportError(f"transport {self._name} raised {error!r} in submit")
            cause.__cause__ = error
            self._dispatcher.log.error(
                "transport_raised", transport=self._name, doing="submit", error=repr(error)
            )
            work.fail(cause, fenced=False)
        self._submitting = 0
        return work if self._ended_inline else None

    def _for_lack_of_resources(self, work: Work) -> bool:
        """Whether nothing of `work` was done for lack of what idle peers hold, and some have let go.

        Asked once for each candidate. Waits."""
        relieve = self._dispatcher.relieve
        if relieve is None or self._relieved == self._name or not work.causes:
            return False
        self._relieved = self._name
        return (
            not (work.status == Status.COMPLETED).any()
            and not work.moved.any()
            and not work.unfenced
            and lacks_resources(work.causes[0].cause)
            and relieve(self._peer)
        )

    def _next(self) -> bool:
        if not self._left or len(self._tries) >= self._dispatcher.max_tries:
            return False
        self._name, self._left = self._left[0], self._left[1:]
        return True

    def _finished(self, work: Work) -> None:
        """The last request of `work` was reported, in any thread."""
        if self._submitting == threading.get_ident():
            self._ended_inline = True  # `run` goes on in this same thread
        elif not work.causes:
            self._settle(work)
        else:
            self._dispatcher.progress.submit(lambda: self._resume(work))

    def _resume(self, work: Work) -> None:
        """In the progress thread, which may wait a little."""
        self._may_block = False
        if self._for_lack_of_resources(work):
            again = self._submit()
            if again is None:
                return
            work = again
        if self._settle(work):
            self.run()

    def _settle(self, work: Work) -> bool:
        """Record what `work` achieved. True when requests are left that the next candidate shall carry."""
        if not work.causes:
            self._dispatcher.count(self._peer, self._name, work, 0)
            self._batch.settle(self._rows, work.status, work.moved, self._name)
            return False
        done = np.flatnonzero(work.status == Status.COMPLETED)
        self._dispatcher.count(self._peer, self._name, work, len(work) - len(done))
        if len(done):
            self._batch.settle(self._at(done), Status.COMPLETED, work.moved[done], self._name)
        moving = []
        seconds = time.monotonic() - self._began
        for verdict in judge(work):
            attempt = Try(self._name, self._explained(verdict.cause), seconds)
            if verdict.movable and self._left and len(self._tries) + 1 < self._dispatcher.max_tries:
                moving.append((verdict, attempt))
            else:
                self._batch.settle_failed(
                    self._at(verdict.rows),
                    verdict.status,
                    work.moved[verdict.rows],
                    (*self._tries, attempt),
                )
        if not moving:
            return False
        rows = np.concatenate([verdict.rows for verdict, _ in moving])
        self._tries = (*self._tries, moving[0][1])
        self._dispatcher.stats.count_failover(len(rows))
        self._rows = self._at(rows)
        self._requests = subset(self._requests, rows)
        return True

    def _explained(self, cause: Exception) -> Exception:
        """A failure with the departure behind it: its transport may know only that a stream broke."""
        reason = self._peer.departed
        if reason is None or isinstance(cause, UsageError | PeerDeparted):
            return cause
        departed = PeerDeparted(f"peer {self._peer.key} departed ({reason}): {cause}")
        departed.__cause__ = cause
        return departed

    def _at(self, rows: Any) -> Any:
        """Positions in the batch of rows of the present requests."""
        return rows if self._rows is None else self._rows[rows]

    def _exhausted(self) -> None:
        """No candidate at all: say for each transport why."""
        why = "; ".join(f"{p.name}: {p.reason}" for p in self._selection.passed_over)
        entry = self._selection.entry.name if self._selection.entry else "none"
        cause = TransportError(
            f"no transport can carry this (policy entry {entry}): {why or 'none is listed'}"
        )
        rows = np.arange(len(self._batch)) if self._rows is None else self._rows
        tries = (*self._tries, Try("selection", cause, 0.0))
        self._batch.settle_failed(rows, Status.FAILED, None, tries)
