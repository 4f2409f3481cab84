"""How the requests of one submission move: over which mappings and calls, and which of them cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from tent_core.errors import PermissionDenied, TentError
from tent_core.types import Opcode, Permission
from tent_core.work import Iovecs, Requests
from tent_shm import gather
from tent_shm.gather import Region, Side, around
from tent_shm.stream import Stream, Whole
from tent_shm.target import Target

PIECE_BYTES = 4096
"""What a block costs beside its bytes, in bytes of copying: about 0.3 microseconds (README.md)."""

LONG_BYTES = 2 << 20
"""What numpy copies keeps the GIL, for 65 microseconds and more from this size on: too long for a crowd."""

DIRECT_BYTES = 4 << 20
"""Blocks of this mean size go one by one by memmove, twice as fast as by the kernel (README.md)."""


@dataclass(frozen=True, slots=True, eq=False)
class Refusal:
    """Rows that cannot be moved, and why."""

    rows: NDArray[np.intp]
    cause: Exception


@dataclass(eq=False)
class Plan:
    """What a submission uses and does. It never changes: a prepared transfer keeps it for its next post.

    `whole` moves everything by one call, where one can and threads do not help much; with `quick` that takes
    less than about ten microseconds, and it keeps the GIL; with `may_hold` that takes a few milliseconds.
    `crowded` says whether that was chosen for one of several threads that copy; None: it is all the same.
    """

    targets: tuple[Target, ...]
    make_streams: Callable[[], tuple[Stream, ...]]
    refusals: tuple[Refusal, ...]
    total: int
    whole: Whole | None
    quick: bool
    may_hold: bool
    crowded: bool | None = None

    def suits(self, crowd: int) -> bool:
        """Whether it is as good as a new one for one of so many threads that copy."""
        return self.crowded is None or self.crowded is (crowd > 1)

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """How to move everything step by step, made when it is needed: `whole` mostly does without."""
        return self.make_streams()

    @cached_property
    def held(self) -> Whole | None:
        """What to call in place of `whole` where other threads compute: it keeps the GIL, which would come
        back a switch interval later (5 ms), if the copy takes less than that."""
        if self.quick or not self.may_hold:
            return self.whole
        return self.streams[0].whole(keep_gil=True) or self.whole

    def begin(self) -> bool:
        """Mark every target as in use; False, with none marked, when one of them is gone."""
        for i, target in enumerate(self.targets):
            if not target.begin():
                for marked in self.targets[:i]:
                    marked.end()
                return False
        return True

    def end(self) -> None:
        """Take the marks back, after the last call has returned."""
        for target in self.targets:
            target.end()

    @property
    def gone(self) -> Exception | None:
        """Why one of the buffers may be used no more, if so."""
        for target in self.targets:
            if target.gone is not None:
                return target.gone
        return None


@dataclass(frozen=True, slots=True)
class Ways:
    """What works in this process and to this peer: the ways to move bytes that a plan may choose from.

    `own` is this process, `keeper` the thread that names the owner's memory; `vectors` whether
    process_vm_readv(2) may be called on our own memory. `steady` answers where a local buffer is if it can be
    touched without a fault (memory of `allocate`), else None. `quick_weight` is the most that a submission
    moves with the GIL kept, `hold_bytes` the same where other threads compute. From `split_bytes` on
    `threads` share a submission, on so many `processors`.
    """

    own: int
    keeper: int
    vectors: bool
    steady: Callable[[int], Region | None]
    quick_weight: int
    hold_bytes: int
    split_bytes: int
    threads: int
    processors: int

    def split(self, total: int, crowd: int) -> bool:
        """Whether threads shall share so many bytes, beside the others of a crowd: not if those keep the
        processors busy already."""
        room = crowd == 1 or crowd * self.threads <= self.processors
        return total >= self.split_bytes and room

    def matters(self, total: int) -> bool:
        """Whether so many bytes move otherwise in a crowd."""
        return total >= min(LONG_BYTES, self.split_bytes)


def weight(n: int, total: int) -> int:
    """How long n blocks of `total` bytes take, in bytes."""
    return total + n * PIECE_BYTES


def make(requests: Requests, target: Callable[[int], Target], ways: Ways, crowd: int = 1) -> Plan:
    """Plan `requests` for one of `crowd` threads that copy at once. `target` answers the Target of a buffer
    id of the peer, or raises TentError."""
    targets: dict[int, Target] = {}
    causes: dict[int, Exception] = {}
    for number in requests.remote_used:
        try:
            targets[number] = _permitted(requests.opcode, target(number))
        except TentError as error:
            causes[number] = error
    quick = weight(len(requests), requests.total) <= ways.quick_weight
    crowded = crowd > 1 if ways.matters(requests.total) else None
    refusals: tuple[Refusal, ...] = ()
    whole, at_once = None, True
    if causes or len(targets) > 1:
        streams, refusals = _sorted_out(requests, targets, causes, ways)
        later = partial(tuple, streams)
        at_once = len(streams) == 1 and not refusals
        if at_once:
            whole = _gathered_anywhere(streams[0], crowd)
    else:
        (lone,) = targets.values()
        later = partial(_streams_to, requests, lone, ways)
        whole = _gathered(requests, lone, ways, crowd)
    may_hold = at_once and whole is None and requests.total <= ways.hold_bytes
    used = tuple(targets.values())
    found = Plan(used, later, refusals, requests.total, whole, quick, may_hold, crowded)
    if at_once and whole is None:
        found.whole = _whole(found.streams[0], quick, ways, crowd)
    return found


def _whole(stream: Stream, quick: bool, ways: Ways, crowd: int) -> Whole | None:
    """The system call, or the copy, that moves all of it, unless threads help."""
    few = quick or not ways.split(stream.total, crowd)
    return stream.whole(keep_gil=quick) if few else None


def _gathered(requests: Requests, target: Target, ways: Ways, crowd: int) -> Whole | None:
    """The call that moves everything between two steady buffers by way of numpy; None where it would be
    slower than another."""
    there, used = target.region, requests.local_used
    here = ways.steady(used[0]) if len(used) == 1 else None
    if there is None or here is None or _direct(len(requests), requests.total):
        return None
    sides = Side(requests.local, here), Side(requests.remote, there)
    return _between(requests.opcode, *sides, requests.total, crowd)


def _gathered_anywhere(stream: Stream, crowd: int) -> Whole | None:
    """The same between more buffers, of which nobody knows yet how far apart they are."""
    if not stream.steady or stream.direct:
        return None
    local, remote = (Side(iovecs, around(iovecs)) for iovecs in (stream.local, stream.remote))
    return _between(stream.opcode, local, remote, stream.total, crowd)


def _between(opcode: Opcode, local: Side, remote: Side, total: int, crowd: int) -> Whole | None:
    target, source = (remote, local) if opcode is Opcode.WRITE else (local, remote)
    call = gather.arranged(target, source, total, keep_gil=crowd == 1 or total < LONG_BYTES)
    return None if call is None else Whole(call, None)


def _streams_to(requests: Requests, target: Target, ways: Ways) -> tuple[Stream, ...]:
    """The one stream to or from one buffer of the peer."""
    remote = _moved_by(requests.remote, target.offset)
    return (_stream(requests, target, None, remote, ways),)


def _permitted(opcode: Opcode, target: Target) -> Target:
    # The core has checked this. Here it keeps a write away from a mapping that is read-only: a fault.
    if opcode is Opcode.WRITE and target.buffer.permission is not Permission.GLOBAL_READ_WRITE:
        raise PermissionDenied(
            f"the peer's buffer {target.buffer.name!r} is {target.buffer.permission.name}: not to be written"
        )
    return target


def _moved_by(remote: Iovecs, offset: int | NDArray[np.uint64]) -> Iovecs:
    if isinstance(offset, int) and offset == 0:
        return remote
    moved = remote.copy()
    moved[:, 0] += np.uint64(offset) if isinstance(offset, int) else offset
    return moved


def _stream(
    requests: Requests, target: Target, rows: NDArray[np.intp] | None, remote: Iovecs, ways: Ways
) -> Stream:
    """The stream of the rows (None: all) whose buffers are reached as `target` is; `remote` is all rows'."""
    local = requests.local
    total = requests.total
    if rows is not None:
        local, remote = local[rows], remote[rows]
        total = int(local[:, 1].sum())
    pid = ways.keeper
    steady = direct = False
    if target.mapping is not None:
        pid = ways.own
        steady = all(ways.steady(number) is not None for number in requests.local_used)
        direct = not ways.vectors or (steady and _direct(len(local), total))
    return Stream(requests.opcode, local, remote, total, rows, pid, direct, steady)


