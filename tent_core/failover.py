"""What becomes of a finished sub-batch: what is settled, and what goes to the next candidate. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tent_core.errors import OutcomeUnknown, PeerDeparted, Unreachable, UsageError
from tent_core.types import Opcode, Status
from tent_core.work import Work

_REST_S = 1 / 128
_DOUBLINGS = 7


def rest_s(tries: int) -> float:
    """Seconds to wait after so many attempts, when every candidate has had its turn, before any has another:
    16 ms after the first, twice as long after each further one, up to 1 s."""
    return _REST_S * 2.0 ** min(tries, _DOUBLINGS)


class Verdict(NamedTuple):
    """Failed requests with one cause: `rows` of the sub-batch, whether they may move, how they end if not,
    and whether the transport is to blame."""

    rows: NDArray[np.intp]
    cause: Exception
    movable: bool
    status: Status
    blames_transport: bool

    @property
    def may_pass(self) -> bool:
        """Whether the same transport may carry them at another time: it has not said that it never can."""
        return self.movable and not isinstance(self.cause, Unreachable)


def judge(
    work: Work,
    abandoned: Exception | None = None,
    retry_unfenced: bool = False,
    deadline: float = float("inf"),
) -> list[Verdict]:
    """The verdict over every request of a finished work that did not complete, one per report.

    A caller's mistake is never retried, nor is a peer that departed, nor what its own `deadline` ended; an
    attempt that was `abandoned` because it took too long is, for that cause. A WRITE whose failed attempt may
    still move bytes (`fenced` false) does not leave its path unless the caller allows it (`retry_unfenced`):
    late bytes of it could overwrite the next.
    """
    verdicts = []
    open_rows = work.status != Status.COMPLETED
    for failure in work.causes:
        here = np.flatnonzero(open_rows[failure.start : failure.stop]) + failure.start
        if not len(here):
            continue
        open_rows[here] = False
        status = Status(int(work.status[here[0]]))
        cause = failure.cause
        if abandoned is not None and status in (Status.CANCELED, Status.TIMEOUT):
            status = Status.FAILED
            abandoned.__cause__ = cause
            cause = abandoned
        elif status is Status.TIMEOUT and work.deadline < deadline:
            status = Status.FAILED  # of this attempt alone
        unknown = work.requests.opcode is Opcode.WRITE and not failure.fenced and not retry_unfenced
        verdicts.append(_verdict(here, status, cause, unknown))
    return verdicts


def _verdict(rows: NDArray[np.intp], status: Status, cause: Exception, unknown: bool) -> Verdict:
    if isinstance(cause, UsageError):
        return Verdict(rows, cause, False, Status.INVALID, False)
    if isinstance(cause, PeerDeparted):
        return Verdict(rows, cause, False, Status.FAILED, False)
    if status in (Status.CANCELED, Status.TIMEOUT):
        return Verdict(rows, cause, False, status, False)
    if unknown:
        why = OutcomeUnknown(
            f"outcome unknown: {cause}; the attempt may still write, so it was not moved"
        )
        why.__cause__ = cause
        return Verdict(rows, why, False, Status.FAILED, True)
    return Verdict(rows, cause, True, Status.FAILED, True)
