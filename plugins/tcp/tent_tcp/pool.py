"""The streams to one peer: made when they are needed, each lent to one user at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tent_tcp.patience import TICK_S, DeadlinePassed, StreamFailed
from tent_tcp.streams import Stream

_UNUSED_S = 0.1
"""A stream that was idle for longer is looked at before it is used: the peer may have closed it."""


class AllInUse(Exception):
    """No stream is free and no more may be made; `on_free` will be called."""


class Pool:
    """At most `limit` streams, made by whoever needs one. Thread-safe.

    What is called bulk leaves one of them to others, if there are two.

    A stream that was taken is given back or discarded by its user, who alone closes it. `on_free` is called,
    in the thread that gave something back, once after each AllInUse.
    """

    def __init__(self, limit: int, on_free: Callable[[], None]) -> None:
        self._limit = limit
        self._on_free = on_free
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiters = 0
        self._idle: list[Stream] = []
        self._busy: set[Stream] = set()
        self._bulk_limit = max(1, limit - 1)
        self._making = 0
        self._wanted = False
        self._epoch = 0
        self.closed: str | None = None
        """Why it is closed, or None."""

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    def take(
        self,
        deadline: float,
        make: Callable[[], Stream],
        interrupted: Callable[[], StreamFailed | None],
        bulk: bool = False,
    ) -> Stream:
        """A stream, made with `make` if none is idle and there is room. `interrupted` is asked at every tick
        why to give up. Raises StreamFailed."""
        while True:
            with self._lock:
                while self.closed is None and not self._available(bulk):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise DeadlinePassed(
                            f"all {self._limit} streams to the peer were in use until the deadline"
                        )
                    self._waiters += 1
                    try:
                        self._changed.wait(min(left, TICK_S))
                    finally:
                        self._waiters -= 1
                    reason = interrupted()
                    if reason is not None:
                        raise reason
                stream = self._lend()
            if stream is None:
                try:
                    stream = make()
                except BaseException:
                    self.not_made()
                    raise
                self.made(stream)
                return stream
            if not self._is_stale(stream):
                return stream

    def borrow(self) -> Stream | None:
        """A stream that was in use a moment ago, for something short; None if there is none."""
        with self._lock:
            if self.closed is not None or not self._idle:
                return None
            if time.monotonic() - self._idle[-1].used >= _UNUSED_S:
                return None
            stream = self._idle.pop()
            self._busy.add(stream)
            return stream

    def take_now(self, bulk: bool = False) -> Stream | None:
        """A stream, or None: make one, and say `made` or `not_made`. Raises AllInUse, StreamFailed."""
        while True:
            with self._lock:
                if self.closed is None and not self._available(bulk):
                    self._wanted = True
                    raise AllInUse
                stream = self._lend()
            if stream is None or not self._is_stale(stream):
                return stream

    def made(self, stream: Stream) -> None:
        """A stream that was allowed is made, and lent to who made it. Raises StreamFailed if closed."""
        with self._lock:
            self._making -= 1
            if self.closed is None:
                stream.epoch = self._epoch
                self._busy.add(stream)
                return
        stream.close()
        raise StreamFailed(self.closed)

    def not_made(self) -> None:
        """A stream that was allowed could not be made."""
        with self._lock:
            self._making -= 1
            wanted = self._freed()
        if wanted:
            self._on_free()

    def give(self, stream: Stream) -> None:
        """Give a stream back that is in step: nothing was posted that is not answered."""
        stream.used = time.monotonic()
        with self._lock:
            keep = self.closed is None and stream.epoch == self._epoch
            self._busy.discard(stream)
            if keep:
                self._idle.append(stream)
            wanted = self._freed()
        if not keep:
            stream.close()
        if wanted:
            self._on_free()

    def discard(self, stream: Stream) -> None:
        """Close a stream that was taken instead of giving it back."""
        stream.close()
        with self._lock:
            self._busy.discard(stream)
            wanted = self._freed()
        if wanted:
            self._on_free()

    def renew(self) -> None:
        """The receiver is another one now: streams that were made before are used for nothing new."""
        with self._lock:
            self._epoch += 1
            idle, self._idle = self._idle, []
        for stream in idle:
            stream.close()

    def close(self, reason: str) -> None:
        """Close what is idle, interrupt what is in use, allow no more. Idempotent."""
        with self._lock:
            if self.closed is None:
                self.closed = reason
            idle, self._idle = self._idle, []
            busy = list(self._busy)
            self._changed.notify_all()
        for stream in idle:
            stream.close()
        for stream in busy:
            stream.interrupt()

    def _available(self, bulk: bool) -> bool:
        return len(self._busy) + self._making < (self._bulk_limit if bulk else self._limit)

    def _lend(self) -> Stream | None:
        if self.closed is not None:
            raise StreamFailed(self.closed)
        if self._idle:
            stream = self._idle.pop()
            self._busy.add(stream)
            return stream
        self._making += 1
        return None

    def _freed(self) -> bool:
        """Tell who waits; whether `on_free` is due."""
        if self._waiters:
            self._changed.notify_all()  # not every one of them may have what is free
        wanted, self._wanted = self._wanted, False
        return wanted

    def _is_stale(self, stream: Stream) -> bool:
        """Whether an idle stream broke; then it is discarded."""
        if time.monotonic() - stream.used < _UNUSED_S or not stream.is_stale():
            return False
        self.discard(stream)
        return True
