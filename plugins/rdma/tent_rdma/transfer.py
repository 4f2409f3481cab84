"""One submission on its way: what of it is still to be posted, and how its requests end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tent_core.errors import TransportError
from tent_core.slicing import Chunks, Finished, Progress, Rule, Slices, cut
from tent_core.types import Status
from tent_core.work import Requests, Work
from tent_rdma.registrations import Keys
from tent_rdma.verbs import Columns

if TYPE_CHECKING:
    from tent_rdma.endpoint import RdmaEndpoint


class Column(NamedTuple):
    """The keys of one side: `keys[nic][chunk[slice]]`, or `keys[nic][0]` for all where `chunk` is None."""

    keys: NDArray[np.uint64]
    chunk: NDArray[np.intp] | None

    def of(self, nic: int, start: int, stop: int) -> NDArray[np.uint64]:
        """The key of each of the slices [start, stop) on a NIC; a single one where all are alike."""
        row: NDArray[np.uint64] = self.keys[nic]
        return row[:1] if self.chunk is None else row[self.chunk[start:stop]]


class Exclusion(NamedTuple):
    """Why a transfer does not use a rail any more, and how often the rail's port had come back by then."""

    cause: TransportError
    returns: int


class Prepared(NamedTuple):
    """What is derived from requests and keys alone, so that it can be kept for requests posted again."""

    slices: Slices
    local: Column
    remote: Column
    locations: tuple[str, str]
    """Of the memory here and at the peer; of a batch over several buffers, that of the first ones."""


def prepare(
    requests: Requests, local: Sequence[Keys], remote: Sequence[Keys], rule: Rule
) -> Prepared:
    """Cut requests and find their keys; `local` and `remote` are those of the buffers used, in order."""
    slices = cut(
        requests.local,
        requests.remote,
        rule,
        _chunks(local, requests.local_ids),
        _chunks(remote, requests.remote_ids),
    )
    return Prepared(
        slices,
        _column(local, requests.local_ids, slices, slices.local),
        _column(remote, requests.remote_ids, slices, slices.remote),
        (local[0].location, remote[0].location),
    )


def _chunks(keys: Sequence[Keys], ids: NDArray[np.int32]) -> Chunks | None:
    if all(k.keys.shape[1] == 1 for k in keys):
        return None
    place = _places(keys, ids)
    start = np.array([k.address for k in keys], np.uint64)
    length = np.array([k.chunk for k in keys], np.uint64)
    return Chunks(start[place], length[place])


