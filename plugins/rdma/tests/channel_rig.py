"""Notification channels over a fabric of fake NICs, whose pollers and workers run when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import tent_rdma.verbs
from tent_core.errors import TransportError
from tent_mock.verbs import FakeVerbs
from tent_rdma.notice_queue import NoticeQueue, NoticeQueues
from tent_rdma.notices import NoticeChannel
from tent_rdma.verbs import Device, Route
from tent_rdma.wire import Ready


@dataclass
class Nic:
    """One NIC of an engine: `poll` is its poller, `work` its worker, each when the test says so."""

    verbs: FakeVerbs
    name: str
    device: Device = field(init=False)
    queues: NoticeQueues = field(init=False)
    watched: list[NoticeQueue] = field(default_factory=list)
    jobs: list[Callable[[], None]] = field(default_factory=list)
    failures: list[TransportError] = field(default_factory=list)
    got: list[bytes] = field(default_factory=list)
    answer: Callable[[bytes], bytes] = bytes
    now: float = 0.0

    def __post_init__(self) -> None:
        self.device = self.verbs.open(self.name)
        self.queues = NoticeQueues(self.device, self.watched.append, self._forget)

    def _forget(self, queue: NoticeQueue) -> None:
        self.watched.remove(queue)
        queue.close()

    def notified(self, message: bytes) -> bytes:
        self.got.append(message)
        return self.answer(message)

    def channel(self, *, passive: bool) -> NoticeChannel:
        return NoticeChannel(
            self.device,
            1,
            self.queues,
            self.notified,
            self.jobs.append,
            lambda _, cause: self.failures.append(cause),
            passive=passive,
            clock=lambda: self.now,
        )

    def route(self, other: Nic, end: Ready) -> Route:
        gid = self.verbs.nics[other.name].gid_text
        return Route(1, 0, gid, 0, end.number, end.psn, 1024)

    def poll(self) -> int:
        return sum(queue.woken() for queue in list(self.watched) if queue.channel.events)  # type: ignore[attr-defined]

    def work(self) -> int:
        jobs = list(self.jobs)
        self.jobs.clear()
        for job in jobs:
            job()
        return len(jobs)


@dataclass
class Joined:
    """A channel between `a`, which began it, and `b`."""

    verbs: FakeVerbs
    a: Nic
    b: Nic
    here: NoticeChannel
    there: NoticeChannel

    def settle(self) -> None:
        """Let pollers and workers do what there is to do."""
        while any([self.a.poll(), self.b.poll(), self.a.work(), self.b.work()]):
            pass

    def ask(self, message: bytes = b"hello") -> bytes:
        future = self.here.exchange(message)
        self.settle()
        return future.result(0)


def fabric() -> FakeVerbs:
    return FakeVerbs(tent_rdma.verbs)


def join(verbs: FakeVerbs) -> Joined:
    a, b = Nic(verbs, "fake0"), Nic(verbs, "fake1")
    here, there = a.channel(passive=False), b.channel(passive=True)
    mine, theirs = here.prepare(), there.prepare()
    there.connect(b.route(a, mine))
    here.connect(a.route(b, theirs))
    return Joined(verbs, a, b, here, there)


def nothing_left(verbs: FakeVerbs) -> bool:
    """But for the open devices."""
    return set(verbs.counts.live.values()) - {verbs.counts.live["device"]} <= {0}
