"""When delayed things happen: on a thread of its own in real time, or when a test says so."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import Protocol

_Entry = tuple[float, int, Callable[[], None]]


class Clock(Protocol):
    """Time in seconds, on the scale of `time.monotonic`, and calls to make later. Thread-safe."""

    def now(self) -> float:
        """The present time."""
        ...

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Make `call` once, `seconds` from now, in a thread of the clock's choosing, with no lock held."""
        ...

    def stop(self) -> None:
        """Make no more calls. Idempotent."""
        ...


class ManualClock:
    """A clock that stands still until `advance`, which makes the calls that fall due, in order.

    It makes them in the thread that advances it. One may be shared by several
    transports, so that all of a test lives on one time.
    """

    def __init__(self, start: float | None = None) -> None:
        self._now = time.monotonic() if start is None else start
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []
        self._order = itertools.count()

    def now(self) -> float:
        """The time up to which `advance` has come."""
        return self._now

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Queue `call`; even one that is due at once waits for `advance`."""
        with self._lock:
            heapq.heappush(self._entries, (self._now + seconds, next(self._order), call))

    def advance(self, seconds: float) -> int:
        """Let `seconds` pass and answer how many calls were made, those included that the calls queued."""
        until = self._now + seconds
        made = 0
        while (entry := self._next_until(until)) is not None:
            entry[2]()
            made += 1
        return made

    def _next_until(self, until: float) -> _Entry | None:
        with self._lock:
            if not self._entries or self._entries[0][0] > until:
                self._now = max(self._now, until)
                return None
            entry = heapq.heappop(self._entries)
            self._now = max(self._now, entry[0])
            return entry

    def stop(self) -> None:
        """Do nothing: other transports may live on this time, and an end of it makes no call."""


class ThreadClock:
    """Real time. Its one thread starts with the first call that is queued, and ends with `stop`."""

    def __init__(self, name: str = "tent-mock-clock") -> None:
        self._name = name
        self._changed = threading.Condition()
        self._entries: list[_Entry] = []
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def now(self) -> float:
        """`time.monotonic()`."""
        return time.monotonic()

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Queue `call`; after `stop` it is dropped."""
        with self._changed:
            if self._stopped:
                return
            heapq.heappush(self._entries, (time.monotonic() + seconds, next(self._order), call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def stop(self) -> None:
        """End the thread and drop what is queued."""
        with self._changed:
            self._stopped = True
            self._entries.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def _run(self) -> None:
        while (call := self._next()) is not None:
            call()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._stopped:
                left = self._entries[0][0] - time.monotonic() if self._entries else None
                if left is not None and left <= 0:
                    return heapq.heappop(self._entries)[2]
                self._changed.wait(left)
            return None
