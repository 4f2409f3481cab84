"""What the library has in its hands, so that no memory is let go of before it has let go of it."""

from __future__ import annotations

import threading
import time

from tent_mpcomm.transfers import Posting


class Ledger:
    """All postings that are not over, with who posted them. Thread-safe; its lock is a leaf."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._postings: dict[Posting, object] = {}
        self._watched = 0

    def __len__(self) -> int:
        return len(self._postings)

    def add(self, posting: Posting, owner: object) -> None:
        """The library is about to get it."""
        with self._changed:
            self._postings[posting] = owner

    def discard(self, posting: Posting) -> None:
        """The library has let go of it."""
        with self._changed:
            del self._postings[posting]
            if self._watched:
                self._changed.notify_all()

    def of(self, owner: object) -> list[Posting]:
        """Those that this owner posted."""
        with self._changed:
            return [posting for posting, whose in self._postings.items() if whose is owner]

    def all(self) -> list[Posting]:
        """All of them."""
        with self._changed:
            return list(self._postings)

    def wait_unused(self, buffer: int | None, timeout: float) -> int:
        """Wait until none uses the local buffer of this id (None: until there is none at all).

        Answers how many still do after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._watched += 1
            try:
                while (count := self._using(buffer)) and (left := deadline - time.monotonic()) > 0:
                    self._changed.wait(left)
                return count
            finally:
                self._watched -= 1

    def _using(self, buffer: int | None) -> int:
        if buffer is None:
            return len(self._postings)
        return sum(buffer in posting.local_used for posting in self._postings)
