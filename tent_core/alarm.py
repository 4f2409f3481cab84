"""Calls at given times, in one thread that starts with the first of them."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable


class Handle:
    """A call to come."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """It will not be made, unless it is being made now. Idempotent."""
        self.call = None


_FEW = 64
"""Below so many entries nothing is tidied away."""


class Alarm:
    """The time, and calls at given times of it. Thread-safe; its lock is a leaf, and no call is made under
    it. What is called must be quick, and must not raise. The thread is a daemon and waits until the next
    time that is due, not at intervals. `now` is `time.monotonic`; tests put another time in its place."""

    now: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, Handle]] = []
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._tidy_at = _FEW

    def at(self, when: float, call: Callable[[], None]) -> Handle:
        """Make `call` at `when` on the monotonic clock. After `close` nothing is called any more."""
        handle = Handle(call)
        with self._changed:
            if not self._closed:
                if len(self._heap) >= self._tidy_at:
                    self._tidy()
                heapq.heappush(self._heap, (when, next(self._order), handle))
                if self._thread is None:
                    self._start()
                elif self._heap[0][2] is handle:
                    self._changed.notify()
        return handle

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> bool:
        """Call nothing any more; False if a call took longer than `timeout` seconds to return."""
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._changed.notify()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (left := self._left()) > 0:
                    self._changed.wait(left)
                if self._closed:
                    return
                call = heapq.heappop(self._heap)[2].call
            if call is not None:
                call()

    def _tidy(self) -> None:
        """Drop what was cancelled: it would stay until its time, and most of it is."""
        self._heap = [entry for entry in self._heap if entry[2].call is not None]
        heapq.heapify(self._heap)
        self._tidy_at = max(_FEW, 2 * len(self._heap))

    def _left(self) -> float:
        """Seconds until the next call is due."""
        while self._heap and self._heap[0][2].call is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] - self.now() if self._heap else threading.TIMEOUT_MAX
