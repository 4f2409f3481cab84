"""One connection to a receiver: made, then used by one thread at a time to send messages and take answers."""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tent_core.types import Opcode
from tent_core.work import Work
from tent_tcp.messages import Message, Short
from tent_tcp.patience import SHORT, TICK_S, Patience, StreamBroke, StreamFailed
from tent_tcp.protocol import ANSWER_SIZE, MAX_TEXT, Answer, Malformed, Verdict, parse_answer
from tent_tcp.syscalls import (
    HOLDING,
    NOW,
    RELEASING,
    WAIT,
    WAIT_ALL,
    MessageHeader,
    sched_yield,
    would_block,
)
from tent_tcp.vectors import WOULD_BLOCK, EndOfStream, Piece, Vector

BOUND = 256 << 10
"""Bytes that one call moves at most while it keeps the GIL: some tens of microseconds."""

_CALLS = 8
"""So many calls `push` and `pull` make at most, so that a fast peer does not keep others waiting."""

_LATE_S = 20e-6
"""A receiver with a processor of its own has answered a short message by then; else it may want this one. To
yield it then made the slowest tenth of 4 KiB writes, beside threads that compute, take 39 us, and not 137."""

_WINDOW = {Opcode.WRITE: 8, Opcode.READ: 2}
"""Messages on their way at once. WRITE: their answers fit into any socket buffer, so sending may wait.
READ: the second keeps the receiver busy; sending it must not wait, since the receiver may wait for us."""


class Outcome(NamedTuple):
    """What became of a message."""

    message: Message
    answer: Answer
    text: str


