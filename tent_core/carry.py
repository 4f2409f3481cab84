"""One sub-batch on its way through its candidates: an explicit state machine that threads push on."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tent_core.admission import Ticket
from tent_core.batch import Options, Rows, Try
from tent_core.columns import subset
from tent_core.endpoints import CONNECT_TIMEOUT_S
from tent_core.errors import (
    DeadlinePassed,
    PeerDeparted,
    TentError,
    TransferCanceled,
    TransportError,
    UsageError,
)
from tent_core.failover import judge, rest_s
from tent_core.once import Once
from tent_core.pace import BULK
from tent_core.reshape import Sink
from tent_core.scarcity import lacks_resources
from tent_core.turns import Turn
from tent_core.types import Status
from tent_core.work import Requests, Work

if TYPE_CHECKING:
    from tent_core.alarm import Handle
    from tent_core.dispatch import Dispatcher
    from tent_core.peers import LivePeer
    from tent_core.policy import Selection
    from tent_core.traffic import Traffic
    from tent_core.transport import Endpoint


_LATE_S = 0.1
"""How much later than the alarm, which has the deadlines of all that wait, a waiting thread looks itself."""


class Phase(enum.Enum):
    """Where a sub-batch is."""

    READY = enum.auto()
    """A thread is about to push it on."""
    CONNECTING = enum.auto()
    WAITING = enum.auto()
    """For room on its transport."""
    RESTING = enum.auto()
    """Every candidate has been tried, and some may yet carry it."""
    RUNNING = enum.auto()
    """A transport has it."""
    ENDED = enum.auto()


def raised(log: Any, name: str, error: Exception, doing: str = "submit") -> TransportError:
    """The cause of a failure at a broken plugin, which raised `error`: what it has started is unknown."""
    cause = TransportError(f"transport {name} raised {error!r} in {doing}")
    cause.__cause__ = error
    log.error("transport_raised", transport=name, doing=doing, error=repr(error))
    return cause


def interrupt(endpoint: Endpoint, work: Work, name: str, log: Any) -> None:
    """Have an endpoint that can do so end `work`, which is cancelled."""
    try:
        endpoint.cancel(work)
    except Exception as error:
        # It ends later, by itself: `cancel` is a favour.
        log.error("transport_raised", transport=name, doing="cancel", error=repr(error))


class Carry:
    """One group of requests, one candidate at a time. One thread at a time pushes it on (`run`); `cancel` may
    come from any other, and only sets a flag, withdraws a ticket, ends a pause, or asks the transport.
    Whoever sets out to wait looks at the flag once more when it can be found waiting."""

    __slots__ = (
        "_abandoned",
        "_again",
        "_began",
        "_cancelled",
        "_deadline",
        "_dispatcher",
        "_inline",
        "_left",
        "_limited",
        "_may_block",
        "_name",
        "_options",
        "_paced",
        "_pause",
        "_peer",
        "_phase",
        "_relieved",
        "_requests",
        "_rows",
        "_selection",
        "_sink",
        "_submitting",
        "_ticket",
        "_traffic",
        "_tries",
        "_turn",
        "_watches",
        "_work",
    )

    def __init__(
        self,
        dispatcher: Dispatcher,
        sink: Sink,
        peer: LivePeer,
        requests: Requests,
        rows: Rows,
        selection: Selection,
        names: tuple[str, ...],
        options: Options,
        deadline: float,
        may_block: bool,
        limited: bool,
    ) -> None:
        """`limited`: its priority has a limit, so that it may have to wait for room."""
        self._dispatcher = dispatcher
        self._sink = sink
        self._peer = peer
        self._traffic: Traffic = peer.traffic
        self._requests = requests
        self._rows = rows
        self._selection = selection
        self._left = names
        self._again: tuple[str, ...] = ()
        """Candidates that have failed in a way that may pass."""
        self._options = options
        self._deadline = deadline
        self._may_block = may_block
        self._limited = limited
        self._tries: tuple[Try, ...] = ()
        self._name = ""
        self._began = 0.0
        self._paced = 0
        """Bytes of the attempt, if it is counted for the pace of its transport."""
        self._submitting = 0
        self._inline: Work | None = None
        self._phase = Phase.READY
        self._ticket: Ticket | None = None
        self._turn: Turn | None = None
        self._pause: Once | None = None
        """What it waits for while no transport has it: a connection, or the end of a rest."""
        self._cancelled = False
        self._relieved = ""
        """The candidate for which idle peers were asked to let go."""
        self._abandoned: tuple[Work, TentError] | None = None
        self._watches: tuple[Handle, ...] = ()
        self._work: Work | None = None

    # ---------------------------------------------------------------- pushed on

    def run(self) -> None:
        """Offer the requests to candidate after candidate until one takes them or none is left. When all have
        been tried, those whose failure may pass have another turn, after a rest."""
        while True:
            if self._cancelled:
                self._leave()
                self._end(TransferCanceled("it was cancelled before it ended"), Status.CANCELED)
                return
            if not self._name:
                if not self._left and self._again:
                    self._left, self._again = self._again, ()
                    self._rest()
                    return
                if not self._next():
                    self._exhausted()
                    return
            if self._limited and not (self._may_enter() and self._has_turn()):
                return
            if self._is_cancelled():
                continue
            work = self._submit()
            if work is not None and self._may_block and self._for_lack_of_resources(work):
                work = self._submit()
            if work is None or not self._settle(work):
                return

    def take_up(self, began: float) -> None:
        """Its first candidate has just failed with a work that began then: `go_on`, or `go_on_later`."""
        self._name, self._left = self._left[0], self._left[1:]
        self._began = began

    def go_on(self, work: Work) -> None:
        """Go on from `work`, in the thread that submitted it."""
        again: Work | None = work
        if self._may_block and self._for_lack_of_resources(work):
            again = self._submit()
        if again is not None and self._settle(again):
            self.run()

    def go_on_later(self, work: Work) -> None:
        """The same in the progress thread."""
        self._dispatcher.later(lambda: self._resume(work))

    def _next(self) -> bool:
        """Take the next candidate: those that have been failing come last."""
        if not self._left or len(self._tries) >= self._dispatcher.max_tries:
            return False
        left = self._left
        if len(left) > 1 and self._traffic.troubled:
            left = self._traffic.order(left)
        self._name, self._left = left[0], left[1:]
        return True

    def _submit(self) -> Work | None:
        """Give it to the candidate; answers the work if it ended within this call."""
        self._began = began = self._dispatcher.now()
        if began >= self._deadline:
            self._too_late()
            return None
        options, entry, until = self._options, self._selection.entry, self._deadline
        attempt_s, stall_s = options.attempt_s, options.stall_s
        devices: tuple[str, ...] = ()
        pool = None
        if entry is not None:
            devices, pool = entry.devices, entry.qp_pool
            if attempt_s is None:
                attempt_s = entry.attempt_s
            if stall_s is None:
                stall_s = entry.stall_s
        if attempt_s is not None:
            until = min(until, began + attempt_s)
        work = Work(
            self._requests,
            self._finished,
            may_block=self._may_block,
            deadline=until,
            priority=options.priority,
            expires=self._deadline,
            devices=devices,
            qp_pool=pool,
        )
        name = self._name
        if stall_s is not None and not self._dispatcher.planner.able(name).partial_progress:
            stall_s = None  # nobody could tell
        endpoint = self._peer.endpoints.ready.get(name)
        if endpoint is None and not self._may_block:
            self._connect(until)
            return None
        if self._traffic.pacing and endpoint is not None and not self._paced:
            self._pace()
        self._work = work
        self._phase = Phase.RUNNING
        self._submitting = threading.get_ident()
        timed = self._may_block and (attempt_s is not None or stall_s is not None)
        if timed:  # nobody looks after `submit`: it returns at the end
            self._dispatcher.watch(self, work, name, attempt_s, stall_s)
        try:
            if endpoint is None:
                endpoint = self._peer.endpoint(name, min(CONNECT_TIMEOUT_S, until - began))
            endpoint.submit(work)
        except TentError as error:
            work.refuse(error)
        except Exception as error:
            work.fail(raised(self._dispatcher.log, name, error), fenced=False)
        if self._inline is work:
            return work
        if self._work is work:  # else another thread is at the next attempt already
            self._submitting = 0
        if not work.finished:
            if not timed:
                self._dispatcher.watch(self, work, name, attempt_s, stall_s)
            if self._cancelled:  # by somebody who came before the transport knew the work
                self._stop_attempt(work, name)
        return None

    def _pace(self) -> None:
        size = self._requests.total
        if size >= BULK:
            self._paced = size
            self._traffic.began(self._name, size)

    def _connect(self, until: float) -> None:
        """Have the endpoint made, and go on when it is, at a time-out, or when nobody wants it any more: this
        thread must not wait."""
        self._work = None
        dispatcher, name = self._dispatcher, self._name
        go_on = self._paused(Phase.CONNECTING)
        try:
            made = self._peer.endpoints.begin(name)
        except TentError as error:
            go_on(error)
            return
        seconds = min(CONNECT_TIMEOUT_S, until - self._began)
        slow = TransportError(f"transport {name} did not connect within {seconds:g} s")
        limit = dispatcher.alarm.at(self._began + seconds, lambda: go_on(slow))

        def connected(future: Any) -> None:
            limit.cancel()
            go_on(future.exception())

        made.add_done_callback(connected)
        if self._cancelled:
            go_on()

    def _rest(self) -> None:
        """Go on a little later, in the progress thread: no thread is kept. At once when the peer departs, or
        when nobody wants it any more."""
        self._may_block = False
        go_on = self._paused(Phase.RESTING)
        self._traffic.rest(rest_s(len(self._tries)), go_on)
        if self._cancelled or self._peer.departed is not None:
            go_on()

    def _paused(self, phase: Phase) -> Callable[..., None]:
        """Begin a pause. What is answered ends it, called by whoever comes first, in whatever thread; with an
        error if what it waits for has failed."""
        self._phase = phase
        once = self._pause = Once()

        def go_on(error: BaseException | None = None) -> None:
            if once.take():
                self._dispatcher.later(lambda: self._resume_paused(error))

        return go_on

    def _resume_paused(self, error: BaseException | None) -> None:
        self._phase = Phase.READY
        self._pause = None
        if error is None:
            self.run()
            return
        if self._dispatcher.now() >= self._deadline:
            self._too_late()
            return
        cause = error if isinstance(error, TentError) else TransportError(repr(error))
        work = Work(self._requests, lambda _: None, deadline=self._deadline)
        work.refuse(cause)
        if self._settle(work):
            self.run()

    def _for_lack_of_resources(self, work: Work) -> bool:
        """Whether nothing of `work` was done for lack of what idle peers hold, and some have let go.

        Asked once for each candidate. Waits."""
        relieve = self._dispatcher.relieve
        if relieve is None or not self._lacked_resources(work):
            return False
        self._relieved = self._name
        return relieve(self._peer)

    def _lacked_resources(self, work: Work) -> bool:
        return (
            bool(work.causes)
            and self._relieved != self._name
            and not (work.status == Status.COMPLETED).any()
            and not work.moved.any()
            and not work.unfenced
            and lacks_resources(work.causes[0].cause)
        )

    def _count(self, name: str, work: Work, failed: int) -> None:
        n = self._sink.requests(self._rows)
        self._dispatcher.count(self._peer, name, work, n, failed, self._began)

    def _finished(self, work: Work) -> None:
        """The last request of `work` was reported, in any thread."""
        if self._submitting == threading.get_ident() and self._work is work:
            self._inline = work  # `run` goes on in this same thread
        elif not work.causes:
            self._settle(work)
        else:
            self._dispatcher.later(lambda: self._resume(work))

    def _resume(self, work: Work) -> None:
        """In the progress thread, which must not wait."""
        self._may_block = False
        if self._dispatcher.relieve is not None and self._lacked_resources(work):
            self._dispatcher.patiently(lambda: self._resume_relieved(work))
        elif self._settle(work):
            self.run()

    def _resume_relieved(self, work: Work) -> None:
        """In the thread that may wait: have idle peers let go, and try again."""
        again: Work | None = work
        if not self._cancelled and self._for_lack_of_resources(work):
            again = self._submit()
        if again is not None and self._settle(again):
            self.run()

    # ---------------------------------------------------------------- room

    def _may_enter(self) -> bool:
        """Whether it may go on to its transport, or to its end: there is room, or its deadline has passed, or
        it was cancelled. A thread that may block waits here; for another one, who makes room has the
        sub-batch pushed on."""
        if self._ticket is not None:  # somebody has let it go on
            self._phase = Phase.READY
            return True
        name = self._name
        freed = threading.Event() if self._may_block else None
        ticket = Ticket(
            self._options.priority,
            self._requests.total,
            len(self._requests),
            self._deadline,
            freed.set if freed is not None else self._go,
        )
        self._phase = Phase.WAITING
        self._ticket = ticket
        if self._traffic.enter(name, ticket):
            self._phase = Phase.READY
            return True
        # From here on another thread may be pushing it on, unless the ticket can be withdrawn.
        if freed is not None:
            if not freed.wait(max(self._deadline - self._dispatcher.now(), 0.0) + _LATE_S):
                self._traffic.withdraw(name, ticket)
        elif not (self._cancelled and self._traffic.withdraw(name, ticket)):
            return False
        self._phase = Phase.READY
        return True

    def _has_turn(self) -> bool:
        """The same for its turn among the processes of this host, if its priority takes turns with them."""
        turns = self._dispatcher.turns
        if turns is None or self._turn is not None:
            return True
        if self._options.priority not in self._dispatcher.taking_turns:
            return True
        freed = threading.Event() if self._may_block else None
        turn = self._turn = Turn(freed.set if freed is not None else self._go)
        self._phase = Phase.WAITING
        if turns.enter(turn):
            self._phase = Phase.READY
            return True
        if freed is not None:
            if not freed.wait(max(self._deadline - self._dispatcher.now(), 0.0)):
                turns.withdraw(turn)
        elif not (self._cancelled and turns.withdraw(turn)):
            return False
        self._phase = Phase.READY
        return True

    def _go(self) -> None:
        """It may go on, says whoever has made room, or saw its deadline pass."""
        self._dispatcher.later(self.run)

    def _leave(self) -> None:
        """It does not use the transport any more."""
        turn, self._turn = self._turn, None
        if turn is not None and self._dispatcher.turns is not None:
            self._dispatcher.turns.leave(turn)
        ticket, self._ticket = self._ticket, None
        if ticket is not None and ticket.admitted:
            self._traffic.leave(self._name, ticket)

    # ---------------------------------------------------------------- outcomes

    def _settle(self, work: Work) -> bool:
        """Record what `work` achieved. True when requests are left that the next candidate shall carry."""
        self._phase = Phase.READY
        if self._watches:
            for watch in self._watches:
                watch.cancel()
            self._watches = ()
        # The work knows this object, so that to keep it would leave both to the garbage collector.
        self._work = self._inline = None
        name = self._name
        if self._paced:
            size, self._paced = self._paced, 0
            moved = int(work.moved.sum()) if work.causes else size
            self._traffic.ended(name, size, moved, self._began)
        if self._ticket is not None:
            self._leave()
        if not work.causes:
            self._phase = Phase.ENDED
            if self._traffic.troubled:
                self._traffic.succeeded(name)
            self._count(name, work, 0)
            self._sink.settle(self._rows, work.status, work.moved, name)
            return False
        self._name = ""
        done = np.flatnonzero(work.status == Status.COMPLETED)
        undone = self._sink.requests(self._at(np.flatnonzero(work.status != Status.COMPLETED)))
        self._count(name, work, undone)
        if len(done):
            self._sink.settle(self._at(done), Status.COMPLETED, work.moved[done], name)
        moving = []
        now = self._dispatcher.now()
        seconds = now - self._began
        abandoned = self._abandoned
        late = abandoned[1] if abandoned is not None and abandoned[0] is work else None
        gone = self._peer.taken_away(self._requests)
        verdicts = judge(work, late, self._options.retry_unfenced, self._deadline, gone)
        self._note(name, verdicts)
        tries = len(self._tries) + 1
        others = self._left or self._again
        more = tries < self._dispatcher.max_tries and not self._cancelled
        if not self._left and (
            self._peer.departed is not None or now + rest_s(tries) >= self._deadline
        ):
            more = False  # the time of the rest that would follow is not left
        for verdict in verdicts:
            attempt = Try(name, self._explained(verdict.cause), seconds)
            if more and verdict.movable and (others or verdict.may_pass):
                moving.append((verdict, attempt))
            else:
                status = Status.CANCELED if self._cancelled else verdict.status
                self._sink.settle_failed(
                    self._at(verdict.rows),
                    status,
                    work.moved[verdict.rows],
                    (*self._tries, attempt),
                )
        if not moving:
            self._phase = Phase.ENDED
            return False
        rows = np.concatenate([verdict.rows for verdict, _ in moving])
        rows.sort()
        self._tries = (*self._tries, _together([attempt for _, attempt in moving]))
        if any(verdict.may_pass for verdict, _ in moving):
            self._again = (*self._again, name)
        self._rows = self._at(rows)
        self._dispatcher.stats.count_failover(self._sink.requests(self._rows))
        self._requests = subset(self._requests, rows)
        return True

    def _note(self, name: str, verdicts: list[Any]) -> None:
        """Tell the health of the transport, unless it is not to blame."""
        if any(verdict.blames_transport for verdict in verdicts):
            pause = self._traffic.failed(name)
            if pause is not None:
                self._dispatcher.log.warning(
                    "transport_paused", transport=name, peer=str(self._peer.key), seconds=pause
                )

    def _explained(self, cause: Exception) -> Exception:
        """A failure with the departure behind it: its transport may know only that a stream broke."""
        reason = self._peer.departed
        if reason is None or isinstance(cause, UsageError | PeerDeparted):
            return cause
        departed = PeerDeparted(f"peer {self._peer.key} departed ({reason}): {cause}")
        departed.__cause__ = cause
        return departed

    def _at(self, rows: Any) -> Any:
        """Positions behind the sink of rows of the present requests."""
        return rows if self._rows is None else self._rows[rows]

    def _exhausted(self) -> None:
        """No candidate at all: say for each transport why."""
        why = "; ".join(f"{p.name}: {p.reason}" for p in self._selection.passed_over)
        entry = self._selection.entry.name if self._selection.entry else "none"
        cause = TransportError(
            f"no transport can carry this (policy entry {entry}): {why or 'none is listed'}"
        )
        self._end(cause, Status.FAILED)

    def _too_late(self) -> None:
        """Its deadline has passed, and no transport has it."""
        waited = self._ticket is not None and not self._ticket.admitted
        self._leave()
        doing = "while it waited its turn" if waited else "before it was started"
        self._end(DeadlinePassed(f"its deadline passed {doing}"), Status.TIMEOUT)

    def _end(self, cause: Exception, status: Status) -> None:
        """All that is left ends like this, without another attempt."""
        self._phase = Phase.ENDED
        rows = np.arange(len(self._sink)) if self._rows is None else self._rows
        tries = (*self._tries, Try(self._name or "selection", cause, 0.0))
        self._sink.settle_failed(rows, status, None, tries)

    # ---------------------------------------------------------------- from outside

    def _is_cancelled(self) -> bool:
        return self._cancelled  # by any thread, at any time: a type checker must not remember it

    def watched(self, work: Work, handle: Handle) -> None:
        """An alarm that is to be forgotten when this attempt ends. What it calls looks whether it has."""
        if work.finished:
            handle.cancel()
        else:
            self._watches = (*self._watches, handle)

    def cancel(self) -> None:
        """End it as soon as may be: at once while it waits, best effort while a transport has it."""
        self._cancelled = True
        # The name after the ticket and the work: it does not change before they have ended.
        work, ticket, pause = self._work, self._ticket, self._pause
        name = self._name
        turn, turns = self._turn, self._dispatcher.turns
        if ticket is not None and self._traffic.withdraw(name, ticket):
            ticket.go()  # `run` finds that it was cancelled
        elif turn is not None and turns is not None and turns.withdraw(turn):
            turn.go()
        elif pause is not None and pause.take():
            self._dispatcher.later(lambda: self._resume_paused(None))
        elif work is not None and not work.finished:
            work.cancel(self._dispatcher.now())
            self._stop_attempt(work, name)

    def abandon(self, work: Work, name: str, cause: TentError) -> None:
        """This attempt, by `name`, has taken too long: end it; the next candidate carries what may move."""
        if self._work is work and not work.finished:
            self._abandoned = (work, cause)
            self._stop_attempt(work, name)

    def _stop_attempt(self, work: Work, name: str) -> None:
        work.cancelled = True
        endpoint = self._peer.endpoints.ready.get(name)
        if endpoint is None or not self._dispatcher.planner.able(name).cancellation:
            return
        interrupt(endpoint, work, name, self._dispatcher.log)


def _together(attempts: list[Try]) -> Try:
    """One attempt of which parts failed for different causes, as one line of the history."""
    causes = {str(attempt.cause): attempt.cause for attempt in attempts}
    if len(causes) == 1:
        return attempts[0]
    cause = TransportError("; ".join(causes))
    cause.__cause__ = attempts[0].cause
    return attempts[0]._replace(cause=cause)