def _column(
    keys: Sequence[Keys], ids: NDArray[np.int32], slices: Slices, addresses: NDArray[np.uint64]
) -> Column:
    if len(keys) == 1 and keys[0].keys.shape[1] == 1:
        return Column(keys[0].keys, None)
    place = _places(keys, ids)[slices.request]
    widths = np.array([k.keys.shape[1] for k in keys], np.intp)
    start = np.array([k.address for k in keys], np.uint64)[place]
    chunk = np.array([k.chunk for k in keys], np.uint64)[place]
    first = (np.cumsum(widths) - widths)[place]
    index = first + ((addresses - start) // chunk).astype(np.intp)
    return Column(np.concatenate([k.keys for k in keys], axis=1), index)


def _places(keys: Sequence[Keys], ids: NDArray[np.int32]) -> NDArray[np.intp]:
    """Of each request the position of its buffer in `keys`."""
    table = np.zeros(max(k.id for k in keys) + 1, np.intp)
    for place, k in enumerate(keys):
        table[k.id] = place
    found: NDArray[np.intp] = table[ids]
    return found


class Transfer:
    """One `Work` on one endpoint. What is next is the endpoint's to ask, one thread at a time; the rest is
    thread-safe. Its lock is a leaf; reports to the work are made without it."""

    def __init__(self, work: Work, prepared: Prepared, pool: str, endpoint: RdmaEndpoint) -> None:
        self.work = work
        self.endpoint = endpoint
        self.devices = work.devices
        self.opcode = work.requests.opcode
        self.pool = pool
        self.excluded: dict[int, Exclusion] = {}
        """Rails that failed it: each gets one chance, and another when its port has come back since."""
        self.prepared = prepared
        self._next = 0
        self._again: deque[tuple[int, int]] = deque()
        self._progress = Progress(prepared.slices)
        self._cause: Exception | None = None
        self._fenced = True
        self._status = Status.FAILED
        self._lock = threading.Lock()

    # ---------------------------------------------------------------- what is to be posted

    @property
    def waiting(self) -> int:
        """Slices that are still to be posted (of those that go again, the first lot)."""
        if self._again:
            start, stop = self._again[0]
            return stop - start
        return len(self.prepared.slices) - self._next

    def size(self, count: int) -> int:
        """Bytes of the next `count` slices."""
        start = self._again[0][0] if self._again else self._next
        return int(self.prepared.slices.length[start : start + count].sum())

    def take(self, count: int) -> tuple[int, int]:
        """The next slices, at most `count`: [start, stop)."""
        if self._again:
            start, stop = self._again.popleft()
            if stop - start > count:
                self._again.appendleft((start + count, stop))
                stop = start + count
            return start, stop
        start = self._next
        self._next = min(start + count, len(self.prepared.slices))
        return start, self._next

    def put_back(self, start: int, stop: int) -> None:
        """Slices that were taken, or posted in vain: they go again, before the others."""
        self._again.appendleft((start, stop))

    def take_all(self) -> list[tuple[int, int]]:
        """All that was not posted yet: it will not be."""
        left = []
        while self.waiting:
            left.append(self.take(self.waiting))
        return left

    def apart(self, start: int, stop: int, buffers: Collection[int]) -> list[tuple[bool, int, int]]:
        """Slices [start, stop) in lots, in order: whether a lot is for these buffers of the peer's, and its
        first and last."""
        if not buffers:
            return [(False, start, stop)]
        among = np.isin(self.buffers(start, stop), list(buffers))
        cuts = [0, *(np.flatnonzero(among[1:] != among[:-1]) + 1).tolist(), stop - start]
        return [(bool(among[a]), start + a, start + b) for a, b in pairwise(cuts)]

    def buffers(self, start: int, stop: int) -> NDArray[np.int32]:
        """The buffer of the peer's of each of the slices [start, stop)."""
        ids: NDArray[np.int32] = self.work.requests.remote_ids
        return ids[self.prepared.slices.request[start:stop]]

    def columns(self, start: int, stop: int, nic: int, peer_nic: int) -> Columns:
        """Work requests for slices [start, stop) from a NIC here to one of the peer."""
        slices = self.prepared.slices
        columns = np.empty((stop - start, 5), np.uint64)
        columns[:, 0] = slices.local[start:stop]
        columns[:, 1] = self.prepared.local.of(nic, start, stop)
        columns[:, 2] = slices.remote[start:stop]
        columns[:, 3] = self.prepared.remote.of(peer_nic, start, stop)
        columns[:, 4] = slices.length[start:stop]
        return columns

    # ---------------------------------------------------------------- how it ends

    def done(self, start: int, stop: int) -> None:
        """Slices [start, stop) have arrived."""
        with self._lock:
            finished = self._progress.done(start, stop)
        self._report(finished)

    def fail(
        self,
        start: int,
        stop: int,
        cause: Exception,
        *,
        fenced: bool,
        status: Status = Status.FAILED,
    ) -> None:
        """Slices [start, stop) have not, and nothing of them is under way unless it is not `fenced`."""
        with self._lock:
            if self._cause is None:
                self._cause, self._status = cause, status
            self._fenced = self._fenced and fenced
            finished = self._progress.failed(start, stop)
        self._report(finished)

    def _report(self, finished: Finished) -> None:
        for start, stop in finished.completed:
            self.work.complete(start, stop)
        if finished.failed:
            cause = self._cause
            assert cause is not None
            for start, stop in finished.failed:
                self.work.fail(cause, start, stop, fenced=self._fenced, status=self._status)