class Stream:
    """A connection on which messages go out and answers come in, in the order of the messages.

    For one thread at a time, but for `interrupt`. After any exception only `close` may be called.
    `waiting` are the messages that were posted and have no answer yet. `identity` is the random name by which
    the receiver knows it, and `work` whose progress is counted.
    """

    def __init__(self, made: socket.socket, where: str, identity: bytes) -> None:
        self._socket = made
        self.where = where
        self.identity = identity
        self.work: Work | None = None
        self.epoch = 0  # of the pool that it belongs to
        self.used = time.monotonic()
        self.descriptor = made.fileno()
        made.setblocking(True)
        timeout = struct.pack("ll", *divmod(round(TICK_S * 1e6), 1_000_000))  # struct timeval
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._closing = threading.Lock()  # never interrupt a descriptor that was used again
        self.waiting: deque[Message] = deque()
        self._outgoing: deque[tuple[Vector, int]] = deque()
        self._buffer = ctypes.create_string_buffer(ANSWER_SIZE + MAX_TEXT)
        self._address = ctypes.addressof(self._buffer)
        self._answer_bytes = memoryview(self._buffer)[:ANSWER_SIZE]
        self._rest = (ctypes.c_uint64 * 4)()  # iovecs of payload and verdict, for `converse`
        self._rest_header = MessageHeader(pieces=ctypes.addressof(self._rest), count=2)
        self._answer: Answer | None = None
        self._lead = True
        self._incoming: Vector | Piece = Piece(self._address, ANSWER_SIZE)
        self._then: Callable[[], Outcome | None] = self._took_answer

    # ---------------------------------------------------------------- messages

    def has_room(self, opcode: Opcode) -> bool:
        """Whether another message may be posted now."""
        return len(self.waiting) < _WINDOW[opcode]

    def post(self, message: Message) -> None:
        """Queue a message; `push` sends it."""
        self.waiting.append(message)
        self._outgoing.append((message.outgoing(), message.size))

    def converse(self, message: Message, short: Short, spin_s: float) -> bool:
        """Send a short message, and look for its answer for up to `spin_s` seconds after the last byte came.
        Keeps the GIL. For a stream on which nothing waits.

        True: every byte is where it belongs. False: the message is now as after `post`, partly sent and
        answered perhaps: go on with `push_wait` and `pull_wait`. Raises nothing: they do.
        """
        self.waiting.append(message)
        sent = HOLDING.send_message(self.descriptor, short.header, NOW)
        if sent != message.size:
            outgoing = message.outgoing()
            if sent > 0:
                outgoing.advance(sent)
            self._outgoing.append((outgoing, message.size))
            return False
        began = time.monotonic()
        late, until = began + _LATE_S, began + spin_s
        write = message.opcode == Opcode.WRITE
        expected = short.verdict if write else short.lead
        while (got := HOLDING.receive(self.descriptor, self._address, ANSWER_SIZE, NOW)) < 0:
            now = time.monotonic()
            if not would_block() or now >= until:
                return False
            if now >= late:
                sched_yield()
        if got != ANSWER_SIZE or self._answer_bytes.tobytes() != expected:
            self._incoming.advance(got)
            return False
        if not write and not self._take_rest(message, short, spin_s):
            return False
        self.waiting.clear()
        return True

    def _take_rest(self, message: Message, short: Short, spin_s: float) -> bool:
        """Payload and verdict of a short READ whose lead has come: see `converse`."""
        rest, header = self._rest, ctypes.addressof(self._rest_header)
        rest[0], rest[1], rest[2], rest[3] = (
            short.payload,
            message.total,
            self._address,
            ANSWER_SIZE,
        )
        until = 0.0
        while rest[3]:
            got = HOLDING.receive_message(self.descriptor, header, NOW)
            if got > 0:
                payload = min(got, rest[1])
                rest[0] += payload
                rest[1] -= payload
                rest[2] += got - payload
                rest[3] -= got - payload
                until = 0.0
                continue
            now = time.monotonic()
            until = until or now + spin_s
            if got == 0 or not would_block() or now >= until:
                break
        if not rest[3] and self._answer_bytes.tobytes() == short.verdict:
            return True
        self._lead = False
        if rest[1]:
            self._expect(Piece(rest[0], rest[1]), self._took_payload)
        else:
            self._expect(Piece(rest[2], rest[3]), self._took_answer)
        return False

    @property
    def pushed(self) -> bool:
        """Whether every posted message has been handed to the kernel."""
        return not self._outgoing

    @property
    def untouched(self) -> int:
        """How many of the last posted messages no byte has been sent of."""
        return sum(vector.left == size for vector, size in self._outgoing)

    def push(self, keep_gil: bool = True) -> bool:
        """Send a while what can be sent without waiting; whether anything moved. Raises StreamFailed.

        Without `keep_gil` what is long gives it up in each call: a thread that waits for it has it then after
        one call, of some tens of microseconds, and not after a switch interval (5 ms).
        """
        moved = False
        try:
            for _ in range(_CALLS):
                if not self._outgoing:
                    break
                vector = self._outgoing[0][0]
                calls = HOLDING if keep_gil or vector.left <= SHORT else RELEASING
                sent = vector.send(self.descriptor, NOW, calls, BOUND)
                if sent == WOULD_BLOCK:
                    break
                moved = True
                self._count(sent)
                if vector.left == 0:
                    self._outgoing.popleft()
        except OSError as error:
            raise self._broken(error) from None
        return moved

    def push_wait(self, patience: Patience) -> None:
        """Send all that was posted. Raises StreamFailed."""
        try:
            while self._outgoing:
                self._send_wait(self._outgoing[0][0], patience)
                self._outgoing.popleft()
        except OSError as error:
            raise self._broken(error) from None

    def _send_wait(self, part: Vector, patience: Patience) -> None:
        """Send all of a part. What is short looks for room with the GIL kept; see `_receive_wait`."""
        short = patience.is_short(part.left)
        spin_s = patience.spin_s if short else 0.0
        progress = now = time.monotonic()
        until = now + spin_s
        while part.left:
            # Time may have passed because others had the GIL: so it looks once more before it waits.
            moved = part.send(self.descriptor, NOW, HOLDING, BOUND) if short else WOULD_BLOCK
            if moved == WOULD_BLOCK and now >= until:
                flags = self._block(select.POLLOUT, patience.check(progress), WAIT)
                moved = part.send(self.descriptor, flags, RELEASING)
            elif moved == WOULD_BLOCK and now - progress > _LATE_S:
                sched_yield()
            now = time.monotonic()
            if moved > 0:
                progress, until = now, now + spin_s
                self._count(moved)

    def pull(self, keep_gil: bool = True) -> tuple[Outcome | None, bool]:
        """The next answer if it is there, and whether any byte came. Never waits. Raises StreamFailed.

        For `keep_gil` see `push`."""
        moved = False
        try:
            for _ in range(_CALLS):
                part = self._incoming
                calls = HOLDING if keep_gil or part.left <= SHORT else RELEASING
                received = part.receive(self.descriptor, NOW, calls, BOUND)
                if received == WOULD_BLOCK:
                    break
                moved = True
                self._count(received)
                outcome = self._then() if part.left == 0 else None
                if outcome is not None:
                    return outcome, True
            return None, moved
        except OSError as error:
            raise self._broken(error) from None
        except Malformed as error:
            raise StreamFailed(f"{self.where} sent nonsense: {error}") from None

    def pull_wait(self, patience: Patience) -> Outcome:
        """The next answer. Raises StreamFailed."""
        try:
            while True:
                self._receive_wait(self._incoming, patience)
                outcome = self._then()
                if outcome is not None:
                    return outcome
        except OSError as error:
            raise self._broken(error) from None
        except Malformed as error:
            raise StreamFailed(f"{self.where} sent nonsense: {error}") from None

    def _receive_wait(self, part: Vector | Piece, patience: Patience) -> None:
        """Receive all of a part: look again and again while it keeps coming, wait when it does not.

        To look finds more than to be woken: 1,000 x 4 KiB took 0.48 ms, and 0.92 with calls that wait. The
        exception is what is long while other threads compute: there each release of the GIL costs a switch
        interval, so one call waits for all of it.
        """
        short = patience.is_short(part.left)
        calls, bound = (HOLDING, BOUND) if short else (RELEASING, None)
        look = short or not patience.crowded
        spin_s = patience.spin_s if look else 0.0
        progress = now = time.monotonic()
        until = now + spin_s
        while part.left:
            moved = part.receive(self.descriptor, NOW, calls, bound) if look else WOULD_BLOCK
            if moved == WOULD_BLOCK and now >= until:
                wait = WAIT if look else WAIT_ALL
                flags = self._block(select.POLLIN, patience.check(progress), wait)
                moved = part.receive(self.descriptor, flags, RELEASING)
            elif moved == WOULD_BLOCK and now - progress > _LATE_S:
                sched_yield()
            now = time.monotonic()
            if moved > 0:
                progress, until = now, now + spin_s
                self._count(moved)

    def _count(self, moved: int) -> None:
        if self.work is not None:
            self.work.progress += moved

    def _block(self, events: int, seconds: float, wait: int) -> int:
        """`wait` if that may take a tick, which is how long a call waits; else wait here, then NOW."""
        if seconds >= TICK_S:
            return wait
        poll = select.poll()
        poll.register(self.descriptor, events)
        poll.poll(seconds * 1000)
        return NOW

    def _took_answer(self) -> Outcome | None:
        if not self.waiting:
            raise Malformed("an answer that nobody asked for")
        message = self.waiting[0]
        answer = self._answer = parse_answer(memoryview(self._buffer)[:ANSWER_SIZE])
        if answer.number != message.number:
            raise Malformed(f"an answer to message {answer.number}, {message.number} was expected")
        if answer.text_size:
            self._expect(Piece(self._address + ANSWER_SIZE, answer.text_size), self._conclude)
            return None
        if answer.verdict is Verdict.OK and message.opcode == Opcode.READ and self._lead:
            if answer.moved:
                raise Malformed("a payload that has moved before it came")
            self._lead = False
            self._expect(message.incoming(), self._took_payload)
            return None
        return self._conclude()

    def _took_payload(self) -> None:
        self._expect(Piece(self._address, ANSWER_SIZE), self._took_answer)

    def _conclude(self) -> Outcome:
        answer, message = self._answer, self.waiting[0]
        assert answer is not None
        if answer.verdict is Verdict.OK and answer.moved != message.total:
            raise Malformed(f"{answer.moved} of {message.total} bytes, and yet it is well")
        text = self._buffer.raw[ANSWER_SIZE : ANSWER_SIZE + answer.text_size].decode(
            errors="replace"
        )
        self.waiting.popleft()
        self._lead = True
        self._expect(Piece(self._address, ANSWER_SIZE), self._took_answer)
        return Outcome(message, answer, text)

    def _expect(self, part: Vector | Piece, then: Callable[[], Outcome | None]) -> None:
        self._incoming, self._then = part, then

    # ---------------------------------------------------------------- its end

    def is_stale(self) -> bool:
        """Whether it broke, or something came, while nobody used it."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True
        return True

    def interrupt(self) -> None:
        """From another thread: end what its user waits for. The user closes it."""
        with self._closing, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it, by its user. Idempotent."""
        self.interrupt()  # a forked child may hold the socket as well
        with self._closing:
            self._socket.close()

    def _broken(self, error: OSError) -> StreamBroke:
        reason = "it closed the connection" if isinstance(error, EndOfStream) else error.strerror
        return StreamBroke(f"the stream to {self.where} broke: {reason}")
