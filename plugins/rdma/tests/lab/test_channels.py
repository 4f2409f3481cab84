"""Notification channels over real verbs: every length, every slot, and what the kernel counts."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from kernel import resources

from tent_core.errors import TransportError
from tent_core.serial import SerialQueue
from tent_core.transport import EXCHANGE_LIMIT
from tent_rdma import by_pyverbs
from tent_rdma.devices import ChosenDevice
from tent_rdma.notice_queue import NoticeQueue, NoticeQueues
from tent_rdma.notices import NoticeChannel
from tent_rdma.slots import PAYLOAD_LIMIT, SLOTS
from tent_rdma.verbs import Device, Route
from tent_rdma.wire import Ready

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(300)]

PATIENCE_S = 60.0


class End:
    """One engine's worth of a channel: a device, a thread that polls and one that answers."""

    def __init__(self, chosen: ChosenDevice, *, passive: bool) -> None:
        self.chosen = chosen
        self.device: Device = by_pyverbs.load().open(chosen.name)
        self.queues = NoticeQueues(self.device, self._watch, self._forget)
        self.worker = SerialQueue("answers")
        self.failed: Future[TransportError] = Future()
        self.channel = NoticeChannel(
            self.device,
            chosen.port,
            self.queues,
            lambda message: message[::-1],
            self.worker.submit,
            lambda _, cause: self.failed.set_result(cause),
            passive=passive,
        )
        self._unused: list[NoticeQueue] = []
        self._stopping = threading.Event()
        self._poller: threading.Thread | None = None

    def route(self, other: End, end: Ready) -> Route:
        return Route(
            self.chosen.port,
            self.chosen.gid_index,
            other.chosen.gid,
            other.device.port(other.chosen.port).lid,
            end.number,
            end.psn,
            min(e.device.port(e.chosen.port).mtu for e in (self, other)),
            retries=6,  # 7 is without end on soft-RoCE
        )

    def close(self) -> None:
        """Close the channel, and all else."""
        assert self.channel.close(PATIENCE_S)
        self._stopping.set()
        if self._poller is not None:
            self._poller.join(PATIENCE_S)
        for queue in self._unused:
            queue.close()
        self.worker.close(PATIENCE_S)
        self.device.close()

    def _watch(self, queue: NoticeQueue) -> None:
        self._poller = threading.Thread(target=self._poll, args=(queue,), daemon=True)
        self._poller.start()

    def _forget(self, queue: NoticeQueue) -> None:
        self._unused.append(queue)

    def _poll(self, queue: NoticeQueue) -> None:
        poll = select.poll()
        poll.register(queue.fileno(), select.POLLIN)
        while not self._stopping.is_set():
            if poll.poll(20):
                queue.woken()


@pytest.fixture
def ends(chosen: tuple[ChosenDevice, ...]) -> Iterator[tuple[End, End]]:
    # Both on one device: packets between the two of the lab would have to leave the machine.
    made = End(chosen[0], passive=False), End(chosen[0], passive=True)
    here, there = made
    mine, theirs = here.channel.prepare(), there.channel.prepare()
    there.channel.connect(there.route(here, mine))
    here.channel.connect(here.route(there, theirs))
    yield made
    here.close()
    there.close()


def test_messages_of_every_length_go_both_ways(ends: tuple[End, End]) -> None:
    here, there = (end.channel for end in ends)
    for length in (0, 1, 1023, 1024, 1025, 4096, EXCHANGE_LIMIT, PAYLOAD_LIMIT):
        message = os.urandom(length)
        assert here.exchange(message).result(PATIENCE_S) == message[::-1]
        assert there.exchange(message).result(PATIENCE_S) == message[::-1]


def test_every_slot_is_used_again_and_again(ends: tuple[End, End]) -> None:
    here, there = (end.channel for end in ends)
    here.exchange(b"").result(PATIENCE_S)
    for round_ in range(4):
        asked = []
        for number in range(SLOTS // 2):
            for channel in (here, there):
                message = f"{round_} {number} {channel.passive}".encode()
                asked.append((message, channel.exchange(message)))
        assert all(future.result(PATIENCE_S) == message[::-1] for message, future in asked)


def test_a_channel_is_two_registrations_one_queue_pair_and_one_completion_queue(
    chosen: tuple[ChosenDevice, ...],
) -> None:
    before = resources(os.getpid())
    end = End(chosen[0], passive=False)
    opened = resources(os.getpid())
    assert (opened["mr"], opened["qp"]) == (before["mr"], before["qp"])
    end.channel.prepare()
    made = resources(os.getpid())
    assert {kind: made[kind] - opened[kind] for kind in ("mr", "qp", "cq", "pd")} == {
        "mr": 2,
        "qp": 1,
        "cq": 1,
        "pd": 0,
    }
    began = time.monotonic()
    end.close()
    assert time.monotonic() - began < PATIENCE_S / 2  # all of it drained
    assert resources(os.getpid()) == before


def test_a_peer_that_is_gone_breaks_the_channel(ends: tuple[End, End]) -> None:
    here, there = ends
    assert here.channel.exchange(b"hello").result(PATIENCE_S) == b"olleh"
    assert there.channel.close(PATIENCE_S)
    future = here.channel.exchange(b"hello")
    with pytest.raises(TransportError):
        future.result(PATIENCE_S)
    assert "a notification failed" in str(here.failed.result(PATIENCE_S))
    assert not there.failed.done()
