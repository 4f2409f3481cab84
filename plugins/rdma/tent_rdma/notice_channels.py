"""Notification channels of one engine: made over a rail at the first notification, or when a peer asks."""

from __future__ import annotations

from collections.abc import Sequence

from tent_core.descriptor import PeerKey
from tent_core.errors import TransportError
from tent_core.transport import Peer
from tent_rdma.connection import route
from tent_rdma.nic import Nic
from tent_rdma.notice_queue import NoticeQueues
from tent_rdma.notices import NoticeChannel
from tent_rdma.notifications import Notifications
from tent_rdma.poller import Poller
from tent_rdma.settings import PoolSettings, Settings
from tent_rdma.wire import Malformed, NicAddress, OpenedNotices, OpenNotices, decode


class NoticeChannels:
    """Thread-safe. Nothing is made for a peer that is never notified."""

    def __init__(
        self,
        nics: Sequence[Nic],
        pollers: Sequence[Poller],
        notifications: Notifications,
        settings: Settings,
    ) -> None:
        """`pollers[i]` watches for `nics[i]`."""
        self._nics = nics
        self._settings = settings
        self._notifications = notifications
        self._queues = [
            NoticeQueues(nic.device, poller.watch, poller.forget)
            for nic, poller in zip(nics, pollers, strict=True)
        ]

    def open(self, peer: Peer, nic: Nic, remote: Sequence[NicAddress], other: int) -> NoticeChannel:
        """From a NIC here to the peer's NIC number `other`. Waits. Raises TransportError."""
        channel = self._make(peer.key, nic, passive=False)
        try:
            asked = OpenNotices(nic=other, sender=nic.address, queue_pair=channel.prepare())
            answer = peer.bootstrap(asked.encode(), self._settings.connect_timeout)
            opened = decode(OpenedNotices, answer)
            channel.connect(
                route(nic, remote[other], opened.queue_pair, PoolSettings(), self._settings)
            )
        except BaseException:
            self._notifications.discard(channel)
            raise
        return channel

    def answer(self, peer: PeerKey, asked: OpenNotices) -> OpenedNotices:
        """A peer opens one. Raises Malformed, TransportError; nothing is left then."""
        if not self._settings.notifications:
            raise TransportError("rdma carries no notifications here, say its settings")
        if asked.nic >= len(self._nics):
            raise Malformed(f"asked for NIC {asked.nic}: there are {len(self._nics)} here")
        nic = self._nics[asked.nic]
        channel = self._make(peer, nic, passive=True)
        try:
            own = channel.prepare()
            channel.connect(
                route(nic, asked.sender, asked.queue_pair, PoolSettings(), self._settings)
            )
        except BaseException:
            self._notifications.discard(channel)
            raise
        self._notifications.accept(peer, channel)
        return OpenedNotices(queue_pair=own)

    def _make(self, peer: PeerKey, nic: Nic, *, passive: bool) -> NoticeChannel:
        return self._notifications.make(
            peer, nic.device, nic.chosen.port, self._queues[nic.index], passive=passive
        )
