"""A peer's segment as an application uses it: read, write, many at once, prepared transfers, notify."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from numpy.typing import ArrayLike

from tent_core.batch import Batch, Options
from tent_core.bound import Outcome, Started, bind, unbound
from tent_core.checked import Checked, Local, Remote, check_many, check_one
from tent_core.descriptor import SegmentDescriptor
from tent_core.errors import ClosedError, RangeError, TentError
from tent_core.memory import Buffer, BufferSlice
from tent_core.options import ManyOptions, TransferOptions, read_notify, read_options
from tent_core.peers import LivePeer
from tent_core.planning import Group
from tent_core.remote_buffer import RemoteBuffer, RemoteSlice
from tent_core.types import Opcode

if TYPE_CHECKING:
    from tent_core.engine import Engine


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
        self._one(Opcode.WRITE, local, remote, options)

    def read(
        self,
        local: Buffer | BufferSlice,
        remote: RemoteBuffer | RemoteSlice,
        **options: Unpack[TransferOptions],
    ) -> None:
        """Copy `remote` into `local`, of equal length. Returns when every byte is here."""
        self._one(Opcode.READ, local, remote, options)

    def _one(
        self,
        opcode: Opcode,
        local: Buffer | BufferSlice,
        remote: RemoteBuffer | RemoteSlice,
        options: TransferOptions,
    ) -> None:
        self._check_open()
        chosen = read_options(options)
        try:
            checked = check_one(self, opcode, local, remote)
        except TentError as error:
            self._not_started(chosen, error)
            raise
        Prepared(checked, chosen)._run(chosen)

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
        chosen = read_options(options)
        try:
            checked = check_many(
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
        except TentError as error:
            self._not_started(chosen, error)
            raise
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
        checked = check_one(self, opcode, local, remote)
        return Prepared(checked, read_options(options))

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
        checked = check_many(
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
        return Prepared(checked, read_options(options))

    # ---------------------------------------------------------------- the rest

    def notify(self, name: str, payload: bytes = b"", timeout: float | None = None) -> None:
        """Send the peer's application a notification: delivered once, in the order of the calls.

        Name and payload together are at most 64 KiB less a header. Raises WaitTimeout when the peer's
        queue stays full for `timeout` seconds (default: `notifications.timeout_s`), PeerDeparted.
        """
        self._check_open()
        self._peer.notify(name, payload, self._engine.notify_timeout(timeout))

    def _not_started(self, options: Options, error: TentError) -> None:
        """Nothing was started: who waits for the notification about it has to learn that."""
        if options.note is not None:
            self._engine.announcer.tell_failure(self._peer, options.note, str(error))

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


class Prepared:
    """A checked transfer that can be posted many times, also from several threads at once.

    Its arrays never change; progress lives in each post. It fails with StaleHandle, BufferRevoked,
    PeerDeparted or ClosedError once a buffer, the peer's incarnation or the segment handle is gone.
    """

    __slots__ = ("_asked", "_bound", "_checked", "_epoch", "_groups", "_options", "_segment")

    def __init__(self, checked: Checked, options: Options) -> None:
        self._checked = checked
        self._segment = checked.segment
        self._options = options
        self._epoch = -1
        self._groups: list[Group] = []
        self._bound: Callable[[], Outcome] = unbound
        self._asked = -1
        """The epoch in which it was tried to bind it."""

    def _plan(self) -> list[Group]:
        """The groups for the peer's present epoch."""
        epoch = self._checked.peer.epoch
        if epoch != self._epoch:
            for requests, _ in self._checked.parts:
                requests.derived = None
            self._groups = self._checked.groups(self._options)
            self._epoch = epoch
        return self._groups

    def post(self, notify: str | tuple[str, bytes] | None = None) -> Batch:
        """Start the transfer and return at once. `notify` counts for this post instead of that prepared."""
        self._segment._check_open()
        return self._start(self._with(notify), False)

    def run(
        self, timeout: float | None = None, notify: str | tuple[str, bytes] | None = None
    ) -> None:
        """Carry out the transfer and return when all of it is COMPLETED. Raises as `Segment.write` does."""
        self._segment._check_open()
        if timeout is None and notify is None:
            done = self._bound()
            if done is not True:
                self._run_unbound(done)
            return
        options = self._with(notify)
        if timeout is not None:
            options = replace(options, timeout=timeout)
        self._run(options)

    def _run_unbound(self, done: Outcome) -> None:
        """Nothing is bound, or it could not carry it out at once; then see whether that can be helped."""
        if isinstance(done, Started):
            batch = self._checked.go_on(done, self._options)
            batch.wait(self._checked.engine.wait_limit(None))
        else:
            self._run(self._options)
        if self._asked != self._epoch:
            self._asked = self._epoch
            self._bind()

    def _bind(self) -> None:
        epoch = self._epoch
        groups = (
            self._groups
        )  # read after the epoch: they are planned for that one, or for a later one
        alone = len(groups) == 1 and len(groups[0].requests) == 1
        if alone and groups[0].direct and self._options.plain:
            self._bound = bind(self._checked, groups[0], epoch) or unbound

    def _with(self, notify: str | tuple[str, bytes] | None) -> Options:
        options = self._options
        if notify is None:
            return options
        integrity = "crc32c" if options.note is not None and options.note.integrity else None
        return replace(options, note=read_notify(notify, integrity))

    def _run(self, options: Options) -> None:
        self._start(options, True).wait(self._checked.engine.wait_limit(options.timeout))

    def _start(self, options: Options, may_block: bool) -> Batch:
        try:
            return self._checked.start(options, may_block, self._plan)
        except TentError as error:
            self._segment._not_started(options, error)
            raise

    def __repr__(self) -> str:
        return f"<Prepared {len(self._checked)} requests to {self._checked.peer.key.name}>"
