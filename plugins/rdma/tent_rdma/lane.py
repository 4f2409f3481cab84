"""One data queue pair that this side posts on, and what is outstanding on it."""

from __future__ import annotations

import enum
import itertools
import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tent_core.types import Opcode
from tent_rdma.verbs import OWN_FAULT, SUCCESS, Columns, Completion, QueuePair

if TYPE_CHECKING:
    from tent_rdma.connection import Connection
    from tent_rdma.transfer import Transfer

_SERIALS = itertools.count(1)
_POSTS = 1 << 40
"""Identifiers of each lane. Those of one that was destroyed may still wait in the completion queue when the
device gives its number to another queue pair: they must not be taken for that one's."""
_NOTHING = np.zeros((1, 5), np.uint64)


class Run(NamedTuple):
    """Slices [start, stop) of a transfer, posted together; `posted` is on the monotonic clock."""

    transfer: Transfer
    start: int
    stop: int
    total: int
    """Bytes."""
    rail: int
    posted: float


class Fault(NamedTuple):
    """A run that a queue pair failed by, and that is to blame itself: no other rail would help it."""

    run: Run
    status: int
    """Of its completion, one of `OWN_FAULT`."""


class Health(enum.Enum):
    """What a completion says of its queue pair."""

    FINE = enum.auto()
    BROKEN = enum.auto()
    """It is in error, for the first time that anybody knows."""
    DRAINED = enum.auto()
    """Nothing that was posted is still under way."""


class Lane:
    """Posts runs and takes their completions. Thread-safe; its lock is a leaf but for the verb that posts.

    Completions must come in their order, from one thread at a time: those of one queue pair complete in the
    order in which they were posted, so that one that succeeded says the same of all before it.
    """

    def __init__(self, connection: Connection, queue_pair: QueuePair, depth: int) -> None:
        self.connection = connection
        self.queue_pair = queue_pair
        self.free = depth
        """Work requests that can still be posted."""
        self._outstanding: deque[tuple[int, Run]] = deque()
        self._first = next(_SERIALS) % (1 << 24) * _POSTS
        self._sequence = self._first
        self._marker = self._first + _POSTS - 1
        self.broken = False
        """It is in error, or was broken off: nothing can be posted any more."""
        self.fault: Fault | None = None
        self._failed = False
        self.lock = threading.Lock()
        """Guards the lane. Its connection takes those of all its lanes, to see whether all are idle."""

    def post(self, opcode: Opcode, columns: Columns, run: Run) -> bool:
        """Post a run; False when the queue pair is broken. The caller has seen that `free` is enough.

        Raises VerbsError, and then nothing was posted.
        """
        with self.lock:
            if self.broken:
                return False
            sequence = self._sequence
            self.queue_pair.post(opcode, columns, sequence)
            self._sequence = sequence + 1
            self._outstanding.append((sequence, run))
            self.free -= len(columns)
            return True

    def completed(self, completion: Completion, ended: list[Run]) -> Health:
        """Take a completion; the runs that ended well are appended to `ended`."""
        wr_id, status = completion.wr_id, completion.status
        if not self._first <= wr_id <= self._marker:
            return Health.FINE
        if wr_id == self._marker:
            return Health.DRAINED
        with self.lock:
            if status == SUCCESS:
                outstanding = self._outstanding
                while outstanding and outstanding[0][0] <= wr_id:
                    _, run = outstanding.popleft()
                    self.free += run.stop - run.start
                    ended.append(run)
                return Health.FINE
            if (
                not self._failed
            ):  # the first error is about what is outstanding for the longest time
                self._failed = True
                if status in OWN_FAULT and self._outstanding:
                    self.fault = Fault(self._outstanding[0][1], status)
            first = not self.broken
            self.broken = True
        return Health.BROKEN if first else Health.FINE

    def break_off(self) -> bool:
        """Post no more, let what is under way end, and ask to be told when it has (`Health.DRAINED`); False
        when nothing is.

        Raises VerbsError when the device does not take it: then only destroying the queue pair helps.
        """
        with self.lock:
            self.broken = True
            if not self._outstanding:
                return False
            self.queue_pair.to_error()
            # The queue is worked off in order: the end of this one is the end of all (as ib_drain_sq has it).
            self.queue_pair.post(Opcode.WRITE, _NOTHING, self._marker)
            return True

    def take_back(self) -> list[Run]:
        """What did not end well, in order; once it is drained or destroyed."""
        with self.lock:
            runs = [run for _, run in self._outstanding]
            self._outstanding.clear()
        return runs

    @property
    def busy(self) -> bool:
        """Whether anything is outstanding."""
        return bool(self._outstanding)

    def close(self) -> None:
        """Destroy the queue pair. Raises VerbsError; it may be asked again."""
        self.queue_pair.close()
