"""Requests that travel in another shape than they were asked for: neighbours merged, bulk cut into parts.

What carries them reports on the rows that travel; a sink turns that back into exact results of the requests
that were asked for. Sinks stand one behind another, and the batch is the last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tent_core.batch import Rows, Try
from tent_core.columns import distinct, iovecs
from tent_core.slicing import Progress, Rule, Slices, cut
from tent_core.types import Status
from tent_core.work import Requests

Indexes = NDArray[np.intp]


class Sink(Protocol):
    """Where outcomes go, by rows. Thread-safe. Each row ends once."""

    def __len__(self) -> int: ...

    def requests(self, rows: Rows) -> int:
        """How many of the batch's requests end with these rows."""
        ...

    def settle(
        self,
        rows: Rows,
        status: NDArray[np.uint8] | Status,
        moved: NDArray[np.uint64] | None,
        transport: str,
    ) -> None: ...

    def settle_failed(
        self,
        rows: Rows,
        status: Status,
        moved: NDArray[np.uint64] | None,
        tries: tuple[Try, ...],
        credited: bool = False,
    ) -> None: ...

    def credit(self, transport: str, moved: int) -> None:
        """`transport` has carried so many bytes; who settles then says so: no transport, or `credited`."""
        ...


# -------------------------------------------------------------------- merging


@dataclass(frozen=True, slots=True)
class Merge:
    """Row j that travels stands for requests [starts[j], starts[j + 1]); `lengths` are those of requests."""

    starts: Indexes
    lengths: NDArray[np.uint64]


def merge(requests: Requests, largest: Callable[[], int | None]) -> tuple[Requests, Merge] | None:
    """Join neighbours that follow one another at both sides, in the same two buffers; None if none do.

    Nothing is joined when a row would be longer than `largest()` bytes, which is asked if there are any.
    """
    local, remote = requests.local, requests.remote
    if len(local) < 2:
        return None
    follows = local[:-1, 0] + local[:-1, 1] == local[1:, 0]
    if not np.count_nonzero(follows):  # in a third of the time of `any`
        return None
    follows &= remote[:-1, 0] + remote[:-1, 1] == remote[1:, 0]
    for ids, used in (
        (requests.local_ids, requests.local_used),
        (requests.remote_ids, requests.remote_used),
    ):
        if len(used) > 1:
            follows &= ids[:-1] == ids[1:]
    if not follows.any():
        return None
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    lengths = local[:, 1]
    joined = np.add.reduceat(lengths, starts)
    limit = largest()
    if limit is not None and int(joined.max()) > limit:
        return None
    merged = Requests(
        requests.opcode,
        iovecs(local[starts, 0], joined),
        iovecs(remote[starts, 0], joined),
        requests.local_ids[starts],
        requests.remote_ids[starts],
        requests.local_used,
        requests.remote_used,
        requests.remote_generations,
        requests.total,
        requests.reused,
    )
    return merged, Merge(starts, lengths)


