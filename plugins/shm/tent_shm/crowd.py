"""How many threads copy at once: among several, none may keep the interpreter lock for long."""

from __future__ import annotations

import threading
import time

LINGER_S = 10e-3
"""Who has met others expects them again for so long: while it kept the GIL, it would not see them come."""


class Crowd:
    """The threads that are carrying out a long submission right now, without the pool's. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._expected = 1
        self._until = 0.0

    def __enter__(self) -> int:
        """Be one of them; how many they are, or were a moment ago."""
        now = time.monotonic()
        with self._lock:
            self._inside += 1
            if self._inside > 1:
                self._expected, self._until = self._inside, now + LINGER_S
                return self._inside
            return self._expected if now < self._until else 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
