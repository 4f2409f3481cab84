"""A peer's segment as an application uses it: read, write, many at once, prepared transfers, notify."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike

from tent_core import columns
from tent_core.batch import Batch, Options, Rows, Try
from tent_core.descriptor import SegmentDescriptor
from tent_core.errors import (
    BufferRevoked,
    ClosedError,
    PermissionDenied,
    RangeError,
    StaleHandle,
    TentError,
    UsageError,
)
from tent_core.inflight import begin_all
from tent_core.memory import Buffer, BufferSlice
from tent_core.peers import LivePeer
from tent_core.planning import Group
from tent_core.remote_buffer import RemoteBuffer, RemoteSlice
from tent_core.types import Intent, Opcode, Permission, Priority, Status
from tent_core.work import Requests

if TYPE_CHECKING:
    from tent_core.engine import Engine

Local: TypeAlias = Buffer | Sequence[Buffer]
Plan: TypeAlias = Callable[[], list[Group]]
Remote: TypeAlias = RemoteBuffer | Sequence[RemoteBuffer]


class TransferOptions(TypedDict, total=False):
    """Keyword options of every transfer.

    `timeout` seconds bound the transfer (default: `transfer.timeout_s`); `priority` and `intent` may match
    policy entries; `policy` names one; `transport` is a hint for the first try.
    """

    timeout: float | None
    priority: Priority
    intent: Intent
    policy: str | None
    transport: str | None


class Columns(TypedDict, total=False):
    """Which buffer each request means, when sequences of buffers are given: integers, shape (n,)."""

    local_index: ArrayLike
    remote_index: ArrayLike


class ManyOptions(TransferOptions, Columns, total=False):
    """Options of a batch."""


class Segment:
    """A handle on a peer's segment, from `Engine.open_segment`. A context manager; thread-safe.

    Offsets and lengths are in bytes, offsets relative to the buffer that they are in. Every call checks its
    whole input before the first byte moves, and raises UsageError (RangeError, PermissionDenied,
    StaleHandle, ...) for a mistake; TransferFailed when transports failed; WaitTimeout.
    """

    def __init__(self, engine: Engine, peer: LivePeer) -> None:
        self._engine = engine
        self._peer = peer
        self._closed = False

    # ---------------------------------------------------------------- what is there

    @property
    def name(self) -> str:
        """The segment name, `host:port`."""
        return self._peer.key.name

    @property
    def peer(self) -> LivePeer:
        """The live peer behind this handle."""
        return self._peer

    @property
    def descriptor(self) -> SegmentDescriptor:
        """The newest snapshot of the segment."""
        return self._peer.segment

    def buffers(self) -> list[RemoteBuffer]:
        """The peer's buffers that take requests."""
        self._check_open()
        return self._peer.buffers()

    def buffer(self, name: str, timeout: float | None = None) -> RemoteBuffer:
        """The peer's buffer of that name; asks the peer once before it is an error."""
        self._check_open()
        found = self._peer.find(name)
        if found is None:
            self._peer.refresh(self._engine.call_timeout(timeout))
            found = self._peer.find(name)
        if found is None:
            known = ", ".join(repr(b.name) for b in self._peer.buffers()[:8]) or "none"
            raise RangeError(f"segment {self.name} has no buffer {name!r}; it has {known}")
        return found

    # ---------------------------------------------------------------- one request

    def write(
        self,
        local: Buffer | BufferSlice,
        remote: RemoteBuffer | RemoteSlice,
        **options: Unpack[TransferOptions],
    ) -> None:
        """Copy `local` to `remote`, of equal length. Returns when the owner sees every byte."""
        self.prepare(Opcode.WRITE, local, remote, **options)._run_once()

    def read(
        self,
        local: Buffer | BufferSlice,
        remote: RemoteBuffer | RemoteSlice,
        **options: Unpack[TransferOptions],
    ) -> None:
        """Copy `remote` into `local`, of equal length. Returns when every byte is here."""
        self.prepare(Opcode.READ, local, remote, **options)._run_once()

    # ---------------------------------------------------------------- many requests

    def write_many(
        self,
        local: Local,
        local_offsets: ArrayLike,
        remote: Remote,
        remote_offsets: ArrayLike,
        lengths: ArrayLike,
        **options: Unpack[ManyOptions],
    ) -> Batch:
        """Write n ranges at once and wait: row i goes from local_offsets[i] to remote_offsets[i].

        Columns are integers of shape (n,), `lengths` may be one number for all. Returns the finished batch.
        """
        return self._many(
            Opcode.WRITE, local, local_offsets, remote, remote_offsets, lengths, True, options
        )

    def read_many(
        self,
        local: Local,
        local_offsets: ArrayLike,
        remote: Remote,
        remote_offsets: ArrayLike,
        lengths: ArrayLike,
        **options: Unpack[ManyOptions],
    ) -> Batch:
        """Read n ranges at once and wait: row i goes from remote_offsets[i] to local_offsets[i]."""
        return self._many(
            Opcode.READ, local, local_offsets, remote, remote_offsets, lengths, True, options
        )

    def submit(
        self,
        opcode: Opcode | str | ArrayLike,
        local: Local,
        local_offsets: ArrayLike,
        remote: Remote,
        remote_offsets: ArrayLike,
        lengths: ArrayLike,
        **options: Unpack[ManyOptions],
    ) -> Batch:
        """Start n requests and return at once; `await` or `wait` on the batch. `opcode` may be a column."""
        return self._many(
            opcode, local, local_offsets, remote, remote_offsets, lengths, False, options
        )

    def _many(
        self,
        opcode: Opcode | str | ArrayLike,
        local: Local,
        local_offsets: ArrayLike,
        remote: Remote,
        remote_offsets: ArrayLike,
        lengths: ArrayLike,
        may_block: bool,
        options: ManyOptions,
    ) -> Batch:
        self._check_open()
        chosen = _options(options)
        checked = _checked(
            self,
            opcode,
            local,
            local_offsets,
            remote,
            remote_offsets,
            lengths,
            options,
            reused=False,
        )
        batch = checked.start(chosen, may_block)
        return batch.wait(self._engine.wait_limit(chosen.timeout)) if may_block else batch

    # ---------------------------------------------------------------- prepared

    def prepare(
        self,
        opcode: Opcode | str,
        local: Buffer | BufferSlice,
        remote: RemoteBuffer | RemoteSlice,
        **options: Unpack[TransferOptions],
    ) -> Prepared:
        """Check one request once, to be posted many times with `run` or `post`."""
        self._check_open()
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
            here.length,
            reused=True,
        )
        checked = _Checked(self, [(requests, None)], (here.buffer,), (there.buffer,))
        return Prepared(checked, _options(options))

    def prepare_many(
        self,
        opcode: Opcode | str | ArrayLike,
        local: Local,
        local_offsets: ArrayLike,
        remote: Remote,
        remote_offsets: ArrayLike,
        lengths: ArrayLike,
        **options: Unpack[ManyOptions],
    ) -> Prepared:
        """Check a batch once, to be posted many times."""
        self._check_open()
        checked = _checked(
            self,
            opcode,
            local,
            local_offsets,
            remote,
            remote_offsets,
            lengths,
            options,
            reused=True,
        )
        return Prepared(checked, _options(options))

    # ---------------------------------------------------------------- the rest

    def notify(self, name: str, payload: bytes = b"", timeout: float | None = None) -> None:
        """Send the peer's application a notification: delivered once, in the order of the calls.

        Name and payload together are at most 64 KiB less a header. Raises WaitTimeout when the peer's
        queue stays full for `timeout` seconds (default: `notifications.timeout_s`), PeerDeparted.
        """
        self._check_open()
        self._peer.notify(name, payload, self._engine.notify_timeout(timeout))

    def close(self) -> None:
        """Give the handle back. The peer stays connected for a while, so that reopening costs nothing."""
        if not self._closed:
            self._closed = True
            self._engine.roster.handle_closed(self._peer)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(
                f"this handle of segment {self.name} was closed; open the segment again"
            )
        self._engine.check_open()

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._peer.departed or "open"
        return f"<Segment {self.name} {len(self._peer.segment.buffers)} buffers, {state}>"


