"""Requests that passed every check, and how they are set going: marks, plan, carrying."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from tent_core import columns
from tent_core.attempt import FirstWork
from tent_core.batch import Batch, Options, Rows, Try
from tent_core.bound import Started
from tent_core.errors import (
    BufferRevoked,
    PermissionDenied,
    RangeError,
    StaleHandle,
    TentError,
    TransferCanceled,
    UsageError,
)
from tent_core.inflight import begin_all
from tent_core.integrity import Sums, sums_of
from tent_core.memory import Buffer, BufferSlice
from tent_core.once import Once
from tent_core.options import ManyOptions
from tent_core.planning import Group
from tent_core.remote_buffer import RemoteBuffer, RemoteSlice
from tent_core.types import Opcode, Permission, Status
from tent_core.work import Requests

if TYPE_CHECKING:
    from tent_core.remote import Segment

Local: TypeAlias = Buffer | Sequence[Buffer]
Remote: TypeAlias = RemoteBuffer | Sequence[RemoteBuffer]
Plan: TypeAlias = Callable[[], list[Group]]


class Checked:
    """Requests that passed every check, and the buffers that they hold while they are carried."""

    __slots__ = ("_sums", "engine", "local", "parts", "peer", "remote", "segment")

    def __init__(
        self,
        segment: Segment,
        parts: list[tuple[Requests, Rows]],
        local: tuple[Buffer, ...],
        remote: tuple[RemoteBuffer, ...],
    ) -> None:
        self.segment = segment
        self.engine = segment._engine
        self.peer = segment._peer
        self.parts = parts
        self.local = local
        self.remote = remote
        self._sums: Sums | None = None
        self._check_owners()
        if len(parts) == 1:
            self._check_permissions(parts[0][0].opcode, local, remote)
            return
        for requests, _ in parts:
            here, there = set(requests.local_used), set(requests.remote_used)
            self._check_permissions(
                requests.opcode,
                [b for b in local if b.id in here],
                [b for b in remote if b.id in there],
            )

    @staticmethod
    def _check_permissions(
        opcode: Opcode, local: Sequence[Buffer], remote: Sequence[RemoteBuffer]
    ) -> None:
        columns.check_local(opcode, local)
        _check_remote(opcode, remote)

    def _check_owners(self) -> None:
        for here in self.local:
            if here.engine is not self.engine:
                raise UsageError(
                    f"buffer {here.name!r} is registered with another engine; register it with this one"
                )
        for there in self.remote:
            if there.peer is not self.peer:
                if there.peer.departed is not None:
                    raise there.gone()
                raise UsageError(
                    f"buffer {there.name!r} is one of segment {there.peer.key.name}, "
                    f"not of {self.segment.name}"
                )

    def __len__(self) -> int:
        return sum([len(requests.local) for requests, _ in self.parts])

    def marks(self) -> list[Any]:
        """Mark every buffer as in use, or raise saying which one refuses."""
        users: tuple[Buffer | RemoteBuffer, ...] = (*self.local, *self.remote)
        marks = [user.inflight for user in users]
        shut = begin_all(marks)
        if shut is not None:
            raise next(_gone(user) for user in users if user.inflight is shut)
        return marks

    def sums(self) -> Sums:
        """How to sum what these move. Raises UsageError where it cannot be."""
        if self._sums is None:
            self._sums = sums_of(self)
        return self._sums

    def groups(self, options: Options) -> list[Group]:
        """Which rows go to which candidates."""
        local = {b.id: b.trait for b in self.local}
        remote = {b.id: b.trait for b in self.remote}
        found: list[Group] = []
        for requests, rows in self.parts:
            if len(requests):
                found += self.engine.dispatcher.groups(
                    self.peer, requests, local, remote, options, rows
                )
        return found

    def start(self, options: Options, may_block: bool, plan: Plan | None = None) -> Batch:
        """Mark the peer and the buffers as in use, plan, and set going.

        A peer that was retired is woken first: by this thread if it may block, else by one that may wait.
        """
        engine, peer = self.engine, self.peer
        batch = self._batch()
        began = engine.dispatcher.now()
        deadline = engine.deadline(options, began)
        note = options.note
        if note is not None:
            sums = self.sums() if note.integrity else None
            engine.announcer.follow(batch, peer, note, sums, deadline)
        if peer.try_begin():
            self._go(batch, options, may_block, plan, deadline, began)
        elif may_block:
            peer.begin(engine.call_timeout(None))
            self._go(batch, options, may_block, plan, deadline, engine.dispatcher.now())
        else:
            waking = _Waking(batch)
            batch.carried_by([waking], None)
            engine.dispatcher.patiently(
                lambda: self._go_later(batch, waking, options, plan, deadline)
            )
        return batch

    def go_on(self, started: Started, options: Options) -> Batch:
        """Carry on what a bound call has started; the use of its lease ends with the batch."""
        bound = started.bound
        dispatcher = self.engine.dispatcher
        batch = self._batch()
        batch.hold((bound.lease,))
        began = dispatcher.now()
        deadline = self.engine.deadline(options, began)
        work = FirstWork(dispatcher, batch, self.peer, bound.group, options, deadline, began, True)
        dispatcher.first(work, bound.endpoint, started.resume)
        return batch

    def _batch(self) -> Batch:
        return Batch(len(self), self.peer.key.name, self.engine.spin_s)

    def _go(
        self,
        batch: Batch,
        options: Options,
        may_block: bool,
        plan: Plan | None,
        deadline: float,
        began: float,
    ) -> None:
        """Set going; the use of the peer has begun. What raises here leaves no mark behind."""
        try:
            groups = self.groups(options) if plan is None else plan()
            marks = self.marks()
        except BaseException:
            self.peer.end()
            raise
        dispatcher = self.engine.dispatcher
        if (options.timeout is not None or options.deadline is not None) and not options.part:
            deadlines = dispatcher.stats.deadlines
            marks.append(deadlines.follow(batch, options.priority, deadline, dispatcher.now))
            batch.feasible = dispatcher.feasible(self.peer, groups, options, deadline)
            if batch.feasible is False:
                deadlines.infeasible(options.priority)
        batch.hold((*marks, self.peer))
        if not batch.done:
            dispatcher.start(batch, self.peer, groups, options, deadline, began, may_block)

    def _go_later(
        self,
        batch: Batch,
        waking: _Waking,
        options: Options,
        plan: Plan | None,
        deadline: float,
    ) -> None:
        if batch.done:
            return
        try:
            self.peer.begin(self.engine.call_timeout(None))
        except TentError as error:
            waking.end(error, Status.FAILED)
            return
        if not waking.over.take():
            self.peer.end()
            return
        try:
            self._go(batch, options, False, plan, deadline, self.engine.dispatcher.now())
        except TentError as error:
            batch.settle_failed(None, Status.FAILED, None, (Try("connect", error, 0.0),))


class _Waking:
    """A batch whose peer is being woken: it begins, or it ends, by whoever comes first."""

    def __init__(self, batch: Batch) -> None:
        self.over = Once()
        self._batch = batch

    def end(self, cause: TentError, status: Status) -> None:
        if self.over.take():
            self._batch.settle_failed(None, status, None, (Try("connect", cause, 0.0),))

    def cancel(self) -> None:
        self.end(TransferCanceled("it was cancelled before it began"), Status.CANCELED)


def check_one(
    segment: Segment,
    opcode: Opcode | str,
    local: Buffer | BufferSlice,
    remote: RemoteBuffer | RemoteSlice,
) -> Checked:
    """One request between two slices of equal length, to be posted many times."""
    here, there = _as_slice(local), _as_remote_slice(remote)
    if here.length != there.length:
        raise RangeError(
            f"local and remote must be of equal length, found {here.length} and {there.length} bytes"
        )
    op = columns.opcodes(opcode, 1)
    assert isinstance(op, Opcode)
    if here.length >= columns.LARGEST_TOTAL:
        raise RangeError(f"a request of {here.length} bytes: less than 2^63 are allowed")
    requests = Requests(
        op,
        np.array([[here.buffer.address + here.offset, here.length]], np.uint64),
        np.array([[there.buffer.address + there.offset, there.length]], np.uint64),
        np.array([here.buffer.id], np.int32),
        np.array([there.buffer.id], np.int32),
        (here.buffer.id,),
        (there.buffer.id,),
        {there.buffer.id: there.buffer.generation},
        here.length,
        reused=True,
    )
    return Checked(segment, [(requests, None)], (here.buffer,), (there.buffer,))


def check_many(
    segment: Segment,
    opcode: Opcode | str | ArrayLike,
    local: Local,
    local_offsets: ArrayLike,
    remote: Remote,
    remote_offsets: ArrayLike,
    lengths: ArrayLike,
    options: ManyOptions,
    reused: bool,
) -> Checked:
    """A batch between buffers, its columns as `Segment.write_many` describes them."""
    offsets = columns.column(local_offsets, "local offsets")
    n = offsets.size if offsets.ndim else 1
    sizes = columns.lengths_of(lengths, n)
    here = columns.side(local, offsets, sizes, options.get("local_index"), "local")
    there = columns.side(remote, remote_offsets, sizes, options.get("remote_index"), "remote")
    ops = columns.opcodes(opcode, n)
    whole = Requests(
        ops if isinstance(ops, Opcode) else Opcode.READ,
        here.iovecs,
        there.iovecs,
        here.ids,
        there.ids,
        here.used_ids,
        there.used_ids,
        {b.id: b.generation for b in there.used},
        columns.total_of(sizes),
        reused,
    )
    if isinstance(ops, Opcode):
        return Checked(segment, [(whole, None)], here.used, there.used)
    parts: list[tuple[Requests, Rows]] = []
    for op in Opcode:
        rows = np.flatnonzero(ops == op)
        part = columns.subset(whole, rows)
        part.opcode = op
        parts.append((part, rows))
    return Checked(segment, parts, here.used, there.used)


def _as_slice(local: Any) -> BufferSlice:
    if isinstance(local, Buffer):
        return BufferSlice(local, 0, local.length)
    if isinstance(local, BufferSlice):
        return local
    raise UsageError(
        f"local must be a registered buffer or a slice of one, found {type(local).__name__}: "
        "register it first with engine.register()"
    )


def _as_remote_slice(remote: Any) -> RemoteSlice:
    if isinstance(remote, RemoteBuffer):
        return RemoteSlice(remote, 0, remote.length)
    if isinstance(remote, RemoteSlice):
        return remote
    raise UsageError(
        f"remote must be a buffer of the segment or a slice of one, found {type(remote).__name__}: "
        "ask for it with segment.buffer(name)"
    )


def _check_remote(opcode: Opcode, used: Sequence[RemoteBuffer]) -> None:
    needed = Permission.GLOBAL_READ_WRITE if opcode is Opcode.WRITE else Permission.GLOBAL_READ_ONLY
    for buffer in used:
        if buffer.permission < needed:
            raise PermissionDenied(
                f"cannot {opcode.name} buffer {buffer.name!r}: its owner permits {buffer.permission.name}; "
                f"it would have to be registered with {needed.name}"
            )


def _gone(user: Buffer | RemoteBuffer) -> Exception:
    if isinstance(user, RemoteBuffer):
        return user.gone()
    if user.memory is None:
        return StaleHandle(f"buffer {user.name!r} was unregistered; register the memory again")
    return BufferRevoked(f"buffer {user.name!r} is being unregistered and takes no new requests")
