"""Data that no transport moves between two memories directly goes through host memory of this process.

Requests are cut into chunks. Each takes a slot of a pool, makes two hops as ordinary batches of the engine,
one between the local memory and the slot, one between the slot and the peer, and gives the slot back; so one
chunk is copied while another is on the wire. The hop within the process goes to this engine's own segment,
which it opens like any other. The peer needs to know nothing of it.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tent_core.batch import Batch, Options, Rows, Try
from tent_core.checked import Checked
from tent_core.columns import subset
from tent_core.errors import (
    DeadlinePassed,
    StaleHandle,
    TentError,
    TransferCanceled,
    TransportError,
)
from tent_core.memory import Buffer
from tent_core.once import Once
from tent_core.policy import HOST_MEMORY, Selection
from tent_core.remote import Segment
from tent_core.remote_buffer import RemoteBuffer
from tent_core.reshape import Part, PartsSink, Sink, part, parts
from tent_core.types import Intent, Opcode, Permission, Status
from tent_core.work import Requests

if TYPE_CHECKING:
    from tent_core.alarm import Handle
    from tent_core.engine import Engine
    from tent_core.peers import LivePeer

BUFFER = "tent.staging"
"""Name of the buffer that has the slots. Peers see it among the others."""


class Slots:
    """Numbers that are lent, at most `count` at once; who has to wait goes by priority, then by arrival.

    Thread-safe; its lock is a leaf, and who gets a number is told without it.
    """

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._free = list(range(count))
        self._waiting: list[tuple[int, int, Once, Callable[[int], None]]] = []
        self._order = itertools.count()

    def take(self, priority: int, once: Once, go: Callable[[int], None]) -> None:
        """`go(number)` now or later, unless somebody else takes `once` before."""
        with self._lock:
            if not self._free:
                heapq.heappush(self._waiting, (priority, next(self._order), once, go))
                return
            number = self._free.pop() if once.take() else None
        if number is not None:
            go(number)

    def give_back(self, number: int) -> None:
        """It may be lent to another."""
        with self._lock:
            while self._waiting:
                _, _, once, go = heapq.heappop(self._waiting)
                if once.take():
                    break
            else:
                self._free.append(number)
                return
        go(number)

    @property
    def free(self) -> int:
        """How many are not lent."""
        with self._lock:
            return len(self._free)


class Stager:
    """The staging of one engine. Its memory is made, and its own segment opened, at the first use."""

    def __init__(self, engine: Engine, buffers: int, chunk: int) -> None:
        self._engine = engine
        self.buffers = buffers
        self.chunk = chunk
        self.slots = Slots(buffers)
        self._lock = threading.Lock()
        self._memory: Buffer | None = None
        self._segment: Segment | None = None

    def stage(
        self,
        sink: Sink,
        rows: Rows,
        requests: Requests,
        peer: LivePeer,
        selection: Selection,
        options: Options,
        deadline: float,
    ) -> Staged:
        """What carries these requests through host memory, once it is run. They hold their buffers."""
        return Staged(self._engine, self, sink, rows, requests, peer, selection, options, deadline)

    def ready(self, go: Callable[[TentError | None], None]) -> None:
        """`go(None)` once there is memory and a way to it, or `go(error)`; perhaps in another thread."""
        if self._segment is not None and self._segment.peer.departed is None:
            go(None)
        else:
            self._engine.dispatcher.patiently(lambda: go(self._prepared()))

    def _prepared(self) -> TentError | None:
        engine = self._engine
        try:
            with self._lock:  # held for one call to ourselves: others need its outcome as well
                if self._memory is None:
                    size = self.buffers * self.chunk
                    self._memory = engine.allocate(
                        size, HOST_MEMORY, name=BUFFER, permission=Permission.GLOBAL_READ_WRITE
                    )
                if self._segment is None or self._segment.peer.departed is not None:
                    self._segment = engine.open_segment(engine.segment_name)
                    self._segment.buffer(BUFFER)
        except TentError as error:
            return error
        return None

    @property
    def here(self) -> tuple[Buffer, Segment, RemoteBuffer]:
        """The memory, this engine's own segment, and the memory as seen through it."""
        memory, segment = self._memory, self._segment
        if memory is None or segment is None:
            raise TransportError("there is no memory to stage in")
        return memory, segment, segment.buffer(BUFFER)

    def rows(self, number: int, lengths: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Addresses and lengths of ranges that follow one another in a slot."""
        memory = self._memory
        assert memory is not None
        start = np.uint64(memory.address + number * self.chunk)
        return np.stack((start + np.cumsum(lengths) - lengths, lengths), axis=1)


class Staged:
    """Requests on their way through host memory, chunk by chunk."""

    def __init__(
        self,
        engine: Engine,
        stager: Stager,
        sink: Sink,
        rows: Rows,
        requests: Requests,
        peer: LivePeer,
        selection: Selection,
        options: Options,
        deadline: float,
    ) -> None:
        assert selection.entry is not None
        self.engine = engine
        self.stager = stager
        self.peer = peer
        self.deadline = deadline
        self._cancelled = False
        here = replace(
            options, timeout=float("inf"), deadline=deadline, transport=None, note=None, part=True
        )
        self.inside = replace(here, policy=None, intent=Intent.STAGING_INTERNAL)
        self.onward = replace(here, policy=selection.entry.name, transport=options.transport)
        # A part is less than twice as large as its pieces may be.
        pieces, spans = parts(requests, stager.chunk // 2)
        whole = PartsSink(sink, rows, pieces)
        self._chunks = [
            Chunk(self, part(requests, pieces, start, stop), whole.part(start, stop))
            for start, stop in spans
        ]
        self._left = len(self._chunks)
        self._lock = threading.Lock()
        self._alarm: Handle | None = None

    def run(self) -> None:
        """Set all chunks going; never waits."""
        self._alarm = self.engine.dispatcher.alarm.at(self.deadline, self._late)
        self.stager.ready(self._begin)

    def _begin(self, error: TentError | None) -> None:
        for chunk in self._chunks:
            if error is not None:
                chunk.give_up(error, Status.FAILED)
            else:
                chunk.wait_for_slot()

    def _late(self) -> None:
        cause = DeadlinePassed("its deadline passed while it waited for memory to be staged in")
        self.engine.dispatcher.later(lambda: self._give_up(cause, Status.TIMEOUT))

    def cancel(self) -> None:
        """What waits ends at once; what is on its way, as its transports can."""
        self._cancelled = True
        self._give_up(TransferCanceled("it was cancelled before it was staged"), Status.CANCELED)
        for chunk in self._chunks:
            chunk.cancel()

    def is_cancelled(self) -> bool:
        """Whether nobody wants it any more."""
        return self._cancelled

    def _give_up(self, cause: TentError, status: Status) -> None:
        for chunk in self._chunks:
            chunk.give_up(cause, status)

    def ended(self) -> None:
        """A chunk has ended."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last and self._alarm is not None:
            self._alarm.cancel()


class Chunk:
    """What goes through one slot at once: waits for it, makes one hop, and the other with what is left."""

    def __init__(self, staged: Staged, requests: Requests, sink: Part) -> None:
        self._staged = staged
        self._requests = requests
        self._sink = sink
        self._rows: NDArray[np.intp] = np.arange(len(requests))
        """Which rows of the sink the requests are; those that fail at the first hop leave."""
        self._began = Once()
        self._slot = -1
        self._batch: Batch | None = None
        self._names: list[str] = []

    def wait_for_slot(self) -> None:
        priority = self._staged.onward.priority
        self._staged.stager.slots.take(priority, self._began, self._start)

    def give_up(self, cause: TentError, status: Status) -> None:
        """End it, if it has not begun."""
        if self._began.take():
            tries = (Try("staging", cause, 0.0),)
            self._sink.settle_failed(self._rows, status, None, tries)
            self._staged.ended()

    def cancel(self) -> None:
        batch = self._batch
        if batch is not None:
            batch.cancel()

    def _start(self, slot: int) -> None:
        self._slot = slot
        # Not in the thread that gave the slot back: it may be a transport's.
        self._staged.engine.dispatcher.later(lambda: self._hop(first=True))

    def _hop(self, *, first: bool) -> None:
        writing = self._requests.opcode is Opcode.WRITE
        try:
            if self._staged.is_cancelled():
                raise TransferCanceled("it was cancelled before it ended")
            hop, options = self._inside() if first is writing else self._onward()
            batch = self._batch = hop.start(options, False)
        except Exception as error:
            status = Status.CANCELED if isinstance(error, TransferCanceled) else Status.FAILED
            self._fail(self._rows, status, (Try("staging", error, 0.0),))
            self._end()
            return
        if self._staged.is_cancelled():  # by somebody who came before there was a batch
            batch.cancel()
        batch.add_done_callback(
            lambda done: self._staged.engine.dispatcher.later(lambda: self._hopped(done, first))
        )

    def _hopped(self, batch: Batch, first: bool) -> None:
        """A hop has ended: go on with what has made it."""
        self._names.append(" ".join(batch.transports()))
        for failed in batch.failures:
            there = np.arange(len(batch)) if failed.rows is None else failed.rows
            status = Status(int(batch.status[there[0]]))
            moved = np.zeros(len(there), np.uint64) if first else batch.moved[there]
            self._fail(self._rows[there], status, failed.tries, moved)
        done = np.flatnonzero(batch.status == Status.COMPLETED)
        if first and len(done):
            if len(done) < len(self._rows):
                self._requests, self._rows = subset(self._requests, done), self._rows[done]
            self._hop(first=False)
            return
        if len(done):
            names = self._names if self._requests.opcode is Opcode.WRITE else self._names[::-1]
            moved = batch.moved[done]
            self._sink.settle(self._rows[done], Status.COMPLETED, moved, "+".join(names))
        self._end()

    def _fail(
        self,
        rows: NDArray[np.intp],
        status: Status,
        tries: tuple[Try, ...],
        moved: NDArray[np.uint64] | None = None,
    ) -> None:
        self._sink.settle_failed(rows, status, moved, tries)

    def _end(self) -> None:
        self._batch = None
        self._staged.stager.slots.give_back(self._slot)
        self._staged.ended()

    def _inside(self) -> tuple[Checked, Options]:
        """The hop between the local memory and the slot: to this engine's own segment."""
        _, segment, slots = self._staged.stager.here
        r = self._requests
        hop = self._requests_of(r.local, self._in_slot(), r.local_ids, self._ids(slots.id))
        hop.remote_used, hop.remote_generations = (slots.id,), {slots.id: slots.generation}
        hop.local_used = r.local_used
        return Checked(segment, [(hop, None)], self._local(), (slots,)), self._staged.inside

    def _onward(self) -> tuple[Checked, Options]:
        """The hop between the slot and the peer."""
        staged = self._staged
        memory, _, _ = staged.stager.here
        r = self._requests
        hop = self._requests_of(self._in_slot(), r.remote, self._ids(memory.id), r.remote_ids)
        hop.local_used = (memory.id,)
        hop.remote_used, hop.remote_generations = r.remote_used, r.remote_generations
        there = Segment(staged.engine, staged.peer)
        return Checked(there, [(hop, None)], (memory,), self._remote()), staged.onward

    def _requests_of(self, local: Any, remote: Any, local_ids: Any, remote_ids: Any) -> Requests:
        r = self._requests
        return Requests(r.opcode, local, remote, local_ids, remote_ids, (), (), {}, r.total)

    def _in_slot(self) -> NDArray[np.uint64]:
        return self._staged.stager.rows(self._slot, self._requests.local[:, 1])

    def _ids(self, number: int) -> NDArray[np.int32]:
        return np.full(len(self._requests), number, np.int32)

    def _local(self) -> tuple[Buffer, ...]:
        known = {buffer.id: buffer for buffer in self._staged.engine.buffers()}
        return tuple(_the(known, i) for i in self._requests.local_used)

    def _remote(self) -> tuple[RemoteBuffer, ...]:
        known = {buffer.id: buffer for buffer in self._staged.peer.buffers()}
        r = self._requests
        found = tuple(_the(known, i) for i in r.remote_used)
        for buffer in found:
            if buffer.generation != r.remote_generations[buffer.id]:
                raise buffer.gone()
        return found


def _the(known: dict[int, Any], number: int) -> Any:
    if number not in known:
        raise StaleHandle(f"buffer {number} was taken away while it was being staged")
    return known[number]
