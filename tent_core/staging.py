"""Data that no transport moves between two memories directly goes through host memory, here or at the peer.

Requests are cut into chunks. Each takes a slot of a pool at the side, or sides, where it is staged, makes its
hops one after another, and gives the slots back; so one chunk is copied while another is on the wire. The hop
between the local memory and a slot here, and the one between here and the peer, are ordinary batches of this
engine; the former goes to its own segment, which it opens like any other, and of it the peer knows nothing.
The hop between a slot at the peer and its memory the peer makes when it is asked to (`lending.py`).
"""

from __future__ import annotations

import heapq
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tent_core import lending
from tent_core.batch import Batch, Options, Rows, Try
from tent_core.checked import Checked
from tent_core.columns import subset
from tent_core.errors import (
    DeadlinePassed,
    OutcomeUnknown,
    StaleHandle,
    TentError,
    TransferCanceled,
    TransportError,
)
from tent_core.lending import CHANNEL, Copy, Lender
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
    from tent_core.endpoints import Endpoints
    from tent_core.engine import Engine
    from tent_core.peers import LivePeer

PEER_COPY_S = 10.0
"""How long a peer may take for the copy of one chunk."""
LATE_S = 1.0
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


class Borrowed(NamedTuple):
    """Memory at a peer to stage in: a buffer of `slots`, each of `size` bytes, which are ours to use."""

    buffer: RemoteBuffer
    slots: Slots
    size: int


