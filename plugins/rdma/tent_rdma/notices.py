"""Notifications by queue pair: one channel between an endpoint here and one of a peer.

A channel has a queue pair of its own, a buffer of slots to send from and one to receive into, each one piece
of memory with one registration. It is made when the first notification needs it and not before. Either side
may then send: a request, which the other side's engine answers.

    initiator                                  passive side
    prepare() -> Ready  --- bootstrap --->     prepare(); connect(route to the initiator)
    connect(route)      <--- Ready ------      all of its slots are posted
    exchange() from now on                     exchange() from the first message on

`prepare` posts every receive, so that each side is told to go only when the other one can take what it sends;
the passive side waits for a message since the initiator may be a moment behind.

Work requests carry their slot as `wr_id`: receives 0 to SLOTS - 1, sends SLOTS + slot. A receive slot is
posted again when its request has been answered, so a peer has at most SLOTS of them under way; the rest waits
at its side. A send slot is free again when its send has completed. If none is free, or the peer does not
answer, nothing waits here: the engine sends the notification by its control plane.

Teardown: the queue pair to ERR, what is outstanding drained, the queue pair destroyed, then the registrations
closed, then the memory unmapped. If one of these fails, what comes after it is kept (a device may still write
to the memory), and `close` may be asked again: see `Remains`.
"""

from __future__ import annotations

import contextlib
import enum
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from tent_core.errors import TransportError
from tent_rdma.notice_queue import NoticeQueue, NoticeQueues
from tent_rdma.slots import PAYLOAD_LIMIT, SLOTS, Kind, Message, Slots
from tent_rdma.verbs import (
    STATUS_NAMES,
    SUCCESS,
    Completion,
    Device,
    QueuePair,
    Registration,
    Route,
    VerbsError,
)
from tent_rdma.wire import Ready

ANSWER_S = 5.0
"""How long an answer is waited for. The engine gives up much sooner; this is when the memory of it ends."""

REASON_BYTES = 1000
"""Of a refusal, in UTF-8."""


class Busy(TransportError):
    """Every slot is under way to the peer: the channel is well, and there will be room again."""


class State(enum.IntEnum):
    """Of a channel; one way only."""

    NEW = 0
    PREPARED = 1
    """Queue pair, memory and receives are there; the other end is not known."""
    CONNECTED = 2
    """The passive side, before the first message."""
    READY = 3
    BROKEN = 4
    CLOSED = 5


