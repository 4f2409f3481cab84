"""Notifications that have arrived and wait for the application, bounded."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from tent_core.control.contract import Notification
from tent_core.errors import ClosedError, WaitTimeout


class Inbox:
    """A bounded queue of notifications. Thread-safe; its lock is a leaf."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queue: deque[Notification] = deque()
        self._arrived = threading.Condition()
        self._closed = False
        self._listeners: list[Callable[[], None]] = []
        self.received = 0

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, note: Notification) -> bool:
        """Add one; False when it is full or closed, so that the sender holds it back."""
        with self._arrived:
            if self._closed or len(self._queue) >= self._limit:
                return False
            self._queue.append(note)
            self.received += 1
            self._arrived.notify()
            listeners = tuple(self._listeners)
        for call in listeners:
            call()
        return True

    def on_arrival(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call `call()` after each arrival and at the close. Returns a function that ends it."""
        with self._arrived:
            self._listeners.append(call)

        def forget() -> None:
            with self._arrived:
                self._listeners.remove(call)

        return forget

    def try_take(self) -> Notification | None:
        """The oldest one, or None when there is none. Raises ClosedError when none can come any more."""
        with self._arrived:
            if self._queue:
                return self._queue.popleft()
            if self._closed:
                raise ClosedError("the engine was closed while waiting for a notification")
            return None

    def take(self, timeout: float | None) -> Notification:
        """The oldest one; waits up to `timeout` seconds (None: until it comes, or the engine closes)."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: self._queue or self._closed, timeout):
                raise WaitTimeout(f"no notification arrived within {timeout:g} s")
            if not self._queue:
                raise ClosedError("the engine was closed while waiting for a notification")
            return self._queue.popleft()

    def take_all(self) -> list[Notification]:
        """All of them."""
        with self._arrived:
            notes = list(self._queue)
            self._queue.clear()
            return notes

    def close(self) -> None:
        """Wake everybody who waits; what has not been taken can still be."""
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()
            listeners = tuple(self._listeners)
        for call in listeners:
            call()