def _direct(n: int, total: int) -> bool:
    """Whether memmove shall move the blocks between steady memory that is mapped here.

    For a single block and for large ones: it is faster. Many small ones go by one call into numpy or the
    kernel: no Python object per block, and one release of the GIL at most. And memory of which we do not
    know that it stays as it is (a mapped file may be truncated) is left to the kernel, which answers EFAULT
    where memmove would end the process.
    """
    return n == 1 or total >= n * DIRECT_BYTES


def _sorted_out(
    requests: Requests, targets: dict[int, Target], causes: dict[int, Exception], ways: Ways
) -> tuple[tuple[Stream, ...], tuple[Refusal, ...]]:
    """Streams and refusals of requests to several buffers, by table look-ups over the column of their ids."""
    size = max(requests.remote_used) + 1
    kinds = np.zeros(size, np.int32)
    offsets = np.zeros(size, np.uint64)
    leaders: dict[int, Target] = {}
    for number, target in targets.items():
        kinds[number] = target.mapping is not None
        offsets[number] = target.offset
        leaders[int(kinds[number])] = target
    refused = {2 + i: cause for i, cause in enumerate(causes.values())}
    for i, number in enumerate(causes):
        kinds[number] = 2 + i
    remote = _moved_by(requests.remote, offsets[requests.remote_ids])
    if len(leaders) == 1 and not causes:
        return tuple(_stream(requests, t, None, remote, ways) for t in leaders.values()), ()
    of_rows = kinds[requests.remote_ids]
    streams = tuple(
        _stream(requests, target, np.flatnonzero(of_rows == kind), remote, ways)
        for kind, target in leaders.items()
    )
    return streams, tuple(
        Refusal(np.flatnonzero(of_rows == kind), cause) for kind, cause in refused.items()
    )
