"""A batch: requests submitted together, their statuses, and the ways to wait for them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tent_core.errors import (
    BufferRevoked,
    NotificationFailed,
    StaleHandle,
    TentError,
    TransferFailed,
    WaitTimeout,
)
from tent_core.types import Intent, Priority, Status

Rows = NDArray[np.intp] | None
"""Which requests of a batch are meant: positions, or None for all of them."""


_PENDING = int(Status.PENDING)  # numpy takes it faster


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():  # the waiting coroutine may have been cancelled
        future.set_result(None)


class Note(NamedTuple):
    """What is told to the peer when all of a batch has arrived; with `integrity`, checksums go with it."""

    name: str
    payload: bytes
    integrity: bool = False


class Follower(Protocol):
    """What comes after the data of a batch, and before its end."""

    def data_ended(self) -> None: ...

    def cancel(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Options:
    """How a batch is to be carried, as `options.TransferOptions` says it."""

    timeout: float | None = None
    priority: Priority = Priority.MEDIUM
    intent: Intent = Intent.UNSPEC
    policy: str | None = None
    transport: str | None = None
    deadline: float | None = None
    attempt_s: float | None = None
    stall_s: float | None = None
    retry_unfenced: bool = False
    note: Note | None = None
    part: bool = False
    """Whether it carries a part of what another batch was asked for, which is counted there."""

    @property
    def plain(self) -> bool:
        """Whether nothing is asked but to carry it soon: no time of its own, no notification."""
        return (
            self.timeout is None
            and self.deadline is None
            and self.attempt_s is None
            and self.stall_s is None
            and self.note is None
        )


class Cancellable(Protocol):
    """What carries a part of a batch."""

    def cancel(self) -> None: ...


class Mark(Protocol):
    """A use that has begun and has to be ended: of a buffer, of a peer."""

    def end(self) -> None: ...


class Try(NamedTuple):
    """One attempt of one transport, for the error that lists them all."""

    transport: str
    cause: Exception
    seconds: float


class Failed(NamedTuple):
    """Requests that ended without moving every byte, with everything that was tried for them."""

    rows: Rows
    tries: tuple[Try, ...]


class Batch:
    """n requests on their way. `await batch`, `batch.wait()`, `batch.poll()` and callbacks all tell the end.

    `status` is uint8 (n,) of `Status`, `moved` uint64 (n,) in bytes; read them once `done`, before that
    they are a view of what is known. Thread-safe. It always ends: with a terminal status per request.
    One with a notification ends when the peer's engine has acknowledged it; `notify_error` says why not.
    `feasible` says, for one that was given a timeout or a deadline, whether it could be expected to be done
    by then when it was submitted, by the pace of its transport; None where that is not known.
    """

    __slots__ = (
        "_callbacks",
        "_cancelled",
        "_carries",
        "_failures",
        "_follower",
        "_gate",
        "_left",
        "_lock",
        "_marks",
        "_push",
        "_spin_s",
        "_to",
        "carried",
        "done",
        "feasible",
        "moved",
        "notify_error",
        "status",
    )

    def __init__(self, n: int, to: str, spin_s: float) -> None:
        """Of n requests, all pending; `to` names the segment, for messages."""
        self.status = np.empty(n, np.uint8)
        self.status.fill(_PENDING)
        self.moved = np.zeros(n, np.uint64)
        self.carried: dict[str, int] = {}
        self.done = False
        self.feasible: bool | None = None
        self.notify_error: TentError | None = None
        self._to = to
        self._marks: Sequence[Mark] = ()
        self._spin_s = spin_s
        self._left = n
        self._failures: list[Failed] = []
        self._callbacks: list[Callable[[Batch], None]] = []
        self._cancelled = False
        self._carries: Sequence[Cancellable] = ()
        self._follower: Follower | None = None
        self._push: Callable[[], object] | None = None
        self._lock = threading.Lock()
        self._gate = threading.Lock()
        self._gate.acquire()

    def __len__(self) -> int:
        return len(self.status)

    # ---------------------------------------------------------------- for the dispatcher

    def requests(self, rows: Rows) -> int:
        """How many requests these rows are."""
        return len(self.status) if rows is None else len(rows)

    def hold(self, marks: Sequence[Mark]) -> None:
        """Keep these uses, which have begun, until the end. A batch of nothing ends now."""
        self._marks = marks
        if self._left == 0:
            self._data_ended()

    def follow(self, follower: Follower) -> None:
        """Before anything is carried: this comes after the data; it calls `announced` at its end."""
        self._follower = follower

    def let_go(self, follower: Follower) -> None:
        """The data has arrived and is not looked at any more: only the use of the peer goes on."""
        with self._lock:
            marks, self._marks = self._marks[:-1], self._marks[-1:]
            self._carries = (follower,)
            self._push = None
        for mark in marks:
            mark.end()

    def announced(self, error: TentError | None) -> None:
        """What came after the data has ended, and how."""
        self.notify_error = error
        with self._lock:  # a thread that closes the engine may be at `let_go`
            marks, self._marks = self._marks, ()
        for mark in marks:
            mark.end()
        self._finish()

    def carried_by(self, carries: Sequence[Cancellable], push: Callable[[], object] | None) -> None:
        """These are about to carry it, beside those that are known; `push` may help them along in `poll`."""
        with self._lock:
            if not self.done:
                self._carries = (*self._carries, *carries)
                self._push = push
            cancelled = self._cancelled
        if cancelled:  # while its peer was being woken
            for carry in carries:
                carry.cancel()

    def settle(
        self,
        rows: Rows,
        status: NDArray[np.uint8] | Status,
        moved: NDArray[np.uint64] | None,
        transport: str,
        total: int | None = None,
    ) -> None:
        """Record the terminal statuses of `rows`; the batch ends with its last row. No `transport`: what
        carried them has been credited. `total` is the sum of `moved`, where it is known."""
        where = slice(None) if rows is None else rows
        with self._lock:
            self.status[where] = status
            if moved is not None:
                self.moved[where] = moved
                if transport:
                    self._credit(transport, int(moved.sum()) if total is None else total)
            self._left -= len(self.status) if rows is None else len(rows)
            ended = self._left == 0
        if ended:
            self._data_ended()

    def settle_failed(
        self,
        rows: Rows,
        status: Status,
        moved: NDArray[np.uint64] | None,
        tries: tuple[Try, ...],
        credited: bool = False,
    ) -> None:
        """Record that `rows` failed for good, and why; `credited`: what has moved is accounted for."""
        with self._lock:
            self._failures.append(Failed(rows, tries))
        self.settle(rows, status, moved, "" if credited or not tries else tries[-1].transport)

    def credit(self, transport: str, moved: int) -> None:
        """`transport` has carried so many bytes of requests that may not have ended yet."""
        with self._lock:
            self._credit(transport, moved)

    def _credit(self, transport: str, moved: int) -> None:
        self.carried[transport] = self.carried.get(transport, 0) + moved

    def _what(self) -> str:
        return f"batch of {len(self)} to {self._to}"

    def _data_ended(self) -> None:
        if self._follower is None:
            self._finish()
        else:
            self._follower.data_ended()

    def _finish(self) -> None:
        for mark in self._marks:
            mark.end()
        with self._lock:
            self.done = True
            self._carries = ()
            self._push = None
            callbacks, self._callbacks = self._callbacks, []
        self._gate.release()
        for call in callbacks:
            call(self)

    # ---------------------------------------------------------------- for applications

    def cancel(self) -> None:
        """Nobody wants it any more. What has not been started ends at once as CANCELED; what a transport
        has is interrupted where the transport can, and ends as CANCELED or COMPLETED. A notification about
        data that has arrived is given up, and may arrive. Idempotent; never waits: the memory is free when
        the batch has ended.
        """
        with self._lock:
            self._cancelled = True
            carries = self._carries
        for carry in carries:
            carry.cancel()

    def poll(self) -> bool:
        """Whether every request has ended. Never raises, and waits for nobody; what has failed is carried on
        in this thread if `failover.on_poll` says so."""
        push = self._push
        if push is not None and not self.done:
            push()
        return self.done

    def wait(self, timeout: float | None = None, *, check: bool = True) -> Batch:
        """Wait until every request has ended and return the batch.

        Raises WaitTimeout after `timeout` seconds (the work goes on), and, if `check`, TransferFailed or
        StaleHandle when any request did not complete, as `check` does. Spins for a short time
        (`wait.spin_us`), then blocks.
        """
        if not self.done:
            self._block(timeout)
        if check:
            self.check()
        return self

    def _block(self, timeout: float | None) -> None:
        spin_until = time.perf_counter() + self._spin_s
        while time.perf_counter() < spin_until:
            if self.done:
                return
            time.sleep(0)  # hands the GIL to whoever carries the work
        if not self._gate.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            left = f"{self._left} requests are" if self._left else "its notification is"
            raise WaitTimeout(f"{self._what()} did not end within {timeout:g} s; {left} under way")
        self._gate.release()

    def check(self) -> None:
        """Raise if any request ended otherwise than COMPLETED.

        That is TransferFailed, or what a call made now would raise: StaleHandle (BufferRevoked) when owners
        took the buffers away while the requests were under way, and nothing else went wrong. When all did
        complete, NotificationFailed if the notification about them was not acknowledged.
        """
        if self._failures:
            causes = [f.tries[-1].cause if f.tries else None for f in self.failures]
            kind: type[TentError] = TransferFailed
            for stale in (StaleHandle, BufferRevoked):
                if all(isinstance(cause, stale) for cause in causes):
                    kind = stale
            raise kind(self.explain_failures()) from causes[0]
        if self.notify_error is not None:
            raise NotificationFailed(str(self.notify_error)) from self.notify_error.__cause__

    @property
    def failures(self) -> tuple[Failed, ...]:
        """What failed, with each attempt."""
        with self._lock:
            return tuple(self._failures)

    def explain_failures(self, most: int | None = None) -> str:
        """How many requests failed and, for each kind of failure (the first `most` of them), the first
        request and every attempt."""
        lines: list[str] = []
        count = 0
        for failed in self.failures:
            rows = range(len(self)) if failed.rows is None else failed.rows
            count += len(rows)
            if most is not None and len(lines) == most:
                continue
            tried = "; ".join(
                f"{t.transport} after {t.seconds:.3f} s: {t.cause}" for t in failed.tries
            )
            which = f"request {int(rows[0])}" + (
                f" and {len(rows) - 1} more" if len(rows) > 1 else ""
            )
            lines.append(f"{which}: {tried or 'no transport was tried'}")
        return "\n".join([f"{self._what()}: {count} of {len(self)} requests failed", *lines])

    def transports(self) -> dict[str, int]:
        """Bytes by the transport that carried them."""
        with self._lock:
            return {name: moved for name, moved in self.carried.items() if moved}

    def add_done_callback(self, call: Callable[[Batch], None]) -> None:
        """Call `call(batch)` once, when the batch has ended (now, if it has), in whichever thread ends it.

        It must return quickly and must not raise: it may run in a transport's thread.
        """
        with self._lock:
            if not self.done:
                self._callbacks.append(call)
                return
        call(self)

    def __await__(self) -> Generator[object, None, Batch]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake(_: Batch) -> None:
            loop.call_soon_threadsafe(_resolve, future)

        self.add_done_callback(wake)
        yield from future.__await__()
        self.check()
        return self

    def __repr__(self) -> str:
        counts = np.bincount(self.status, minlength=len(Status))
        known = ", ".join(f"{int(counts[s])} {s.name}" for s in Status if counts[s])
        return f"<Batch {self._what()}: {known or 'empty'}>"
