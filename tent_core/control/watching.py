"""A watch stream at the side that serves it: what is to be said on it, and how it ends."""

from __future__ import annotations

import asyncio

from tent_core.control import tent_pb2 as pb

LAST_WORDS_S = 1.0
"""How long the last message of a watch stream may take to be written."""


class WatchStream:
    """The watch stream that is attached to a session. Made in the task that serves it."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._limit: asyncio.TimerHandle | None = None
        self.wake = asyncio.Event()
        self.retire = False
        """Whether the peer is to be asked to retire."""
        self.last: pb.WatchResponse | None = None
        """What is said last; the stream ends with it."""
        self.ended = False
        self.mistake: str | None = None

    def end(self, last: pb.WatchResponse | None) -> None:
        """End the stream, saying `last` if anything; a peer that does not read is not waited for."""
        self.last = last
        self.ended = True
        self.wake.set()
        if self._limit is None and self._task is not None:
            self._limit = self._task.get_loop().call_later(LAST_WORDS_S, self._task.cancel)

    def close(self) -> None:
        """The task that serves the stream has ended."""
        if self._limit is not None:
            self._limit.cancel()
        self._task = None