class _Checked:
    """Requests that passed every check, and the buffers that they hold while they are carried."""

    __slots__ = ("engine", "local", "parts", "peer", "remote", "segment")

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
        self._check_owners()
        for requests, _ in parts:
            columns.check_local(requests.opcode, local)
            _check_remote(requests.opcode, remote)

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
        return sum(len(requests) for requests, _ in self.parts)

    def marks(self) -> list[Any]:
        """Mark every buffer as in use, or raise saying which one refuses."""
        users: tuple[Buffer | RemoteBuffer, ...] = (*self.local, *self.remote)
        marks = [user.inflight for user in users]
        shut = begin_all(marks)
        if shut is not None:
            raise next(_gone(user) for user in users if user.inflight is shut)
        return marks

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

        A peer that was retired is woken first: by this thread if it may block, else by the progress thread.
        """
        engine, peer = self.engine, self.peer
        batch = Batch(len(self), f"batch of {len(self)} to {peer.key.name}", engine.spin_s)
        deadline = engine.deadline(options.timeout)
        if peer.try_begin():
            self._go(batch, options, may_block, plan, deadline)
        elif may_block:
            peer.begin(engine.call_timeout(None))
            self._go(batch, options, may_block, plan, deadline)
        else:
            engine.dispatcher.progress.submit(
                lambda: self._go_later(batch, options, plan, deadline)
            )
        return batch

    def _go(
        self, batch: Batch, options: Options, may_block: bool, plan: Plan | None, deadline: float
    ) -> None:
        """Set going; the use of the peer has begun. What raises here leaves no mark behind."""
        try:
            groups = self.groups(options) if plan is None else plan()
            marks = self.marks()
        except BaseException:
            self.peer.end()
            raise
        batch.hold((*marks, self.peer))
        if not batch.done:
            self.engine.dispatcher.start(batch, self.peer, groups, deadline, may_block)

    def _go_later(self, batch: Batch, options: Options, plan: Plan | None, deadline: float) -> None:
        try:
            self.peer.begin(self.engine.call_timeout(None))
            self._go(batch, options, False, plan, deadline)
        except TentError as error:
            batch.settle_failed(None, Status.FAILED, None, (Try("connect", error, 0.0),))


class Prepared:
    """A checked transfer that can be posted many times, also from several threads at once.

    Its arrays never change; progress lives in each post. It fails with StaleHandle, BufferRevoked,
    PeerDeparted or ClosedError once a buffer, the peer's incarnation or the segment handle is gone.
    """

    __slots__ = ("_checked", "_epoch", "_groups", "_options")

    def __init__(self, checked: _Checked, options: Options) -> None:
        self._checked = checked
        self._options = options
        self._epoch = -1
        self._groups: list[Group] = []

    def _plan(self) -> list[Group]:
        """The groups for the peer's present epoch."""
        epoch = self._checked.peer.epoch
        if epoch != self._epoch:
            for requests, _ in self._checked.parts:
                requests.derived = None
            self._groups = self._checked.groups(self._options)
            self._epoch = epoch
        return self._groups

    def post(self) -> Batch:
        """Start the transfer and return at once."""
        self._checked.segment._check_open()
        return self._checked.start(self._options, False, self._plan)

    def run(self, timeout: float | None = None) -> None:
        """Carry out the transfer and return when all of it is COMPLETED. Raises as `Segment.write` does."""
        self._checked.segment._check_open()
        options = self._options
        if timeout is not None:
            options = Options(
                timeout, options.priority, options.intent, options.policy, options.transport
            )
        self._run(options)

    def _run_once(self) -> None:
        self._run(self._options)

    def _run(self, options: Options) -> None:
        checked = self._checked
        batch = checked.start(options, True, self._plan)
        batch.wait(checked.engine.wait_limit(options.timeout))

    def __repr__(self) -> str:
        return f"<Prepared {len(self._checked)} requests to {self._checked.peer.key.name}>"


