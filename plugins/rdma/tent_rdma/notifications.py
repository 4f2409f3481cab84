"""All notification channels of one engine, by peer: which one a message takes, and when one is made.

A peer has at most two: one that this side opened, because it had a message and an endpoint for that peer, and
one that the peer opened here. Either carries messages both ways; what is there is used before another is
made. So both sides may begin at once, and neither waits for the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from tent_core.descriptor import PeerKey
from tent_core.errors import ClosedError, TransportError
from tent_core.serial import SerialQueue
from tent_rdma.notice_queue import NoticeQueues
from tent_rdma.notices import Busy, NoticeChannel, Patience, Remains
from tent_rdma.verbs import Device

Open = Callable[[], NoticeChannel]
"""Make a channel to a peer and connect both its ends; raises TransportError, OSError. May wait."""


class _Peer:
    __slots__ = ("accepted", "open", "opening", "own", "patience")

    def __init__(self) -> None:
        self.open: Open | None = None
        """How to make one, while there is an endpoint."""
        self.opening = False
        self.own: NoticeChannel | None = None
        self.accepted: NoticeChannel | None = None
        self.patience = Patience()

    @property
    def of_use(self) -> bool:
        return any(x is not None for x in (self.open, self.own, self.accepted)) or self.opening


class Notifications:
    """Thread-safe; its lock is a leaf. What waits is done by `work` or in a thread of its own."""

    def __init__(
        self,
        notified: Callable[[PeerKey, bytes], bytes],
        work: Callable[[Callable[[], None]], bool],
        log: Any,
        *,
        drain_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`notified(peer, message)` is the engine's; `work(call)` runs a call that may wait, in some thread,
        or answers False when there is none any more.

        `drain_timeout`: seconds for a channel to let go of what is outstanding.
        """
        self._notified = notified
        self._work = work
        self._log = log
        self._drain_timeout = drain_timeout
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._openings = 0
        self._peers: dict[PeerKey, _Peer] = {}
        self._remains = Remains()
        self._answers = SerialQueue("tent-rdma-notices")
        self._stopped = False

    def make(
        self, peer: PeerKey, device: Device, port: int, queues: NoticeQueues, *, passive: bool
    ) -> NoticeChannel:
        """A new channel, of which nothing is made yet; it answers as the engine does."""
        if len(self._remains):
            self._remains.try_again()  # what could not be freed may be what is lacking now
        return NoticeChannel(
            device,
            port,
            queues,
            partial(self._notified, peer),
            self._later,
            partial(self._failed, peer),
            passive=passive,
        )

    # ---------------------------------------------------------------- who may be reached

    def attach(self, peer: PeerKey, open: Open) -> None:
        """There is an endpoint for `peer`: from now on the first message that has no channel makes one."""
        with self._lock:
            self._peer(peer).open = open

    def detach(self, peer: PeerKey, open: Open) -> None:
        """The endpoint that was attached with `open` is closed: close what it made. Waits for the drain."""
        with self._lock:
            found = self._peers.get(peer)
            if found is None or found.open is not open:
                return
            found.open = None
            channel, found.own = found.own, None
            self._tidy(peer)
        self.discard(channel)

    def accept(self, peer: PeerKey, channel: NoticeChannel) -> None:
        """A channel that `peer` opened is connected; one that it opened before is closed in its favour."""
        with self._lock:
            if self._stopped:
                before: NoticeChannel | None = channel
            else:
                found = self._peer(peer)
                before, found.accepted = found.accepted, channel
        self.discard(before)

    def release(self, peer: PeerKey) -> None:
        """The peer has gone, or let go of what it opened: close that. Waits for the drain."""
        with self._lock:
            found = self._peers.get(peer)
            if found is None:
                return
            channel, found.accepted = found.accepted, None
            self._tidy(peer)
        self.discard(channel)

    def discard(self, channel: NoticeChannel | None) -> None:
        """Close a channel that is nobody's (any more), or one whose making failed. Waits for the drain."""
        if channel is not None:
            self._remains.close(channel, self._drain_timeout)

    def stop(self, timeout: float) -> bool:
        """Close everything, waiting up to `timeout` seconds for channels that are being made; whether nothing
        is left. Idempotent."""
        with self._changed:
            self._stopped = True
            peers, self._peers = list(self._peers.values()), {}
            self._changed.wait_for(lambda: not self._openings, timeout)
        for peer in peers:
            self.discard(peer.own)
            self.discard(peer.accepted)
        self._answers.close(0.5)
        return self._remains.try_again() and not self._openings

    # ---------------------------------------------------------------- messages

    def exchange(self, peer: PeerKey, message: bytes) -> Future[bytes] | None:
        """As `Transport.exchange`: by a channel that is ready, or by one that is made for this message.

        None where neither can be: no endpoint, a channel that is being made or failed a short time ago, no
        free slot. Raises TransportError.
        """
        with self._lock:
            found = self._peers.get(peer)
            if found is None or self._stopped:
                return None
            ready = next(
                (c for c in (found.own, found.accepted) if c is not None and c.ready), None
            )
            if ready is None:
                open = found.open
                if open is None or found.opening or not found.patience.over(self._clock()):
                    return None
                found.opening = True
                self._openings += 1
        if ready is not None:
            try:
                return ready.exchange(message)
            except Busy:
                return None
        outcome: Future[bytes] = Future()
        outcome.set_running_or_notify_cancel()
        assert open is not None
        if not self._work(partial(self._open_for, peer, found, open, message, outcome)):
            self._opened(peer, found, worked=False)
            return None
        return outcome

    def _open_for(
        self, key: PeerKey, peer: _Peer, open: Open, message: bytes, outcome: Future[bytes]
    ) -> None:
        """Make a channel and send the message that it was made for."""
        try:
            channel = open()
        except Exception as error:
            self._log.info("rdma_notifications_not_opened", peer=str(key), reason=str(error))
            self._opened(key, peer, worked=False)
            outcome.set_exception(error)
            return
        with self._lock:
            wanted = peer.open is open and not self._stopped and channel.ready
            if wanted:  # what may be there is broken, or it would have been used
                unused, peer.own = peer.own, channel
            else:
                unused = channel
        self.discard(unused)
        self._opened(key, peer, worked=wanted)
        try:
            answer = channel.exchange(message)
        except TransportError as error:  # above all when it is not wanted any more
            outcome.set_exception(error)
        else:
            answer.add_done_callback(partial(_pass_on, outcome))

    def _opened(self, key: PeerKey, peer: _Peer, *, worked: bool) -> None:
        with self._changed:
            peer.opening = False
            if worked:
                peer.patience.worked()
            else:
                peer.patience.failed(self._clock())
            self._tidy(key)
            self._openings -= 1
            self._changed.notify_all()

    # ---------------------------------------------------------------- within

    def __len__(self) -> int:
        """How many channels there are, those included of which something could not be freed."""
        with self._lock:
            peers = list(self._peers.values())
        return sum((p.own is not None) + (p.accepted is not None) for p in peers) + len(
            self._remains
        )

    def _later(self, call: Callable[[], None]) -> None:
        try:
            self._answers.submit(call)
        except ClosedError:
            return  # it stops: the peer asks its other ways

    def _failed(self, key: PeerKey, channel: NoticeChannel, cause: TransportError) -> None:
        self._log.info("rdma_notifications_failed", peer=str(key), reason=str(cause))
        with self._lock:
            peer = self._peers.get(key)
            if peer is not None and peer.own is channel:
                peer.own = None
                peer.patience.failed(self._clock())
            elif peer is not None and peer.accepted is channel:
                peer.accepted = None
            else:
                return  # it is being made, or closed, by somebody who closes it
            self._tidy(key)
        self._work(partial(self.discard, channel))

    def _peer(self, key: PeerKey) -> _Peer:
        """With the lock held."""
        return self._peers.setdefault(key, _Peer())

    def _tidy(self, key: PeerKey) -> None:
        """With the lock held: keep nothing of a peer that has nothing."""
        peer = self._peers.get(key)
        if peer is not None and not peer.of_use:
            del self._peers[key]


def _pass_on(outcome: Future[bytes], answer: Future[bytes]) -> None:
    error = answer.exception()
    if error is None:
        outcome.set_result(answer.result())
    else:
        outcome.set_exception(error)