class NoticeChannel:
    """One end of a channel. Thread-safe; `_lock` is a leaf but for the verbs that post.

    `completed` comes from one thread. `prepare` and `close` wait, and are for a worker; one call at a time
    of each, which the channel sees to. No callback is called with a lock held.
    """

    def __init__(
        self,
        device: Device,
        port: int,
        queues: NoticeQueues,
        notified: Callable[[bytes], bytes],
        later: Callable[[Callable[[], None]], None],
        failed: Callable[[NoticeChannel, TransportError], None],
        *,
        passive: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes nothing yet.

        - `notified(message)`: the engine's answer; may wait a little, and raises TransportError to refuse.
        - `later(call)`: run that in a thread where it may wait; not the one of `completed`.
        - `failed(self, cause)`: it broke by itself, and is to be closed from a thread that may wait.
        """
        self.passive = passive
        self.state = State.NEW
        self._device = device
        self._port = port
        self._queues = queues
        self._notified = notified
        self._later = later
        self._failed = failed
        self._clock = clock
        self._lock = threading.Lock()
        self._drained = threading.Condition(self._lock)
        self._turn = threading.Lock()
        self._outstanding = 0
        self._free: list[int] = []
        self._waiting: dict[int, tuple[float, Future[bytes]]] = {}
        self._last_id = 0
        self._psn = secrets.randbits(24)
        # What was made, in the order of `prepare`; None is not made, or gone again.
        self._queue: NoticeQueue | None = None
        self._memory: dict[str, Slots] = {}
        self._registrations: dict[str, Registration] = {}
        self._queue_pair: QueuePair | None = None

    # ---------------------------------------------------------------- made

    def prepare(self) -> Ready:
        """Make all of it and post every receive; what the other end has to know.

        Raises VerbsError (of memory above all) or OSError, and then what was made is gone again, unless
        undoing it failed as well: `held` says so, and `close` tries again.
        """
        with self._turn:
            if self.state is not State.NEW:
                raise TransportError(
                    f"a notification channel is prepared once; it is {self.state.name}"
                )
            try:
                return self._prepare()
            except BaseException:
                self._close(0.0)
                raise

    def _prepare(self) -> Ready:
        self._queue = self._queues.take()
        for what in ("receive", "send"):
            memory = self._memory[what] = Slots()
            self._registrations[what] = self._device.register(
                memory.start, memory.length, remote_read=False, remote_write=False
            )
        queue_pair = self._queue_pair = self._device.queue_pair(
            self._port,
            self._queue.queue,
            self._queue.queue,
            send_depth=SLOTS,
            receive_depth=SLOTS,
            remote_read=False,
            remote_write=False,
        )
        self._queue.add(queue_pair.number, self)
        with self._lock:
            for slot in range(SLOTS):
                self._post_receive(slot)
            self._free = list(range(SLOTS))
        self._advance(State.NEW, State.PREPARED)
        return Ready(number=queue_pair.number, psn=self._psn)

    def connect(self, route: Route) -> None:
        """The other end is known, and has posted its receives. Raises VerbsError; close it then."""
        if self._queue_pair is None or self.state is not State.PREPARED:
            raise TransportError(
                f"a notification channel that is {self.state.name} cannot be connected"
            )
        if self.passive:  # first, since a message may come before the call returns
            self._advance(State.PREPARED, State.CONNECTED)
        self._queue_pair.connect(route, self._psn)
        if not self.passive:
            self._advance(State.PREPARED, State.READY)

    def _advance(self, old: State, new: State) -> None:
        with self._lock:
            if self.state is old:
                self.state = new

    # ---------------------------------------------------------------- used

    @property
    def ready(self) -> bool:
        """Whether `exchange` may be called."""
        return self.state is State.READY

    def exchange(self, message: bytes) -> Future[bytes]:
        """Send a request; its answer. Never waits.

        Raises TransportError, or the future fails with it: not ready, no free slot (Busy), refused at the
        other side, broken, no answer within ANSWER_S (seen at the next call). It cannot be cancelled.
        """
        future: Future[bytes] = Future()
        future.set_running_or_notify_cancel()  # so that nobody can cancel what a completion will answer
        now = self._clock()
        with self._lock:
            late = self._take_late(now)
            self._last_id += 1
            id = self._last_id
            self._waiting[id] = now, future
        for given_up in late:
            given_up.set_exception(TransportError(f"no answer within {ANSWER_S:g} s"))
        try:
            self._send(Kind.REQUEST, id, message)
        except BaseException:
            with self._lock:
                if self._waiting.pop(id, None) is None:
                    return future  # it broke in the same moment, and the future says so
            raise
        return future

    def completed(self, completion: Completion) -> None:
        """A work request of its queue pair has ended."""
        try:
            message = self._take(completion)
        except TransportError as error:
            self.fail(error)
            return
        if message is None:
            return
        slot = completion.wr_id
        if message.kind is Kind.REQUEST:
            self._later(partial(self._answer, slot, message))
            return
        self._receive_again(slot)
        with self._lock:
            _, future = self._waiting.pop(message.id, (0.0, None))
        if future is None:
            return  # it was given up
        if message.kind is Kind.ANSWER:
            future.set_result(message.payload)
        else:
            why = message.payload.decode(errors="replace")
            future.set_exception(TransportError(f"the peer refused a notification: {why}"))

    def _take(self, completion: Completion) -> Message | None:
        """Account for a completion; the message that it brings, if any. Raises TransportError when it or the
        message is bad."""
        slot, status = completion.wr_id, completion.status
        with self._lock:
            self._outstanding -= 1
            if not self._outstanding:
                self._drained.notify_all()
            if self.state >= State.BROKEN:
                return None  # nobody cares any more; the memory may be gone as well
            if status != SUCCESS:
                name = STATUS_NAMES[status] if status < len(STATUS_NAMES) else str(status)
                raise TransportError(f"a notification failed: {name}")
            if slot >= SLOTS:
                self._free.append(slot - SLOTS)
                return None
            if self.state is State.CONNECTED:
                self.state = State.READY
            return self._memory["receive"].decode(slot, completion.length)

    def _answer(self, slot: int, message: Message) -> None:
        kind = Kind.ANSWER
        try:
            payload = self._notified(message.payload)
            if len(payload) > PAYLOAD_LIMIT:
                raise TransportError(f"an answer of {len(payload)} bytes, beyond {PAYLOAD_LIMIT}")
        except Exception as error:
            kind, payload = Kind.REFUSAL, (str(error) or repr(error)).encode()[:REASON_BYTES]
        self._receive_again(slot)
        with contextlib.suppress(
            TransportError
        ):  # no slot, or broken: the peer waits no longer than it waits
            self._send(kind, message.id, payload)

    def _send(self, kind: Kind, id: int, payload: bytes) -> None:
        with self._lock:
            if self.state is not State.READY or self._queue_pair is None:
                raise TransportError(f"the notification channel is {self.state.name.lower()}")
            if not self._free:
                raise Busy(f"all {SLOTS} slots for notifications are under way to the peer")
            slot, memory = self._free.pop(), self._memory["send"]
            try:
                size = memory.encode(slot, kind, id, payload)
                lkey = self._registrations["send"].lkey
                self._queue_pair.post_send(SLOTS + slot, memory.address(slot), lkey, size)
            except BaseException:
                self._free.append(slot)
                raise
            self._outstanding += 1

    def _receive_again(self, slot: int) -> None:
        try:
            with self._lock:
                if self.state < State.BROKEN:
                    self._post_receive(slot)
        except VerbsError as error:
            self.fail(error)

    def _post_receive(self, slot: int) -> None:
        """With the lock held."""
        memory, lkey = self._memory["receive"], self._registrations["receive"].lkey
        assert self._queue_pair is not None
        length = memory.length // memory.count
        self._queue_pair.post_receive(slot, memory.address(slot), lkey, length)
        self._outstanding += 1

    def _take_late(self, now: float) -> list[Future[bytes]]:
        """With the lock held: who has waited too long."""
        late = []
        for id, (since, future) in list(self._waiting.items()):
            if now - since < ANSWER_S:
                break  # they are in the order of their times
            late.append(future)
            del self._waiting[id]
        return late

    # ---------------------------------------------------------------- ended

    def fail(self, cause: TransportError) -> None:
        """It is of no use any more: end all that wait. Once; the owner is told, and closes it."""
        if self._break(cause):
            self._failed(self, cause)

    def _break(self, cause: TransportError) -> bool:
        with self._lock:
            if self.state >= State.BROKEN:
                return False
            self.state = State.BROKEN
            waiting, self._waiting = self._waiting, {}
            queue_pair = self._queue_pair
        if queue_pair is not None:
            with contextlib.suppress(VerbsError):  # destroying it ends what is outstanding as well
                queue_pair.to_error()
        for _, future in waiting.values():
            future.set_exception(cause)
        return True

    @property
    def held(self) -> int:
        """How many things of it are still there: queue pair, registrations, buffers."""
        return (self._queue_pair is not None) + len(self._registrations) + len(self._memory)

    def close(self, timeout: float) -> bool:
        """End it, waiting up to `timeout` seconds for what is outstanding; whether nothing of it is left.

        Idempotent. Where something is left, it is kept and may be asked for again.
        """
        with self._turn:
            return self._close(timeout)

    def _close(self, timeout: float) -> bool:
        self._break(TransportError("the notification channel was closed"))
        with contextlib.suppress(VerbsError):
            self._destroy(timeout)
        if self._queue_pair is None:
            for what, registration in list(self._registrations.items()):
                with contextlib.suppress(VerbsError):
                    registration.close()
                    del self._registrations[what]
            with self._lock:  # a completion may be being looked at
                for what, memory in list(self._memory.items()):
                    if what not in self._registrations:
                        memory.close()
                        del self._memory[what]
        self.state = State.CLOSED
        return not self.held

    def _destroy(self, timeout: float) -> None:
        """The queue pair, then its place in the completion queue, which may be needed until it is gone."""
        queue = self._queue
        if self._queue_pair is not None and queue is not None:
            with self._lock:
                self._drained.wait_for(lambda: not self._outstanding, timeout)
            number = self._queue_pair.number
            self._queue_pair.close()
            queue.discard(number, self)
            self._queue_pair = None
        if queue is not None:
            self._queue = None
            self._queues.give(queue)


class Remains:
    """Channels of which something could not be given back: kept alive, and tried again. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: list[NoticeChannel] = []

    def __len__(self) -> int:
        return len(self._channels)

    def close(self, channel: NoticeChannel, timeout: float) -> None:
        """Close a channel, and keep what is left of it."""
        if not channel.close(timeout):
            with self._lock:
                self._channels.append(channel)

    def keep(self, channel: NoticeChannel) -> None:
        """A channel whose `prepare` failed: keep it if something of it is left."""
        if channel.held:
            with self._lock:
                self._channels.append(channel)

    def try_again(self) -> bool:
        """Whether nothing is left. To be asked when resources are needed, and when the transport stops."""
        with self._lock:
            channels, self._channels = self._channels, []
        left = [channel for channel in channels if not channel.close(0.0)]
        with self._lock:
            self._channels += left
            return not self._channels


class Patience:
    """How long to leave alone what failed: `first` seconds, twice as long each time, up to `longest`."""

    def __init__(self, first: float = 1.0, longest: float = 60.0) -> None:
        self._first, self._longest = first, longest
        self._pause = 0.0
        self._until = 0.0

    def over(self, now: float) -> bool:
        """Whether it may be tried."""
        return now >= self._until

    def failed(self, now: float) -> None:
        """It was tried in vain."""
        self._pause = min(2 * self._pause or self._first, self._longest)
        self._until = now + self._pause

    def worked(self) -> None:
        """It was not in vain."""
        self._pause = self._until = 0.0
