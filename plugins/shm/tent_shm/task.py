"""One submission on its way: its shares, the threads that help with them, and the one report at the end."""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tent_core.errors import PeerDeparted, TransportError
from tent_core.types import Status
from tent_core.work import Work
from tent_shm.plan import Plan
from tent_shm.stream import Gap, Outcome, Stream, row_at, runs, runs_of, settle, shares

_OTHERS = -2
"""Marks requests that are not of the streams reported: they were refused."""


class DeadlinePassed(TransportError):
    """The deadline of the work passed before all of it had moved."""


class Canceled(TransportError):
    """Nobody wants the rest of the work any more."""


class Share(NamedTuple):
    """The bytes [start, stop) of a stream: what one thread takes."""

    stream: Stream
    start: int
    stop: int


class Task:
    """A submission that is carried out by any threads that call `help`, each share by one of them.

    `check` answers why the peer or one of the buffers may be used no more, or None; it is asked before each
    step, and once after the last: only then are bytes known to have arrived. `done` is called once, when
    nothing is in flight any more and before anything is reported.
    """

    def __init__(
        self,
        work: Work,
        plan: Plan,
        parts: int,
        check: Callable[[], Exception | None],
        done: Callable[[Task], None],
    ) -> None:
        self.plan = plan
        self.work = work
        self._check = check
        self._done = done
        self._streams = plan.streams
        self._shares = deque(
            Share(stream, start, stop)
            for stream in self._streams
            for start, stop in ([(0, stream.total)] if parts == 1 else shares(stream.ends, parts))
        )
        self._gaps: dict[int, list[Gap]] = {id(stream): [] for stream in self._streams}
        self._left = len(self._shares)
        self._lock = threading.Lock()

    def help(self) -> None:
        """Carry out shares until none is left to take; who ends the last one reports."""
        while True:
            try:
                share = self._shares.popleft()
            except IndexError:
                return
            gaps = self._move(share)
            with self._lock:
                self._gaps[id(share.stream)] += gaps
                self._left -= 1
                last = self._left == 0
            if last:
                self._finish()

    def _give_up(self) -> Exception | None:
        cause = self._check()
        if cause is None and self.work.cancelled:
            return Canceled("it was cancelled before it ended")
        if cause is None and time.monotonic() > self.work.deadline:
            cause = DeadlinePassed("the deadline passed")
        return cause

    def _move(self, share: Share) -> list[Gap]:
        """Move a share; what of it did not move."""
        stream, position, stop = share
        gaps: list[Gap] = []
        try:
            while position < stop:
                cause = self._give_up()
                if cause is not None:
                    gaps.append(Gap(position, stop, cause))
                    break
                try:
                    position += stream.step(position, stop)
                except OSError as error:
                    end = end_of_fault(stream, position, stop, error)
                    gaps.append(Gap(position, end, explain(stream, position, error)))
                    position = end
        except Exception as error:  # a mistake in here must not leave requests unreported
            gaps.append(Gap(position, stop, TransportError(f"shm failed: {error!r}")))
        return gaps

    def _finish(self) -> None:
        cause = self._check()
        self._done(self)
        if cause is not None:
            self._gaps = {id(s): [Gap(0, s.total, cause)] for s in self._streams}
        report(self.work, [(s, self._gaps[id(s)]) for s in self._streams])


def end_of_fault(stream: Stream, position: int, stop: int, error: OSError) -> int:
    """Where to go on after an error: a bad address concerns one request, anything else all that is left."""
    if error.errno != errno.EFAULT:
        return stop
    ends = stream.ends
    return min(stop, int(ends[row_at(ends, position)]))


def explain(stream: Stream, position: int, error: OSError) -> Exception:
    """The cause of a request that failed at `position` of the stream."""
    where = stream.where(position)
    if error.errno == errno.ESRCH:
        return PeerDeparted(f"thread {stream.pid} of the peer has ended: {where}")
    if error.errno == errno.EFAULT:
        return TransportError(f"bad address: nothing is mapped, or not for this access, at {where}")
    return TransportError(f"the kernel refused to copy ({error.strerror}) at {where}")


def report(work: Work, moves: Iterable[tuple[Stream, list[Gap]]]) -> None:
    """Report the requests of these streams, each once, in as few ranges as there are."""
    moves = list(moves)
    if not any(gaps for _, gaps in moves):
        _complete(work, [stream.rows for stream, _ in moves])
        return
    n = len(work)
    moved, failed = np.zeros(n, np.uint64), np.full(n, _OTHERS, np.int32)
    causes: list[Exception] = []
    for stream, gaps in moves:
        rows = slice(None) if stream.rows is None else stream.rows
        outcome: Outcome = settle(stream.ends, gaps)
        moved[rows] = outcome.moved
        failed[rows] = np.where(outcome.failed < 0, outcome.failed, outcome.failed + len(causes))
        causes += outcome.causes
    for start, stop, value in runs(failed):
        if value >= 0:
            cause = causes[value]
            work.fail(cause, start, stop, moved=moved[start:stop], status=_status(cause))
        elif value != _OTHERS:
            work.complete(start, stop)


def _status(cause: Exception) -> Status:
    if isinstance(cause, Canceled):
        return Status.CANCELED
    return Status.TIMEOUT if isinstance(cause, DeadlinePassed) else Status.FAILED


def _complete(work: Work, parts: list[NDArray[np.intp] | None]) -> None:
    if sum(len(work) if rows is None else len(rows) for rows in parts) == len(work):
        work.complete()
        return
    for rows in parts:
        for start, stop in runs_of(rows, len(work)):
            work.complete(start, stop)