def _options(given: Any) -> Options:
    """Options from keyword arguments, with the columns left out."""
    try:
        priority = Priority(given.get("priority", Priority.MEDIUM))
        intent = Intent(given.get("intent", Intent.UNSPEC))
    except ValueError as error:
        raise UsageError(
            f"{error}: use the members of tent_core.Priority and tent_core.Intent"
        ) from None
    return Options(
        given.get("timeout"), priority, intent, given.get("policy"), given.get("transport")
    )


def _checked(
    segment: Segment,
    opcode: Opcode | str | ArrayLike,
    local: Local,
    local_offsets: ArrayLike,
    remote: Remote,
    remote_offsets: ArrayLike,
    lengths: ArrayLike,
    options: ManyOptions,
    reused: bool,
) -> _Checked:
    offsets = columns.column(local_offsets, "local offsets")
    n = offsets.size if offsets.ndim else 1
    sizes = columns.lengths_of(lengths, n)
    here = columns.side(local, offsets, sizes, options.get("local_index"), "local")
    there = columns.side(remote, remote_offsets, sizes, options.get("remote_index"), "remote")
    ops = columns.opcodes(opcode, n)
    whole = Requests(
        ops if isinstance(ops, Opcode) else Opcode.READ,
        columns.iovecs(here.addresses, sizes),
        columns.iovecs(there.addresses, sizes),
        here.ids,
        there.ids,
        tuple(b.id for b in here.used),
        tuple(b.id for b in there.used),
        columns.total_of(sizes, here.used),
        reused,
    )
    if isinstance(ops, Opcode):
        return _Checked(segment, [(whole, None)], here.used, there.used)
    parts: list[tuple[Requests, Rows]] = []
    for op in Opcode:
        rows = np.flatnonzero(ops == op)
        part = columns.subset(whole, rows)
        part.opcode = op
        parts.append((part, rows))
    return _Checked(segment, parts, here.used, there.used)


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
