"""How many threads copy at once: among several, none may keep the interpreter lock for long."""

from __future__ import annotations

import threading


class Crowd:
    """The threads that are carrying out a long submission right now, without the pool's. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0

    def __enter__(self) -> int:
        """Be one of them; how many they are."""
        with self._lock:
            self._inside += 1
            return self._inside

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
