"""Notifications about batches: sent when all of a batch has arrived, or when it is clear that it cannot."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

from tent_core.batch import Batch, Note
from tent_core.errors import (
    ClosedError,
    NotificationFailed,
    PeerDeparted,
    TentError,
    TransferCanceled,
)
from tent_core.log import RateLimited

if TYPE_CHECKING:
    from tent_core.control.contract import Checksum
    from tent_core.integrity import Integrity, Sums
    from tent_core.peers import LivePeer

LEAST_S = 0.5
"""What a notification has in any case, also if its batch ended at the deadline: less than blocking calls wait
beyond it."""


class Announcer:
    """The notifications about batches of one engine that are under way. Thread-safe; its lock is a leaf.

    Nothing here waits: it is called by whoever settles the last request of a batch, a transport's thread as a
    rule. What has to be waited for is done by the control thread, the integrity thread, and `patiently`,
    which runs a call that may take its time; `now` is the clock that deadlines are on.
    """

    def __init__(
        self,
        integrity: Integrity,
        timeout_s: float,
        call_timeout_s: float,
        now: Callable[[], float],
        patiently: Callable[[Callable[[], None]], None],
        log: Any,
    ) -> None:
        self._timeout_s = timeout_s
        self._call_timeout_s = call_timeout_s
        self._patiently = patiently
        self.now = now
        self._log = RateLimited(log)
        self._lock = threading.Lock()
        self._pending: set[Announcement] = set()
        self._closed = False
        self.integrity = integrity

    def follow(
        self, batch: Batch, peer: LivePeer, note: Note, sums: Sums | None, deadline: float
    ) -> None:
        """Have the end of `batch` announced to `peer`, by `deadline` on the monotonic clock."""
        batch.follow(Announcement(self, batch, peer, note, sums, deadline))

    def tell_failure(self, peer: LivePeer, note: Note, reason: str) -> None:
        """Tell the peer that what `note` was to announce will not come. Nobody waits for the outcome.

        A peer that is not connected is woken: whoever waits there must not wait for ever."""
        with contextlib.suppress(PeerDeparted):
            if peer.try_begin():
                self._tell(peer, note, reason)
            else:
                self._patiently(lambda: self._wake_and_tell(peer, note, reason))

    def close(self) -> None:
        """The engine has said goodbye: what has not been acknowledged is unknown, and stays so."""
        with self._lock:
            self._closed = True
            pending = list(self._pending)
        for announcement in pending:
            announcement.end(ClosedError("the engine was closed before it was acknowledged"))

    def _wake_and_tell(self, peer: LivePeer, note: Note, reason: str) -> None:
        try:
            peer.begin(self._call_timeout_s)
        except TentError as error:
            self._log.warning("failure_not_told", peer=str(peer.key), cause=str(error))
        else:
            self._tell(peer, note, reason)

    def _tell(self, peer: LivePeer, note: Note, reason: str) -> None:
        """With a use of the peer, which ends with it."""
        told = peer.connection.announce(note.name, note.payload, self._timeout_s, reason)

        def ended(told: Future[None]) -> None:
            peer.end()
            error = told.exception()
            if error is not None:
                self._log.warning("failure_not_told", peer=str(peer.key), cause=str(error))

        told.add_done_callback(ended)

    def _began(self, announcement: Announcement) -> bool:
        with self._lock:
            if not self._closed:
                self._pending.add(announcement)
            return not self._closed

    def _ended(self, announcement: Announcement) -> None:
        with self._lock:
            self._pending.discard(announcement)


class Announcement:
    """That of one batch. The batch ends, for its application, when this has."""

    __slots__ = ("_announcer", "_batch", "_deadline", "_note", "_outcome", "_peer", "_sums")

    def __init__(
        self,
        announcer: Announcer,
        batch: Batch,
        peer: LivePeer,
        note: Note,
        sums: Sums | None,
        deadline: float,
    ) -> None:
        self._announcer = announcer
        self._batch = batch
        self._peer = peer
        self._note = note
        self._sums = sums
        self._deadline = deadline
        self._outcome: Future[None] = Future()

    def data_ended(self) -> None:
        """The last request of the batch was settled, in whatever thread."""
        batch = self._batch
        if batch.failures:
            self._announcer.tell_failure(self._peer, self._note, batch.explain_failures(most=1))
            batch.announced(None)
            return
        self._outcome.add_done_callback(self._finish)
        if not self._announcer._began(self):
            self.end(ClosedError("the engine is closed"))
        elif self._sums is None:
            self._post(())
        else:
            try:
                self._announcer.integrity.sum(self._sums).add_done_callback(self._summed)
            except ClosedError as error:
                self.end(error)

    def cancel(self) -> None:
        """Nobody waits for it any more. It may be on its way, and arrive."""
        self.end(TransferCanceled("it was cancelled before it was acknowledged, and may arrive"))

    def end(self, error: BaseException | None) -> None:
        """It ends like this, unless it has ended."""
        with contextlib.suppress(InvalidStateError):
            if error is None:
                self._outcome.set_result(None)
            else:
                self._outcome.set_exception(error)

    def _summed(self, sums: Future[tuple[Checksum, ...]]) -> None:
        error = sums.exception()
        if error is not None:
            self.end(error)
        else:
            self._post(sums.result())

    def _post(self, checksums: tuple[Checksum, ...]) -> None:
        """It gets its number now: order is that of completion. The application may have its memory back."""
        self._batch.let_go(self)
        if self._outcome.done():
            return
        note = self._note
        within = max(self._deadline - self._announcer.now(), LEAST_S)
        sent = self._peer.connection.announce(note.name, note.payload, within, checksums=checksums)
        self._outcome.add_done_callback(lambda _: sent.cancel())
        sent.add_done_callback(self._sent)

    def _sent(self, sent: Future[None]) -> None:
        if not sent.cancelled():
            self.end(sent.exception())

    def _finish(self, outcome: Future[None]) -> None:
        self._announcer._ended(self)
        cause = outcome.exception()
        error = None
        if cause is not None:
            error = NotificationFailed(
                f"all of the {len(self._batch)} requests to {self._peer.key.name} have arrived, but "
                f"notification {self._note.name!r} about them was not acknowledged: {cause}"
            )
            error.__cause__ = cause
        self._batch.announced(error)