class MergedSink:
    """Turns outcomes of joined rows into those of the requests that they stand for."""

    def __init__(self, behind: Sink, rows: Rows, shape: Merge) -> None:
        self._behind = behind
        self._rows = rows
        self._shape = shape

    def __len__(self) -> int:
        return len(self._shape.starts)

    def requests(self, rows: Rows) -> int:
        if rows is None:
            return len(self._shape.lengths)
        counts = np.diff(self._shape.starts, append=len(self._shape.lengths))
        return int(counts[rows].sum())

    def settle(
        self,
        rows: Rows,
        status: NDArray[np.uint8] | Status,
        moved: NDArray[np.uint64] | None,
        transport: str,
    ) -> None:
        where, counts, shares = self._spread(rows, moved)
        each = status if isinstance(status, Status) else np.repeat(status, counts)
        self._behind.settle(where, each, shares, transport)

    def settle_failed(
        self,
        rows: Rows,
        status: Status,
        moved: NDArray[np.uint64] | None,
        tries: tuple[Try, ...],
        credited: bool = False,
    ) -> None:
        where, _, shares = self._spread(rows, moved)
        self._behind.settle_failed(where, status, shares, tries, credited)

    def credit(self, transport: str, moved: int) -> None:
        self._behind.credit(transport, moved)

    def _spread(
        self, rows: Rows, moved: NDArray[np.uint64] | None
    ) -> tuple[Indexes, Indexes, NDArray[np.uint64] | None]:
        """For joined rows: their requests, how many each has, and what arrived of each request: the bytes of
        a row arrive from its beginning on."""
        starts, lengths = self._shape.starts, self._shape.lengths
        counts = np.diff(starts, append=len(lengths))
        firsts = starts
        if rows is not None:
            counts, firsts = counts[rows], starts[rows]
        ends = np.cumsum(counts)
        place = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
        members = np.repeat(firsts, counts) + place
        where = members if self._rows is None else self._rows[members]
        if moved is None:
            return where, counts, None
        before = np.cumsum(lengths) - lengths
        offsets = before[members] - np.repeat(before[firsts], counts)
        arrived = np.repeat(moved, counts)
        shares = np.minimum(np.where(arrived > offsets, arrived - offsets, 0), lengths[members])
        return where, counts, shares.astype(np.uint64)


# -------------------------------------------------------------------- parts


def parts(requests: Requests, size: int) -> tuple[Slices, list[tuple[int, int]]]:
    """Cut into pieces of at most `size` bytes, and group those that follow one another into parts of about as
    much: [start, stop) of pieces each."""
    pieces = cut(requests.local, requests.remote, Rule(size, size, 1))
    ends = np.cumsum(pieces.length)
    number = (ends - np.uint64(1)) // np.uint64(size)
    edges = np.flatnonzero(number[1:] != number[:-1]) + 1
    starts = [0, *edges.tolist()]
    return pieces, list(zip(starts, [*starts[1:], len(pieces)], strict=True))


def part(requests: Requests, pieces: Slices, start: int, stop: int) -> Requests:
    """Pieces [start, stop) as requests of their own."""
    local = iovecs(pieces.local[start:stop], pieces.length[start:stop])
    remote = iovecs(pieces.remote[start:stop], pieces.length[start:stop])
    owner = pieces.request[start:stop]
    local_ids, remote_ids = requests.local_ids[owner], requests.remote_ids[owner]
    return Requests(
        requests.opcode,
        local,
        remote,
        local_ids,
        remote_ids,
        _used(requests.local_used, local_ids),
        _used(requests.remote_used, remote_ids),
        requests.remote_generations,
        int(local[:, 1].sum()),
    )


def _used(used: tuple[int, ...], ids: NDArray[np.int32]) -> tuple[int, ...]:
    return used if len(used) == 1 else distinct(ids)


