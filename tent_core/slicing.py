"""Requests cut into work requests, and which requests are finished by the work requests that are.

The rule: a request of at most `slice` bytes is one work request. A longer one is cut so that each rail gets
several pieces (`PER_RAIL`), which lets rails of different speed share it fairly: its length over
`rails * PER_RAIL`, rounded up to a multiple of `slice`, at most `largest_slice`. All pieces of a request have
that length but the last, which has the rest.

Memory that is longer than what a device registers at once is registered in chunks; no piece crosses from one
chunk into the next, at either side. That may add pieces and shorten some.

Nothing here is a Python object per request or per piece; addresses and lengths are `uint64`, in bytes.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tent_core.work import Iovecs

PER_RAIL = 4
"""Pieces for each rail of a request that is cut, as long as they stay between the two sizes."""

T = TypeVar("T", bound=np.generic)
Column = NDArray[np.uint64]
Indexes = NDArray[np.intp]
Ranges = list[tuple[int, int]]
"""Of indexes, each from its first up to but not including its second, ascending, not touching."""

_ONE = np.uint64(1)


class Rule(NamedTuple):
    """How long pieces are (the module says how); sizes in bytes, `slice <= largest_slice`."""

    slice: int
    largest_slice: int
    rails: int

    def piece(self, length: int) -> int:
        """Bytes of each piece but the last of a request of `length` bytes."""
        share = -(-length // (self.rails * PER_RAIL))
        return min(-(-share // self.slice) * self.slice, self.largest_slice)


class Chunks(NamedTuple):
    """How the memory of one side is registered, for each request or (shape (1,)) alike for all of them.

    `start` is the address of the buffer, `length` of each of its chunks but the last. A buffer registered
    in one piece has a length that reaches its end, 2^63 for example. Where no buffer of a batch has more
    than one chunk, pass None instead: then nothing is looked at.
    """

    start: Column
    length: Column


class Slices:
    """Immutable columns, one row per work request, ascending by request and, within it, by address.

    - `local`, `remote`: addresses; `length`: bytes. All uint64 (n,); where no request was cut they are views
      of the requests' own columns.
    - `cut`: whether some request has more than one row.
    - `requests`: how many requests there are.
    """

    __slots__ = ("_request", "cut", "length", "local", "remote", "requests")

    def __init__(
        self,
        local: Column,
        remote: Column,
        length: Column,
        requests: int,
        request: Indexes | None = None,
    ) -> None:
        self.local = _frozen(local)
        self.remote = _frozen(remote)
        self.length = _frozen(length)
        self.requests = requests
        self.cut = len(length) > requests
        self._request = request if request is None else _frozen(request)

    def __len__(self) -> int:
        return len(self.length)

    @property
    def request(self) -> Indexes:
        """Index of the request of each row (intp); where nothing was cut it is made when asked for."""
        if self._request is None:
            self._request = _frozen(np.arange(len(self.length), dtype=np.intp))
        return self._request


def cut(
    local: Iovecs,
    remote: Iovecs,
    rule: Rule,
    local_chunks: Chunks | None = None,
    remote_chunks: Chunks | None = None,
) -> Slices:
    """Cut requests; row i of `local` and `remote` has the same length. Both stay as they are."""
    lengths = local[:, 1]
    crossing = [
        (addresses, chunks)
        for addresses, chunks in ((local[:, 0], local_chunks), (remote[:, 0], remote_chunks))
        if chunks is not None and _crosses(addresses, lengths, chunks)
    ]
    n = len(lengths)
    if n == 1:
        length = int(lengths[0])
        if not crossing and length > rule.slice:
            return _one(int(local[0, 0]), int(remote[0, 0]), length, rule.piece(length))
        whole = length <= rule.slice
    else:
        whole = n == 0 or int(lengths.max()) <= rule.slice
    if not crossing:
        if whole:
            return Slices(local[:, 0], remote[:, 0], lengths, n)
        return _many(local, remote, rule)
    return _crossing(local, remote, rule, crossing)


def _one(local: int, remote: int, length: int, piece: int) -> Slices:
    """A single request that is longer than `piece`, or as long."""
    offsets = np.arange(0, length, piece, dtype=np.uint64)
    lengths = np.full(len(offsets), piece, np.uint64)
    lengths[-1] = length - (len(offsets) - 1) * piece
    return Slices(
        offsets + np.uint64(local),
        offsets + np.uint64(remote),
        lengths,
        1,
        np.zeros(len(offsets), np.intp),
    )


def _many(local: Iovecs, remote: Iovecs, rule: Rule) -> Slices:
    request, offsets, pieces = _regular(local[:, 1], rule)
    starts = local[:, 0][request]
    rest = local[:, 1][request] - offsets
    return Slices(
        starts + offsets,
        remote[:, 0][request] + offsets,
        np.minimum(rest, pieces[request]),
        len(local),
        request,
    )


def _regular(lengths: Column, rule: Rule) -> tuple[Indexes, Column, Column]:
    """For each piece its request and its offset in it; for each request the length of its pieces."""
    size = np.uint64(rule.slice)
    share = _ceil(lengths, np.uint64(rule.rails * PER_RAIL))
    pieces = np.minimum(_ceil(share, size) * size, np.uint64(rule.largest_slice))
    pieces = np.where(lengths <= size, np.maximum(lengths, _ONE), pieces)
    counts = np.maximum(_ceil(lengths, pieces), _ONE).astype(np.intp)
    ends = np.cumsum(counts)
    request = np.repeat(np.arange(len(lengths), dtype=np.intp), counts)
    place = np.arange(len(request), dtype=np.intp) - (ends - counts)[request]
    return request, place.astype(np.uint64) * pieces[request], pieces


def _crossing(
    local: Iovecs, remote: Iovecs, rule: Rule, sides: list[tuple[Column, Chunks]]
) -> Slices:
    """As `_many`, with a piece beginning also wherever a side's memory goes on in another chunk."""
    lengths = local[:, 1]
    request, offsets, _ = _regular(lengths, rule)
    requests, begins = [request], [offsets]
    for addresses, chunks in sides:
        size = np.broadcast_to(chunks.length, lengths.shape)
        within = addresses - chunks.start
        first = size - within % size
        # Boundaries strictly inside the request: at `first`, and every chunk further.
        counts = np.where(
            first < lengths, (lengths - np.minimum(first, lengths) - _ONE) // size + _ONE, 0
        )
        counts = counts.astype(np.intp)
        owner = np.repeat(np.arange(len(lengths), dtype=np.intp), counts)
        place = np.arange(len(owner), dtype=np.intp) - (np.cumsum(counts) - counts)[owner]
        requests.append(owner)
        begins.append(first[owner] + place.astype(np.uint64) * size[owner])
    request, begin = np.concatenate(requests), np.concatenate(begins)
    order = np.lexsort((begin, request))
    request, begin = request[order], begin[order]
    fresh = np.ones(len(request), np.bool_)
    fresh[1:] = (request[1:] != request[:-1]) | (begin[1:] != begin[:-1])
    request, begin = request[fresh], begin[fresh]
    end = lengths[request]
    same = request[1:] == request[:-1]
    end[:-1][same] = begin[1:][same]
    return Slices(
        local[:, 0][request] + begin,
        remote[:, 0][request] + begin,
        end - begin,
        len(lengths),
        request,
    )


