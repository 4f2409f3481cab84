"""Requests to transfers: one call of the library for each, each handle released exactly once."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tent_core.errors import TransportError
from tent_core.types import Opcode, Status
from tent_core.work import Requests, Work
from tent_mpcomm.adapter import UNSETTLED, Comm, code_text

_BUDGET = 512
"""Transfers of one posting that a step sees to, so that others get their turn."""


class Rows(NamedTuple):
    """Addresses and lengths as the library's calls take them: row i is request i, which is one transfer."""

    local: list[int]
    remote: list[int]
    length: list[int]

    @classmethod
    def of(cls, requests: Requests) -> Rows:
        """Those of some requests. The engine has joined neighbours already."""
        local, lengths = requests.local.T.tolist()
        return cls(local, requests.remote[:, 0].tolist(), lengths)


class _Trouble(NamedTuple):
    """What became of requests [start, stop) that did not complete. `refused`: nothing of them was started."""

    start: int
    stop: int
    cause: TransportError
    fenced: bool
    refused: bool = False


class Posting:
    """One `Work` in the library's hands. One thread at a time drives it (`step`); any may `give_up`.

    The library works through what it was given more or less in order, and the work ends with its last
    transfer, so that only the oldest one is looked at: a step costs next to nothing while nothing has ended.
    """

    __slots__ = (
        "_call",
        "_comm",
        "_ended",
        "_given_up",
        "_host_id",
        "_next",
        "_reported",
        "_rows",
        "_troubles",
        "_under_way",
        "_window",
        "local_used",
        "reported",
        "work",
    )

    def __init__(
        self,
        work: Work,
        rows: Rows,
        comm: Comm,
        host_id: str,
        window: int,
        ended: Callable[[Posting, TransportError | None], None],
    ) -> None:
        """`ended(posting, cause)` is called once when the library holds nothing of it any more, with what
        speaks against the connection if anything does, and before its end is reported unless it was given up.
        """
        self.work = work
        self.local_used = work.requests.local_used
        self.reported = threading.Event()
        self._rows = rows
        self._comm = comm
        self._call = comm.put if work.requests.opcode is Opcode.WRITE else comm.get
        self._host_id = host_id
        self._window = window
        self._ended = ended
        self._next = 0
        self._under_way: deque[tuple[int, int]] = deque()
        self._troubles: list[_Trouble] = []
        self._given_up: tuple[TransportError, Status] | None = None
        self._reported = False

    def __len__(self) -> int:
        """How many transfers it is."""
        return len(self._rows.local)

    @property
    def over(self) -> bool:
        """Whether the library holds nothing of it any more and its end was reported."""
        return self._reported and not self._under_way

    @property
    def waits(self) -> bool:
        """Whether somebody may still wait for its end."""
        return not self._reported

    def give_up(self, cause: TransportError, status: Status = Status.FAILED) -> None:
        """Have whoever drives it report what is not done as failed. What is under way stays so, unseen."""
        if self._given_up is None:
            self._given_up = (cause, status)

    def step(self) -> bool:
        """Post what there is room for, see to what has ended; whether anything has. By one thread."""
        if self.over:
            return False
        if self._reported:
            moved = self._collect()
        else:
            if self._given_up is None and time.monotonic() > self.work.deadline:
                late = TransportError(f"MPComm to {self._host_id} did not end in time")
                self.give_up(late, Status.TIMEOUT)
            if self._given_up is not None:
                self._abandon(*self._given_up)
                return True
            moved = self._collect()
            moved = self._post() or moved
        if not self._under_way and self._next == len(self._rows.local):
            self._end()
            return True
        return moved

    def release_all(self) -> None:
        """Release what is still under way: the library is about to be shut down, which ends it."""
        if not self._reported:
            cause = self._given_up[0] if self._given_up is not None else None
            self._abandon(cause or TransportError("the engine stops"), Status.FAILED)
        if self._under_way:
            while self._under_way:
                with contextlib.suppress(Exception):
                    self._comm.release(self._under_way.popleft()[0])
            self._finish()

    # ---------------------------------------------------------------- the rest is private

    def _post(self) -> bool:
        rows, call, host_id, under_way = self._rows, self._call, self._host_id, self._under_way
        start = self._next
        stop = min(len(rows.local), start + self._window - len(under_way), start + _BUDGET)
        for i in range(start, stop):
            try:
                handle = call(rows.local[i], host_id, rows.remote[i], rows.length[i])
            except Exception as error:  # what it has started is unknown
                self._fail(i, TransportError(f"MPComm raises {error!r} at submit"), fenced=False)
                continue
            if handle:
                under_way.append((handle, i))
            elif under_way:
                stop = i  # perhaps there is no room: again when one of them has ended
                break
            else:
                refusal = TransportError(
                    f"MPComm does not take a transfer of {rows.length[i]} bytes to {host_id}: no connection, "
                    "memory that it has not registered, or no room"
                )
                self._troubles.append(_Trouble(i, i + 1, refusal, True, True))
        self._next = max(start, stop)
        return stop > start

    def _collect(self) -> bool:
        under_way, comm, lengths = self._under_way, self._comm, self._rows.length
        ended, result, release = comm.ended, comm.result, comm.release
        moved = False
        for _ in range(_BUDGET):
            if not under_way:
                break
            handle, i = under_way[0]
            try:
                if not ended(handle):
                    break
                outcome = result(handle)
                code, count = outcome["error_code"], outcome["bytes_transferred"]
            except Exception as error:  # whether it has ended is unknown, and will be
                broken = TransportError(f"MPComm raises {error!r} for a transfer under way")
                self._fail(i, broken, fenced=False)
                code, count = 0, lengths[i]
            del under_way[0]
            moved = True
            with contextlib.suppress(Exception):
                release(handle)
            if code:
                self._fail(
                    i,
                    TransportError(
                        f"MPComm transfer of {lengths[i]} bytes to {self._host_id} failed: {code_text(code)}"
                    ),
                    fenced=code not in UNSETTLED,
                )
            elif count < lengths[i]:
                self._fail(
                    i,
                    TransportError(
                        f"MPComm moved {count} of {lengths[i]} bytes to {self._host_id} and reports success"
                    ),
                    fenced=True,
                )
        return moved

    def _fail(self, row: int, cause: TransportError, *, fenced: bool) -> None:
        if not self._reported:
            self._troubles.append(_Trouble(row, row + 1, cause, fenced))

    def _abandon(self, cause: TransportError, status: Status) -> None:
        """Report now. What the library still holds may go on writing: it is not fenced."""
        self._troubles += [_Trouble(i, i + 1, cause, False) for _, i in self._under_way]
        if self._next < len(self.work):
            self._troubles.append(_Trouble(self._next, len(self.work), cause, True))
            self._next = len(self.work)
        if not self._under_way:
            self._finish()
        self._report(status)

    def _end(self) -> None:
        self._finish()
        if not self._reported:
            self._report(Status.FAILED)

    def _finish(self) -> None:
        self._ended(self, self._objection() if self._troubles else None)

    def _objection(self) -> TransportError | None:
        """What speaks against the connection: a transfer that failed, or that not one was taken."""
        given_up = self._given_up[0] if self._given_up is not None else None
        failed = [t.cause for t in self._troubles if not t.refused and t.cause is not given_up]
        if not failed and all(t.refused for t in self._troubles):
            refused = sum(t.stop - t.start for t in self._troubles)
            failed = [self._troubles[0].cause] if refused == len(self.work) else []
        return failed[0] if failed else None

    def _report(self, status: Status) -> None:
        self._reported = True
        work, done = self.work, 0
        if not self._troubles:
            work.complete()
        else:
            for trouble in sorted(self._troubles, key=lambda t: t.start):
                if trouble.start > done:
                    work.complete(done, trouble.start)
                if trouble.refused:
                    work.refuse(trouble.cause, trouble.start, trouble.stop)
                else:
                    work.fail(
                        trouble.cause,
                        trouble.start,
                        trouble.stop,
                        fenced=trouble.fenced,
                        status=status,
                    )
                done = trouble.stop
            if done < len(work):
                work.complete(done)
        self.reported.set()
