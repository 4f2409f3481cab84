"""What becomes of a finished sub-batch: what is settled, and what goes to the next candidate. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tent_core.errors import PeerDeparted, TransportError, UsageError
from tent_core.types import Opcode, Status
from tent_core.work import Work


class Verdict(NamedTuple):
    """Failed requests with one cause: `rows` of the sub-batch, whether they may move, how they end if not."""

    rows: NDArray[np.intp]
    cause: Exception
    movable: bool
    status: Status


def judge(work: Work) -> list[Verdict]:
    """The verdict over every request of a finished work that did not complete, one per report.

    A caller's mistake is never retried, nor is a peer that departed. A WRITE whose failed attempt may still
    move bytes (`fenced` false) does not leave its path: late bytes of it could overwrite the next.
    """
    verdicts = []
    open_rows = work.status != Status.COMPLETED
    for failure in work.causes:
        here = np.flatnonzero(open_rows[failure.start : failure.stop]) + failure.start
        if not len(here):
            continue
        open_rows[here] = False
        status = Status(int(work.status[here[0]]))
        verdicts.append(_verdict(work.requests.opcode, here, status, failure.cause, failure.fenced))
    return verdicts


def _verdict(
    opcode: Opcode, rows: NDArray[np.intp], status: Status, cause: Exception, fenced: bool
) -> Verdict:
    if isinstance(cause, UsageError):
        return Verdict(rows, cause, False, Status.INVALID)
    if isinstance(cause, PeerDeparted):
        return Verdict(rows, cause, False, Status.FAILED)
    if status in (Status.CANCELED, Status.TIMEOUT):
        return Verdict(rows, cause, False, status)
    if opcode is Opcode.WRITE and not fenced:
        unknown = TransportError(
            f"outcome unknown: {cause}; the attempt may still write, so it was not moved"
        )
        unknown.__cause__ = cause
        return Verdict(rows, unknown, False, Status.FAILED)
    return Verdict(rows, cause, True, Status.FAILED)