def _crosses(addresses: Column, lengths: Column, chunks: Chunks) -> bool:
    within = addresses - chunks.start
    last = within + np.maximum(lengths, _ONE) - _ONE
    return bool((within // chunks.length != last // chunks.length).any())


def _ceil(values: Column, by: Column | np.uint64) -> Column:
    return (values + (by - _ONE)) // by


def _frozen(array: NDArray[T]) -> NDArray[T]:
    array.flags.writeable = False
    return array


class Finished(NamedTuple):
    """Requests of which nothing is under way any more, as ranges of their indexes."""

    completed: Ranges
    """All of it has arrived."""
    failed: Ranges
    """Some of it has not."""


class Progress:
    """How much of each request is still out. Every slice is reported once, as done or as failed.

    A request is finished when its last slice is: one of which some slice failed is not told before the
    others have ended, since until then they still move bytes. Where nothing was cut, nothing is counted
    but the total. Not thread-safe: its owner has a lock.
    """

    __slots__ = ("_broken", "_out", "_slices", "remaining")

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self.remaining = len(slices)
        """Slices that have not been reported."""
        self._out: Indexes | None = None
        self._broken: NDArray[np.bool_] | None = None
        """Of which a slice has failed; made at the first failure."""
        if slices.cut:
            self._out = np.bincount(slices.request, minlength=slices.requests)

    def done(self, start: int, stop: int) -> Finished:
        """The slices in [start, stop) have arrived; the requests that are finished with that."""
        return self._ended(start, stop, False)

    def failed(self, start: int, stop: int) -> Finished:
        """The slices in [start, stop) have not arrived and never will; the requests finished with that."""
        return self._ended(start, stop, True)

    def _ended(self, start: int, stop: int, failed: bool) -> Finished:
        if not 0 <= start <= stop <= len(self._slices):
            raise IndexError(f"slices [{start}, {stop}) of {len(self._slices)}")
        if start == stop:
            return Finished([], [])
        self.remaining -= stop - start
        if self._out is None:
            ranges = [(start, stop)]
            return Finished([], ranges) if failed else Finished(ranges, [])
        request = self._slices.request
        first, last = int(request[start]), int(request[stop - 1])
        if failed:
            if self._broken is None:
                self._broken = np.zeros(self._slices.requests, np.bool_)
            self._broken[first : last + 1] = True
        if first == last:
            self._out[first] -= stop - start
            if self._out[first]:
                return Finished([], [])
            over = [(first, first + 1)]
            if self._broken is not None and self._broken[first]:
                return Finished([], over)
            return Finished(over, [])
        out = self._out[first : last + 1]
        out -= np.bincount(request[start:stop] - first)
        over_here = out == 0
        if self._broken is None:
            return Finished(_ranges(over_here, first), [])
        broken = self._broken[first : last + 1]
        return Finished(_ranges(over_here & ~broken, first), _ranges(over_here & broken, first))


def _ranges(mask: NDArray[np.bool_], offset: int) -> Ranges:
    """Where `mask` is true, shifted by `offset`."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)) + offset
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