class PartsSink:
    """Counts the pieces of each request, and settles a request when nothing of it is under way any more."""

    def __init__(self, behind: Sink, rows: Rows, pieces: Slices) -> None:
        self._behind = behind
        self._rows = rows
        self._pieces = pieces
        self._progress = Progress(pieces)
        self._moved = np.zeros(pieces.requests, np.uint64)
        self._failures: dict[int, tuple[Status, tuple[Try, ...]]] = {}
        """Of requests of which a piece failed: how the first one did."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pieces)

    def part(self, start: int, stop: int) -> Part:
        """The sink of pieces [start, stop)."""
        return Part(self, start, stop)

    def credit(self, transport: str, moved: int) -> None:
        """`transport` has carried so many bytes."""
        self._behind.credit(transport, moved)

    def ending(self, start: int, stop: int) -> int:
        """How many of the batch's requests have their last piece among [start, stop)."""
        owner = self._pieces.request[start:stop]
        following = self._pieces.request[start + 1 : stop + 1]
        last = np.ones(len(owner), np.bool_)
        last[: len(following)] = owner[: len(following)] != following
        rows = owner[last]
        if not len(rows):
            return 0
        return self._behind.requests(self._behind_of(rows))

    def completed(
        self, pieces: Sequence[tuple[int, int]], moved: NDArray[np.uint64], transport: str
    ) -> None:
        """Ranges of pieces have arrived; `moved` are their bytes, in order."""
        self.credit(transport, int(moved.sum()))
        done: list[tuple[int, int]] = []
        failed: list[tuple[int, int]] = []
        with self._lock:
            at = 0
            for start, stop in pieces:
                self._count(start, stop, moved[at : at + stop - start])
                at += stop - start
                finished = self._progress.done(start, stop)
                done += finished.completed
                failed += finished.failed
        for start, stop in done:
            self._behind.settle(
                self._at(start, stop), Status.COMPLETED, self._moved[start:stop], ""
            )
        self._settle_failed(failed)

    def failed(
        self,
        pieces: Sequence[tuple[int, int]],
        status: Status,
        moved: NDArray[np.uint64] | None,
        tries: tuple[Try, ...],
    ) -> None:
        """Ranges of pieces have not arrived, and never will."""
        if moved is not None and tries:
            self.credit(tries[-1].transport, int(moved.sum()))
        over: list[tuple[int, int]] = []
        with self._lock:
            at = 0
            for start, stop in pieces:
                if moved is not None:
                    self._count(start, stop, moved[at : at + stop - start])
                at += stop - start
                for request in np.unique(self._pieces.request[start:stop]).tolist():
                    self._failures.setdefault(request, (status, tries))
                over += self._progress.failed(start, stop).failed
        self._settle_failed(over)

    def _count(self, start: int, stop: int, moved: NDArray[np.uint64]) -> None:
        np.add.at(self._moved, self._pieces.request[start:stop], moved)

    def _settle_failed(self, ranges: Sequence[tuple[int, int]]) -> None:
        for start, stop in ranges:
            for request in range(start, stop):
                status, tries = self._failures[request]
                self._behind.settle_failed(
                    self._at(request, request + 1),
                    status,
                    self._moved[request : request + 1],
                    tries,
                    credited=True,
                )

    def _at(self, start: int, stop: int) -> Indexes:
        return self._behind_of(np.arange(start, stop))

    def _behind_of(self, requests: Indexes) -> Indexes:
        """Rows behind this sink, of positions among the requests that were cut."""
        return requests if self._rows is None else self._rows[requests]


class Part:
    """Pieces [start, stop) of a `PartsSink`, as one sink."""

    __slots__ = ("_all", "_start", "_stop")

    def __init__(self, whole: PartsSink, start: int, stop: int) -> None:
        self._all = whole
        self._start = start
        self._stop = stop

    def __len__(self) -> int:
        return self._stop - self._start

    def requests(self, rows: Rows) -> int:
        return sum(self._all.ending(start, stop) for start, stop in self._ranges(rows))

    def settle(
        self,
        rows: Rows,
        status: NDArray[np.uint8] | Status,
        moved: NDArray[np.uint64] | None,
        transport: str,
    ) -> None:
        assert moved is not None  # nothing else than completed rows is settled so
        self._all.completed(list(self._ranges(rows)), moved, transport)

    def settle_failed(
        self,
        rows: Rows,
        status: Status,
        moved: NDArray[np.uint64] | None,
        tries: tuple[Try, ...],
        credited: bool = False,
    ) -> None:
        self._all.failed(list(self._ranges(rows)), status, moved, tries)

    def credit(self, transport: str, moved: int) -> None:
        self._all.credit(transport, moved)

    def _ranges(self, rows: Rows) -> Iterator[tuple[int, int]]:
        if rows is None:
            yield self._start, self._stop
            return
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        for run in np.split(rows, breaks):
            if len(run):
                yield self._start + int(run[0]), self._start + int(run[-1]) + 1
