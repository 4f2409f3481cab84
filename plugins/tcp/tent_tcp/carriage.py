"""One piece of work on its way over one stream: what is sent next, and what each answer means for it."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tent_core.errors import (
    BufferRevoked,
    PermissionDenied,
    RangeError,
    StaleHandle,
    TransportError,
    UsageError,
)
from tent_core.transport import Peer
from tent_core.types import Opcode, Priority, Status
from tent_core.work import Work
from tent_tcp.messages import Message, messages_of, split
from tent_tcp.patience import Canceled, DeadlinePassed, Patience, StreamBroke, StreamFailed
from tent_tcp.protocol import Verdict
from tent_tcp.streams import Outcome, Stream

CANCELED = "it was cancelled before it ended"

Fence = Callable[[Stream, float, Callable[[str], None]], None]
"""Have a peer confirm that it reads a closed stream no more, until a time on the monotonic clock. What is
given last is called once, in any thread: with "", or with why the peer has not confirmed it."""

MOST_RENEWALS = 3
"""So many streams of one work may break; the next one fails it."""

TURN_S = 2e-3
"""How long one work may keep a thread that carries many."""
LOW_TURN_S = 0.5e-3
"""The same for work of low priority."""

_MISTAKES: dict[Verdict, type[UsageError]] = {
    Verdict.UNKNOWN_BUFFER: StaleHandle,
    Verdict.STALE_BUFFER: StaleHandle,
    Verdict.REVOKED: BufferRevoked,
    Verdict.DENIED: PermissionDenied,
    Verdict.OUT_OF_RANGE: RangeError,
}


class Rest(NamedTuple):
    """What streams that broke have left of a work, and how many of them there were."""

    messages: deque[Iterator[Message]]
    renewals: int

    def fail(self, work: Work, cause: StreamFailed, unfenced: int = 0) -> None:
        """Nobody carries it; the first `unfenced` messages may still be written."""
        for position, message in enumerate(itertools.chain.from_iterable(self.messages)):
            work.fail(
                cause,
                message.start,
                message.stop,
                fenced=position >= unfenced,
                status=status_of(cause),
            )


class Carriage:
    """Carries one work over one stream. One thread at a time, which owns the stream meanwhile."""

    def __init__(self, work: Work, stream: Stream, peer: Peer, rest: Rest | None = None) -> None:
        """`rest` is what another stream left of the work."""
        self.work = work
        self.stream = stream
        stream.work = work
        self._peer = peer
        self.renewals = 0 if rest is None else rest.renewals
        self._messages: deque[Iterator[Message]] = deque(
            [messages_of(work.requests)] if rest is None else rest.messages
        )
        self._next: Message | None = None

    @property
    def finished(self) -> bool:
        """Whether every message has been answered."""
        return not self.stream.waiting and self._peek() is None

    def post_next(self) -> bool:
        """Post the next message if the stream has room for one; whether it did."""
        if not self.stream.has_room(self.work.requests.opcode):
            return False
        message = self._peek()
        if message is None:
            return False
        self._next = None
        self.stream.post(message)
        return True

    def settle(self, outcome: Outcome) -> None:
        """Report what an answer says. Blocks of other buffers than the refused one are sent again."""
        message, answer, text = outcome
        if answer.verdict is Verdict.OK:
            self.work.complete(message.start, message.stop)
            return
        mistake = _MISTAKES.get(answer.verdict)
        if mistake is None:
            cause: Exception = TransportError(
                f"peer {self._peer.key} could not carry it out: {text}"
            )
            self.work.fail(cause, message.start, message.stop)
            return
        ids = self.work.requests.remote_ids[message.start : message.stop]
        culprit = ids[min(answer.position, len(ids) - 1)]
        name, verb = self._name(int(culprit)), _verb(message.opcode)
        cause = mistake(f"peer {self._peer.key} refused {verb} buffer {name}: {text}")
        refused = ids == culprit
        for start, stop, bad in _runs(refused):
            if bad:
                self.work.fail(cause, message.start + start, message.start + stop)
            else:
                again = split(self.work.requests, message.start + start, message.start + stop)
                self._messages.append(again)

    def _name(self, buffer: int) -> str:
        """How to call a buffer of the peer in a message."""
        known = self._peer.segment.buffers.get(buffer)
        if known is None or known.generation != self.work.requests.remote_generations[buffer]:
            return str(buffer)
        return repr(known.name)

    def abandon(self, cause: StreamFailed, fence: Fence, again: Callable[[Rest], None]) -> None:
        """The stream, which is closed now, is of no more use: everything that has no answer fails, or, if
        only the stream is to blame, is given to `again`, for another stream.

        The receiver may go on reading a WRITE of which bytes were sent, so its fate is decided only once
        `fence` has answered whether the peer has confirmed that it does not.
        """
        if isinstance(cause, StreamBroke) and self.renewals < MOST_RENEWALS:
            self._renew(cause, fence, again)
            return
        status = status_of(cause)
        waiting = self.stream.waiting
        count = len(waiting) - self.stream.untouched
        lost: list[Message] = []
        for position, message in enumerate(waiting):
            if message.opcode == Opcode.WRITE and position < count:
                lost.append(message)
            else:
                self.work.fail(cause, message.start, message.stop, status=status)
        while (unsent := self._peek()) is not None:
            self._next = None
            self.work.fail(cause, unsent.start, unsent.stop, status=status)
        if lost:
            self._lose(lost, cause, status, fence)

    def _renew(self, cause: StreamBroke, fence: Fence, again: Callable[[Rest], None]) -> None:
        """Have the rest carried by another stream, or fail it where this one may still write."""
        waiting = list(self.stream.waiting)
        count = len(waiting) - self.stream.untouched
        following = [] if self._next is None else [self._next]
        rest = Rest(deque([iter([*waiting, *following]), *self._messages]), self.renewals + 1)
        if self.work.requests.opcode == Opcode.READ or not count:
            again(rest)
            return

        def report(why_not: str) -> None:
            if not why_not:
                again(rest)
                return
            rest.fail(self.work, StreamFailed(f"{cause}; {why_not}"), unfenced=count)

        fence(self.stream, self.work.expires, report)

    def _lose(self, lost: list[Message], cause: StreamFailed, status: Status, fence: Fence) -> None:
        work = self.work

        def report(why_not: str) -> None:
            why = StreamFailed(f"{cause}; {why_not}") if why_not else cause
            for message in lost:
                work.fail(why, message.start, message.stop, fenced=not why_not, status=status)

        fence(self.stream, work.expires, report)

    def carry(self, patience: Patience) -> None:
        """Drive it to its end, waiting. After StreamFailed it must be abandoned."""
        stream, work = self.stream, self.work
        write = work.requests.opcode == Opcode.WRITE
        if not stream.waiting and not work.cancelled and self._converse(patience.spin_s):
            return
        while True:
            if work.cancelled:
                raise Canceled(CANCELED)
            if self.post_next():
                if write or len(stream.waiting) == 1:
                    stream.push_wait(patience)
                else:
                    stream.push()
            elif stream.waiting:
                if not stream.pushed and len(stream.waiting) == 1:
                    stream.push_wait(patience)
                self.settle(stream.pull_wait(patience))
            else:
                return

    def _converse(self, spin_s: float) -> bool:
        """Whether it was a single short message, and that is done."""
        message = self._peek()
        if message is None or message.short is None:
            return False
        self._next = None
        if not self.stream.converse(message, message.short, spin_s):
            return False
        self.work.progress += message.total
        self.work.complete(message.start, message.stop)
        return self._peek() is None

    def advance(self, spin_s: float, keep_gil: bool) -> bool:
        """Go on as far as it goes without waiting; whether any byte moved. Raises StreamFailed.

        It looks again for up to `spin_s` seconds after the last byte moved, and for at most a turn together.
        For `keep_gil` see `Stream.push`.
        """
        turn_s = LOW_TURN_S if self.work.priority is Priority.LOW else TURN_S
        progress = False
        began = now = time.monotonic()
        until = now + spin_s
        while True:
            while self.post_next():
                pass
            moved = self.stream.push(keep_gil)
            outcome, received = self.stream.pull(keep_gil)
            if outcome is not None:
                self.settle(outcome)
                if self.finished:
                    return True
            now = time.monotonic()
            if moved or received:
                progress, until = True, now + spin_s
            if now >= until or now - began > turn_s:
                return progress

    def _peek(self) -> Message | None:
        while self._next is None and self._messages:
            self._next = next(self._messages[0], None)
            if self._next is None:
                self._messages.popleft()
        return self._next


def status_of(cause: StreamFailed) -> Status:
    """How requests end that a stream could not carry for that cause."""
    if isinstance(cause, DeadlinePassed):
        return Status.TIMEOUT
    return Status.CANCELED if isinstance(cause, Canceled) else Status.FAILED


def _runs(flags: NDArray[np.bool_]) -> Iterator[tuple[int, int, bool]]:
    """Maximal runs of equal flags: start, stop, flag."""
    edges = np.flatnonzero(flags[1:] != flags[:-1]) + 1
    for start, stop in itertools.pairwise([0, *edges.tolist(), len(flags)]):
        yield start, stop, bool(flags[start])


def _verb(opcode: Opcode) -> str:
    return "a write to" if opcode == Opcode.WRITE else "a read of"
