"""What only the first of several may do."""

from __future__ import annotations

import threading


class Once:
    """Of several that would do a thing, the first to take this does. Thread-safe, never waits."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def take(self) -> bool:
        """True for the first caller only."""
        return self._lock.acquire(blocking=False)
