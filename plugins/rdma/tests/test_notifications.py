"""Which channel a message takes, when one is made, and that each is closed by whoever it belongs to."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
from channel_rig import Nic, fabric, nothing_left

from tent_core.descriptor import PeerKey
from tent_core.errors import TransportError
from tent_core.log import Logger
from tent_core.testing.waiting import wait_until
from tent_mock.verbs import FakeVerbs, Status
from tent_rdma.notices import NoticeChannel, State
from tent_rdma.notifications import Notifications
from tent_rdma.slots import SLOTS
from tent_rdma.verbs import VerbsError
from tent_rdma.wire import Ready


class Engine:
    """One engine's notifications on one NIC; its workers' jobs are run by `work`."""

    def __init__(self, verbs: FakeVerbs, nic: str) -> None:
        self.nic = Nic(verbs, nic)
        self.key = PeerKey(f"{nic}:1", nic.encode().ljust(16))
        self.jobs: list[Callable[[], None]] = []
        self.got: list[tuple[PeerKey, bytes]] = []
        self.now = 0.0
        self.notifications = Notifications(
            self._notified,
            lambda job: self.jobs.append(job) is None,
            Logger(lambda *_: None),
            drain_timeout=0.0,
            clock=lambda: self.now,
        )

    def _notified(self, peer: PeerKey, message: bytes) -> bytes:
        self.got.append((peer, message))
        return message[::-1]

    def opener(self, other: Engine) -> Callable[[], NoticeChannel]:
        """What an endpoint for `other` attaches."""

        def open() -> NoticeChannel:
            channel = self._make(other, passive=False)
            try:
                mine = channel.prepare()
                channel.connect(self.nic.route(other.nic, other.accept(self, mine)))
            except BaseException:
                self.notifications.discard(channel)
                raise
            return channel

        return open

    def accept(self, other: Engine, theirs: Ready) -> Ready:
        """The bootstrap of the other side."""
        channel = self._make(other, passive=True)
        try:
            mine = channel.prepare()
            channel.connect(self.nic.route(other.nic, theirs))
        except BaseException:
            self.notifications.discard(channel)
            raise
        self.notifications.accept(other.key, channel)
        return mine

    def _make(self, other: Engine, *, passive: bool) -> NoticeChannel:
        nic = self.nic
        return self.notifications.make(other.key, nic.device, 1, nic.queues, passive=passive)

    def work(self) -> int:
        jobs = list(self.jobs)
        self.jobs.clear()
        for job in jobs:
            job()
        return len(jobs)

    def stop(self) -> bool:
        return self.notifications.stop(0.0)


class Pair:
    def __init__(self) -> None:
        self.verbs = fabric()
        self.a, self.b = Engine(self.verbs, "fake0"), Engine(self.verbs, "fake1")
        self.a_to_b, self.b_to_a = self.a.opener(self.b), self.b.opener(self.a)

    def step(self) -> None:
        for engine in (self.a, self.b):
            engine.nic.poll()
            engine.work()

    def end(self, future: Future[bytes] | None) -> bytes:
        """What a future ends with while everybody works."""
        assert future is not None

        def done() -> bool:
            self.step()
            return future.done()

        wait_until(done)
        return future.result(0)

    def ask(self, message: bytes = b"hello") -> bytes:
        return self.end(self.a.notifications.exchange(self.b.key, message))

    def registrations(self) -> dict[str, int]:
        return {name: nic.counts.alive("registration") for name, nic in self.verbs.nics.items()}


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    made.a.notifications.attach(made.b.key, made.a_to_b)
    yield made
    for engine in (made.a, made.b):
        engine.work()
        assert engine.stop()
    assert nothing_left(made.verbs)


def test_the_first_message_makes_both_sides_ready_and_goes_over_them(pair: Pair) -> None:
    assert nothing_left(pair.verbs)
    assert pair.ask() == b"olleh"
    assert pair.b.got == [(pair.a.key, b"hello")]
    assert pair.registrations() == {"fake0": 2, "fake1": 2}
    assert (len(pair.a.notifications), len(pair.b.notifications)) == (1, 1)
    assert pair.ask(b"again") == b"niaga"
    assert pair.registrations() == {"fake0": 2, "fake1": 2}


def test_without_an_endpoint_there_is_no_channel(pair: Pair) -> None:
    assert pair.b.notifications.exchange(pair.a.key, b"x") is None
    assert pair.b.jobs == []


def test_the_other_side_uses_the_channel_that_was_opened_to_it_and_makes_none(pair: Pair) -> None:
    pair.b.notifications.attach(pair.a.key, pair.b_to_a)
    pair.ask()
    assert pair.end(pair.b.notifications.exchange(pair.a.key, b"back")) == b"kcab"
    assert pair.registrations() == {"fake0": 2, "fake1": 2}
    pair.b.notifications.detach(pair.a.key, pair.b_to_a)


def test_both_sides_may_begin_at_once(pair: Pair) -> None:
    pair.b.notifications.attach(pair.a.key, pair.b_to_a)
    there = pair.a.notifications.exchange(pair.b.key, b"there")
    back = pair.b.notifications.exchange(pair.a.key, b"back")
    assert pair.end(there) == b"ereht"
    assert pair.end(back) == b"kcab"
    assert pair.registrations() == {"fake0": 4, "fake1": 4}


def test_while_a_channel_is_being_made_further_messages_go_elsewhere(pair: Pair) -> None:
    first = pair.a.notifications.exchange(pair.b.key, b"first")
    assert pair.a.notifications.exchange(pair.b.key, b"second") is None
    assert len(pair.a.jobs) == 1
    assert pair.end(first) == b"tsrif"


def test_no_memory_sends_the_message_elsewhere_and_it_is_not_tried_again_for_a_while(
    pair: Pair,
) -> None:
    pair.verbs.faults.max_registrations = 3
    with pytest.raises(VerbsError, match="Cannot allocate memory"):
        pair.ask()
    assert nothing_left(pair.verbs)
    assert pair.a.notifications.exchange(pair.b.key, b"x") is None
    pair.a.now = 1.0
    with pytest.raises(VerbsError):
        pair.ask()
    pair.verbs.faults.max_registrations = None
    pair.a.now = 2.0
    assert pair.a.notifications.exchange(pair.b.key, b"x") is None
    pair.a.now = 3.0
    assert pair.ask() == b"olleh"


def test_a_channel_that_breaks_is_closed_and_another_is_made_after_a_while(pair: Pair) -> None:
    pair.ask()
    pair.verbs.faults.fail_work(Status.RETRIES_EXCEEDED, nic="fake0")
    with pytest.raises(TransportError, match="a notification failed"):
        pair.ask()
    pair.step()
    assert pair.registrations()["fake0"] == 0
    assert pair.a.notifications.exchange(pair.b.key, b"x") is None
    pair.a.now = 1.0
    assert pair.ask() == b"olleh"
    assert pair.registrations() == {
        "fake0": 2,
        "fake1": 2,
    }  # the old end of b went with the new one


def test_closing_the_endpoint_closes_what_it_made_and_leaves_what_the_peer_made(pair: Pair) -> None:
    pair.b.notifications.attach(pair.a.key, pair.b_to_a)
    there = pair.a.notifications.exchange(pair.b.key, b"there")
    back = pair.b.notifications.exchange(pair.a.key, b"back")
    pair.end(there)
    pair.end(back)
    pair.a.notifications.detach(pair.b.key, pair.a_to_b)
    assert pair.registrations()["fake0"] == 2
    assert pair.ask(b"by the other") == b"rehto eht yb"
    pair.a.notifications.release(pair.b.key)
    assert pair.registrations()["fake0"] == 0
    assert pair.a.notifications.exchange(pair.b.key, b"x") is None


def test_an_endpoint_that_is_closed_while_its_channel_is_made_gets_none(pair: Pair) -> None:
    future = pair.a.notifications.exchange(pair.b.key, b"x")
    pair.a.notifications.detach(pair.b.key, pair.a_to_b)
    with pytest.raises(TransportError):
        pair.end(future)
    assert pair.registrations()["fake0"] == 0


def test_an_old_endpoint_does_not_close_what_a_new_one_made(pair: Pair) -> None:
    new = pair.a.opener(pair.b)
    pair.a.notifications.attach(pair.b.key, new)
    pair.ask()
    pair.a.notifications.detach(pair.b.key, pair.a_to_b)
    assert pair.ask() == b"olleh"


def test_when_every_slot_is_under_way_the_message_goes_elsewhere_and_the_channel_stays(
    pair: Pair,
) -> None:
    pair.ask()
    pair.verbs.hold()
    futures = [pair.a.notifications.exchange(pair.b.key, b"x") for _ in range(SLOTS)]
    assert None not in futures
    assert pair.a.notifications.exchange(pair.b.key, b"x") is None
    pair.verbs.release()
    assert pair.end(futures[-1]) == b"x"
    assert pair.ask() == b"olleh"


def test_what_could_not_be_freed_is_tried_again_when_the_next_channel_is_made(pair: Pair) -> None:
    pair.ask()
    pair.verbs.faults.fail_next("close_registration", errno.EBUSY, nic="fake0")
    pair.a.notifications.detach(pair.b.key, pair.a_to_b)
    assert pair.registrations()["fake0"] == 1
    assert len(pair.a.notifications) == 1
    pair.a.notifications.attach(pair.b.key, pair.a_to_b)
    assert pair.ask() == b"olleh"
    assert pair.registrations()["fake0"] == 2
    assert len(pair.a.notifications) == 1


def test_what_stops_takes_and_makes_nothing_any_more(pair: Pair) -> None:
    pair.ask()
    assert pair.a.stop()
    assert pair.a.stop()
    assert pair.registrations()["fake0"] == 0
    assert pair.a.notifications.exchange(pair.b.key, b"x") is None
    pair.b.opener(pair.a)
    theirs = Ready(number=1, psn=1)
    pair.a.accept(pair.b, theirs)
    assert pair.registrations()["fake0"] == 0


def test_a_stop_that_finds_one_being_made_says_so_and_it_is_closed_when_it_is(pair: Pair) -> None:
    future = pair.a.notifications.exchange(pair.b.key, b"x")
    assert not pair.a.stop()
    with pytest.raises(TransportError):
        pair.end(future)
    assert pair.registrations()["fake0"] == 0


def test_nothing_is_kept_of_peers_that_have_gone(pair: Pair) -> None:
    pair.ask()
    pair.a.notifications.detach(pair.b.key, pair.a_to_b)
    pair.b.notifications.release(pair.a.key)
    assert pair.a.notifications._peers == pair.b.notifications._peers == {}
    assert len(pair.a.notifications) == len(pair.b.notifications) == 0


def test_a_channel_that_breaks_while_it_is_made_is_closed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = pair.a_to_b
    made: list[NoticeChannel] = []

    def open() -> NoticeChannel:
        channel = inner()
        made.append(channel)
        channel.fail(TransportError("it broke"))
        return channel

    pair.a.notifications.attach(pair.b.key, open)
    with pytest.raises(TransportError):
        pair.ask()
    assert made[0].state is State.CLOSED
    assert made[0].held == 0