class Stager:
    """The staging of one engine. Its memory is made, and its own segment opened, at the first use."""

    def __init__(self, engine: Engine, buffers: int, chunk: int, lent: int) -> None:
        self._engine = engine
        self.buffers = buffers
        self.chunk = chunk
        self.slots = Slots(buffers)
        self._lock = threading.Lock()
        self._memory: Buffer | None = None
        self._segment: Segment | None = None
        self._borrowed: weakref.WeakKeyDictionary[LivePeer, Borrowed] = weakref.WeakKeyDictionary()
        self._aside: list[tuple[Endpoints, int, int]] = []
        self.lender = Lender(engine, buffers * chunk, lent, self.own_segment)
        self.channel = CHANNEL

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

    def ready(
        self, peer: LivePeer, here: bool, there: bool, go: Callable[[TentError | None], None]
    ) -> None:
        """`go(None)` once there is memory at the sides where it is needed, and a way to it, or `go(error)`;
        perhaps in another thread."""
        if (not here or self._has_own()) and (not there or self.lent_by(peer) is not None):
            go(None)
        else:
            self._engine.dispatcher.patiently(lambda: go(self._prepared(peer, here, there)))

    def _has_own(self) -> bool:
        return (
            self._memory is not None
            and self._segment is not None
            and self._segment.peer.departed is None
        )

    def _prepared(self, peer: LivePeer, here: bool, there: bool) -> TentError | None:
        try:
            if here:
                self._make()
            if there and self.lent_by(peer) is None:
                self._borrow(peer)
        except TentError as error:
            return error
        return None

    def own_segment(self) -> Segment:
        """This engine's own segment. Waits the first time."""
        with self._lock:  # held for one call to ourselves: others need its outcome as well
            if self._segment is None or self._segment.peer.departed is not None:
                self._segment = self._engine.open_segment(self._engine.segment_name)
            return self._segment

    def _make(self) -> None:
        with self._lock:
            if self._memory is None:
                self._memory = self._engine.allocate(
                    self.buffers * self.chunk,
                    HOST_MEMORY,
                    name=BUFFER,
                    permission=Permission.GLOBAL_READ_WRITE,
                )
        self.own_segment().buffer(BUFFER)

    def lent_by(self, peer: LivePeer) -> Borrowed | None:
        """What the peer lends, as long as it does."""
        known = self._borrowed.get(peer)
        if known is None or peer.find(known.buffer.name) is not known.buffer:
            return None
        return known

    def _borrow(self, peer: LivePeer) -> None:
        """Ask the peer for memory, and wait for it."""
        timeout = self._engine.call_timeout(None)
        peer.begin(timeout)
        try:
            answer = peer.connection.bootstrap(CHANNEL, 0, lending.ask(self.chunk), timeout)
            lent = lending.read_lent(answer)
            buffer = _lent(peer, lent)
            if buffer is None:
                peer.connection.refresh(timeout)
                buffer = _lent(peer, lent)
        finally:
            peer.end()
        if buffer is None or lent.size != self.chunk:
            raise TransportError(f"what peer {peer.key} lends to stage in is not there")
        self._borrowed[peer] = Borrowed(buffer, Slots(lent.slots), lent.size)

    @property
    def has_aside(self) -> bool:
        """Whether slots are set aside."""
        return bool(self._aside)

    def set_aside(self, peer: LivePeer, number: int) -> None:
        """Do not lend this slot before the connections to the peer have been closed: something that failed
        may still take data from it."""
        with self._lock:
            self._aside.append((peer.endpoints, peer.endpoints.closed, number))

    def reclaim(self) -> None:
        """Lend again what was set aside for connections that have been closed since."""
        with self._lock:
            over = [entry for entry in self._aside if entry[0].closed > entry[1]]
            self._aside = [entry for entry in self._aside if entry not in over]
        for _, _, slot in over:
            self.slots.give_back(slot)

    @property
    def here(self) -> tuple[Buffer, Segment, RemoteBuffer]:
        """The memory, this engine's own segment, and the memory as seen through it."""
        memory, segment = self._memory, self._segment
        if memory is None or segment is None:
            raise TransportError("there is no memory to stage in")
        return memory, segment, segment.buffer(BUFFER)

    def rows(
        self, memory: Buffer | RemoteBuffer, number: int, lengths: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        """Addresses and lengths of ranges that follow one another in a slot of `memory`."""
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
        route = selection.route
        assert selection.entry is not None
        assert route is not None
        self.here, self.there = bool(route.copies), route.at_peer
        self.engine = engine
        self.stager = stager
        self.peer = peer
        self.deadline = deadline
        self._cancelled = False
        self.given_up: tuple[TentError, Status] | None = None
        """Why, and as what, everything ends that still waits for memory."""
        here = replace(
            options, timeout=float("inf"), deadline=deadline, transport=None, note=None, part=True
        )
        # A write that was left behind would take from a slot that has other data by then.
        here = replace(here, retry_unfenced=False)
        self.inside = replace(here, policy=None, intent=Intent.STAGING_INTERNAL)
        self.onward = replace(here, policy=selection.entry.name, transport=options.transport)
        # A part is less than twice as large as its pieces may be.
        pieces, spans = parts(requests, stager.chunk // 2)
        whole = PartsSink(sink, rows, pieces)
        self._chunks = [
            Chunk(self, part(requests, pieces, start, stop), whole.part(start, stop))
            for begin, end in spans
            for start, stop in _short(begin, end)
        ]
        self._left = len(self._chunks)
        self._lock = threading.Lock()
        self._alarm: Handle | None = None

    def run(self) -> None:
        """Set all chunks going; never waits."""
        self._alarm = self.engine.dispatcher.alarm.at(self.deadline, self._late)
        if self.stager.has_aside:
            self.stager.reclaim()
        self.stager.ready(self.peer, self.here, self.there, self._begin)

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
        self.given_up = (cause, status)
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
    """What goes through its slots at once: waits for them, makes one hop after another with what is left."""

    def __init__(self, staged: Staged, requests: Requests, sink: Part) -> None:
        self._staged = staged
        self._requests = requests
        self._sink = sink
        self._rows: NDArray[np.intp] = np.arange(len(requests))
        """Which rows of the sink the requests are; those that fail at a hop leave."""
        self._began = Once()
        self._slot: int | None = None
        self._borrowed: Borrowed | None = None
        self._their_slot: int | None = None
        self._unknown = False
        """Whether a hop that failed may still use the slots."""
        self._batch: Batch | None = None
        self._names: list[str] = []
        hops = [self._inside] if staged.here else []
        hops.append(self._onward)
        if staged.there:
            hops.append(self._ask_peer)
        self._hops = hops if requests.opcode is Opcode.WRITE else hops[::-1]
        self._at = 0

    def wait_for_slot(self) -> None:
        """Begin when there is a slot at each side where one is needed."""
        slots = self._staged.stager.slots if self._staged.here else self._their_slots()
        if slots is not None:
            slots.take(self._staged.onward.priority, self._began, self._start)

    def _their_slots(self) -> Slots | None:
        self._borrowed = self._staged.stager.lent_by(self._staged.peer)
        if self._borrowed is None:
            self.give_up(TransportError("the peer lends no memory any more"), Status.FAILED)
            return None
        return self._borrowed.slots

    def give_up(self, cause: TentError, status: Status) -> None:
        """End it, if it has not begun."""
        if self._began.take():
            self._fail(self._rows, status, (Try("staging", cause, 0.0),))
            self._end()

    def cancel(self) -> None:
        """Interrupt the hop that is under way."""
        batch = self._batch
        if batch is not None:
            batch.cancel()

    def _start(self, slot: int) -> None:
        staged = self._staged
        if not staged.here:
            self._their_slot = slot
        elif staged.there:
            self._slot = slot
            self._began = Once()  # for the second of the two
            slots = self._their_slots()
            if slots is not None:
                slots.take(staged.onward.priority, self._began, self._start_there)
            if staged.given_up is not None:  # between the two
                self.give_up(*staged.given_up)
            return
        else:
            self._slot = slot
        # Not in the thread that gave the slot back: it may be a transport's.
        staged.engine.dispatcher.later(self._hop)

    def _start_there(self, slot: int) -> None:
        self._their_slot = slot
        self._staged.engine.dispatcher.later(self._hop)

    def _hop(self) -> None:
        try:
            if self._staged.is_cancelled():
                raise TransferCanceled("it was cancelled before it ended")
            if self._staged.engine.dispatcher.now() >= self._staged.deadline:
                raise DeadlinePassed("its deadline passed while it was staged")
            self._hops[self._at]()
        except Exception as error:
            status = Status.FAILED
            if isinstance(error, TransferCanceled | DeadlinePassed):
                canceled = isinstance(error, TransferCanceled)
                status = Status.CANCELED if canceled else Status.TIMEOUT
            self._fail(self._rows, status, (Try("staging", error, 0.0),))
            self._end()

    def _carry(self, hop: Checked, options: Options) -> None:
        """Make a hop as a batch of this engine."""
        batch = self._batch = hop.start(options, False)
        if self._staged.is_cancelled():  # by somebody who came before there was a batch
            batch.cancel()
        later = self._staged.engine.dispatcher.later
        batch.add_done_callback(lambda done: later(lambda: self._carried(done)))

    def _carried(self, batch: Batch) -> None:
        """A hop that was a batch has ended."""
        last = self._at == len(self._hops) - 1
        for failed in batch.failures:
            there = np.arange(len(batch)) if failed.rows is None else failed.rows
            status = Status(int(batch.status[there[0]]))
            moved = batch.moved[there] if last else np.zeros(len(there), np.uint64)
            self._fail(self._rows[there], status, failed.tries, moved)
            self._unknown |= bool(failed.tries) and isinstance(
                failed.tries[-1].cause, OutcomeUnknown
            )
        names = " ".join(batch.transports())
        self._hopped(np.flatnonzero(batch.status == Status.COMPLETED), names)

    def _hopped(self, done: NDArray[np.intp], name: str) -> None:
        """Go on with the rows that have made a hop."""
        self._names.append(name)
        self._at += 1
        if len(done) and len(done) < len(self._rows):
            self._requests, self._rows = subset(self._requests, done), self._rows[done]
        if not len(done):
            self._end()
        elif self._at < len(self._hops):
            self._hop()
        else:
            names = self._names if self._requests.opcode is Opcode.WRITE else self._names[::-1]
            moved = self._requests.local[:, 1]
            self._sink.settle(self._rows, Status.COMPLETED, moved, "+".join(names))
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
        stager, peer = self._staged.stager, self._staged.peer
        slot, self._slot = self._slot, None
        if slot is not None:
            if self._unknown:
                stager.set_aside(peer, slot)
            else:
                stager.slots.give_back(slot)
        # What is set aside at the peer comes back with what it lends next.
        if self._their_slot is not None and self._borrowed is not None and not self._unknown:
            self._borrowed.slots.give_back(self._their_slot)
        self._staged.ended()

    # ---------------------------------------------------------------- hops

    def _ask_peer(self) -> None:
        """The hop between the slot at the peer and its memory, which the peer makes."""
        staged, r = self._staged, self._requests
        assert self._their_slot is not None
        dispatcher = staged.engine.dispatcher
        seconds = min(staged.deadline - dispatcher.now(), PEER_COPY_S)
        generations = np.array([r.remote_generations[i] for i in r.remote_ids.tolist()], np.uint64)
        rows = np.column_stack((r.remote_ids.astype(np.uint64), generations, r.remote))
        copy = Copy(r.opcode, staged.onward.priority, self._their_slot, seconds, rows)
        once = Once()

        def over(answer: Future[bytes] | None) -> None:
            if once.take():
                alarm.cancel()
                dispatcher.later(lambda: self._answered(answer, len(rows)))

        # A little later than the peer gives up by itself.
        alarm = dispatcher.alarm.at(dispatcher.now() + seconds + LATE_S, lambda: over(None))
        future = staged.peer.connection.begin_bootstrap(
            CHANNEL, 0, lending.ask_copy(copy), seconds + LATE_S
        )
        future.add_done_callback(over)

    def _answered(self, answer: Future[bytes] | None, n: int) -> None:
        """The peer has copied, or has not, or does not say."""
        peer = self._staged.peer.key
        try:
            if answer is None:
                raise TransportError(f"peer {peer} does not say whether it has copied")
            statuses, why = lending.read_copied(answer.result(0), n)
        except Exception as error:
            # Until the peer has departed it may still be at it.
            self._unknown = True
            cause = TransportError(f"outcome unknown: {error}")
            self._fail(self._rows, Status.FAILED, (Try("peer", cause, 0.0),))
            self._end()
            return
        failed = np.flatnonzero(statuses != Status.COMPLETED)
        if len(failed):
            cause = TransportError(f"the peer could not copy: {why}")
            self._fail(self._rows[failed], Status.FAILED, (Try("peer", cause, 0.0),))
        self._hopped(np.flatnonzero(statuses == Status.COMPLETED), "peer")

    def _inside(self) -> None:
        """The hop between the local memory and the slot here: to this engine's own segment."""
        memory, segment, slots = self._staged.stager.here
        r = self._requests
        hop = self._requests_of(
            r.local, self._in_slot(memory, self._slot), r.local_ids, self._ids(slots.id)
        )
        hop.remote_used, hop.remote_generations = (slots.id,), {slots.id: slots.generation}
        hop.local_used = r.local_used
        self._carry(Checked(segment, [(hop, None)], self._local(), (slots,)), self._staged.inside)

    def _onward(self) -> None:
        """The hop between what is here and what is at the peer."""
        staged, r = self._staged, self._requests
        local, local_ids, mine = r.local, r.local_ids, self._local
        remote, remote_ids, theirs = r.remote, r.remote_ids, self._remote
        if staged.here:
            memory, _, _ = staged.stager.here
            local, local_ids = self._in_slot(memory, self._slot), self._ids(memory.id)
            mine = lambda: (memory,)  # noqa: E731
        if staged.there:
            assert self._borrowed is not None
            buffer = self._borrowed.buffer
            remote, remote_ids = self._in_slot(buffer, self._their_slot), self._ids(buffer.id)
            theirs = lambda: (buffer,)  # noqa: E731
        here, there = mine(), theirs()
        hop = self._requests_of(local, remote, local_ids, remote_ids)
        hop.local_used = tuple(b.id for b in here)
        hop.remote_used = tuple(b.id for b in there)
        hop.remote_generations = {b.id: b.generation for b in there}
        segment = Segment(staged.engine, staged.peer)
        self._carry(Checked(segment, [(hop, None)], here, there), staged.onward)

    def _requests_of(self, local: Any, remote: Any, local_ids: Any, remote_ids: Any) -> Requests:
        r = self._requests
        return Requests(r.opcode, local, remote, local_ids, remote_ids, (), (), {}, r.total)

    def _in_slot(self, memory: Buffer | RemoteBuffer, slot: int | None) -> NDArray[np.uint64]:
        assert slot is not None
        return self._staged.stager.rows(memory, slot, self._requests.local[:, 1])

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


def _short(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Ranges of so few rows that a message to the peer can name them."""
    for at in range(start, stop, lending.MOST_ROWS):
        yield at, min(stop, at + lending.MOST_ROWS)


def _lent(peer: LivePeer, lent: lending.Lent) -> RemoteBuffer | None:
    return next((b for b in peer.buffers() if b.id == lent.buffer), None)


def _the(known: dict[int, Any], number: int) -> Any:
    if number not in known:
        raise StaleHandle(f"buffer {number} was taken away while it was being staged")
    return known[number]
