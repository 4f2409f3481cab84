"""Notifications on their way to one peer: in order, numbered, sent again until taken or out of time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tent_core.control import tent_pb2 as pb
from tent_core.errors import TentError, WaitTimeout

BATCH_BYTES = 1 << 20
BATCH_NOTES = 256
NOTE_BYTES = 16
"""More than its number, and a NotifyRequest around it, add to a note."""
FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.05


class Undelivered(Exception):
    """A delivery got no answer: whether it arrived is unknown, and it may be sent again."""


class Rejected(Exception):
    """The peer called a delivery malformed: it will never be taken."""


Outcome = concurrent.futures.Future[None]


@dataclass(eq=False, slots=True)
class _Note:
    message: pb.Notification
    deadline: float
    done: asyncio.Future[None] | Outcome
    size: int = field(init=False)
    sequence: int = 0  # given when it is first sent
    full: bool = False  # so the peer said when it last answered
    unanswered: bool = False
    timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.size = self.message.ByteSize() + NOTE_BYTES

    def end(self, error: TentError | None = None) -> None:
        """Its outcome, once; whoever posted it may have given it up in another thread."""
        if self.timer is not None:
            self.timer.cancel()
        with contextlib.suppress(asyncio.InvalidStateError, concurrent.futures.InvalidStateError):
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)

    def trouble(self) -> str:
        """What has kept it from being taken."""
        said = (
            "its queue of notifications was full, and it has to take some"
            if self.full
            else "it is unreachable"
        )
        unknown = "; whether the last try arrived is unknown" if self.unanswered else ""
        return (said if self.sequence else "others wait before it") + unknown


Deliver = Callable[[list[pb.Notification], float], Awaitable[pb.NotifyResponse.Taken]]


class Outbox:
    """One peer's queue. One delivery is under way at a time, with all that fits. For the control thread.

    A number is never used again: a note that is given up after it was sent leaves a gap, and the peer
    takes a late copy of it for a duplicate. So order holds, and nothing arrives twice.
    """

    def __init__(
        self,
        peer: str,
        deliver: Deliver,
        spawn: Callable[..., asyncio.Task[None]],
        room: Callable[[], int] = lambda: BATCH_BYTES,
    ) -> None:
        """`room()` says how many bytes the next delivery may have; one note goes in any case."""
        self._peer = peer
        self._deliver = deliver
        self._spawn = spawn
        self._room = room
        self._queue: deque[_Note] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._sequence = 0

    async def put(self, name: str, payload: bytes, within: float) -> None:
        """Queue one and wait until the peer has taken it. Raises WaitTimeout, or what `fail` is given."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        message = pb.Notification(name=name, payload=payload)
        note = self._queued(_Note(message, loop.time() + within, done))
        try:
            async with asyncio.timeout_at(note.deadline):
                await asyncio.shield(done)
        except TimeoutError:
            raise self._too_late(note, f"within {within:g} s") from None
        finally:
            done.cancel()  # whoever gave up is not delivered to any more

    def post(self, message: pb.Notification, deadline: float, outcome: Outcome) -> None:
        """Queue one and return; `outcome` ends when the peer has taken it, or with what `put` would raise.

        `deadline` is on the loop's clock. Whoever cancels `outcome` has given it up.
        """
        note = _Note(message, deadline, outcome)
        note.timer = asyncio.get_running_loop().call_at(deadline, self._expire, note)
        self._queued(note)

    def _queued(self, note: _Note) -> _Note:
        self._queue.append(note)
        if self._pump is None:
            self._pump = self._spawn(self._run(), f"notify {self._peer}")
        return note

    def _expire(self, note: _Note) -> None:
        note.end(self._too_late(note, "by its deadline"))

    def _too_late(self, note: _Note, when: str) -> WaitTimeout:
        name = note.message.name
        return WaitTimeout(
            f"notification {name!r} was not taken by {self._peer} {when}: {note.trouble()}"
        )

    def fail(self, error: TentError) -> None:
        """The peer takes no more: end all that wait with `error`."""
        notes = list(self._queue)
        self._queue.clear()
        for note in notes:
            if not note.done.done():
                note.end(error)
        if self._pump is not None:
            self._pump.cancel()

    def release(self) -> None:
        """Refer to nothing; after `fail`."""
        self._deliver = _undeliverable
        self._room = int

    async def _run(self) -> None:
        try:
            pause = FIRST_PAUSE_S
            while batch := self._batch():
                before = self._taken(batch)
                troubled = await self._send(batch)
                if troubled and self._taken(batch) == before:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_S)
                else:
                    pause = FIRST_PAUSE_S
        finally:
            self._pump = None

    def _batch(self) -> list[_Note]:
        """The oldest notes that somebody still waits for; their numbers are given here."""
        while self._queue and self._queue[0].done.done():
            self._queue.popleft()
        batch: list[_Note] = []
        size, room = 0, self._room()
        for note in self._queue:
            if note.done.done():
                continue
            size += note.size
            if batch and (size > room or len(batch) == BATCH_NOTES):
                break
            if not note.sequence:
                self._sequence += 1
                note.sequence = note.message.sequence = self._sequence
            batch.append(note)
        return batch

    async def _send(self, batch: list[_Note]) -> bool:
        messages = [note.message for note in batch]
        for note in batch:
            note.unanswered = True
        try:
            taken = await self._deliver(messages, max(n.deadline for n in batch))
        except Undelivered:
            return True
        except Rejected as error:
            for note in batch:
                if not note.done.done():
                    note.end(TentError(f"{self._peer} rejected the notification: {error}"))
            return False
        for note in batch:
            note.unanswered = False
            note.full = taken.full
            if note.sequence <= taken.through and not note.done.done():
                note.end()
        return taken.full

    @staticmethod
    def _taken(batch: list[_Note]) -> int:
        return sum(note.done.done() for note in batch)


async def _undeliverable(notes: list[pb.Notification], deadline: float) -> pb.NotifyResponse.Taken:
    raise Undelivered
