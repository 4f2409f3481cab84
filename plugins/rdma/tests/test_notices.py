"""Notification channels over a fabric of fake NICs: messages both ways, failures, and what each end holds."""

from __future__ import annotations

import errno
import random
import secrets
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from channel_rig import Joined, Nic, fabric, join, nothing_left
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tent_rdma.verbs
from tent_core.errors import TransportError
from tent_core.transport import EXCHANGE_LIMIT
from tent_mock.verbs import FakeVerbs, Status
from tent_rdma.notice_queue import CHANNEL_COMPLETIONS
from tent_rdma.notices import ANSWER_S, Patience, Remains, State
from tent_rdma.slots import HEADER_BYTES, PAYLOAD_LIMIT, SLOT_BYTES, SLOTS
from tent_rdma.verbs import Completion, VerbsError
from tent_rdma.wire import Ready

STEPS = ("channel", "completion_queue", "arm", "register", "queue_pair", "post_receive")
"""What `prepare` asks of a device."""


@pytest.fixture
def joined() -> Iterator[Joined]:
    made = join(fabric())
    yield made
    made.verbs.release()
    for channel in (made.here, made.there):
        assert channel.close(0.0)
    for nic in (made.a, made.b):
        nic.device.close()
    assert set(made.verbs.counts.live.values()) == {0}
    assert set(made.verbs.counts.closed_again.values()) <= {0}


# -------------------------------------------------------------------- messages


def test_a_request_is_answered_by_the_other_side(joined: Joined) -> None:
    joined.b.answer = lambda message: message[::-1]
    assert joined.ask(b"hello") == b"olleh"
    assert joined.b.got == [b"hello"]


@pytest.mark.parametrize("length", [0, 1, 4096, EXCHANGE_LIMIT, PAYLOAD_LIMIT])
def test_a_message_of_any_length_that_fits_goes_and_comes(joined: Joined, length: int) -> None:
    message = random.Random(length).randbytes(length)
    assert joined.ask(message) == message


def test_a_message_that_does_not_fit_is_refused_and_the_channel_lives_on(joined: Joined) -> None:
    with pytest.raises(TransportError, match="does not fit into a slot"):
        joined.here.exchange(bytes(PAYLOAD_LIMIT + 1))
    assert joined.ask() == b"hello"


def test_the_passive_side_may_send_from_the_first_message_on(joined: Joined) -> None:
    with pytest.raises(TransportError, match="is connected"):
        joined.there.exchange(b"too soon")
    joined.ask()
    future = joined.there.exchange(b"back")
    joined.settle()
    assert future.result(0) == b"back"
    assert joined.a.got == [b"back"]


def test_many_requests_both_ways_are_matched_with_their_answers(joined: Joined) -> None:
    joined.ask()
    for nic in (joined.a, joined.b):
        nic.answer = lambda message: b"re " + message
    asked = []
    for round_ in range(5):
        for i in range(60):
            name = f"{round_}/{i}".encode()
            channel = joined.here if i % 2 else joined.there
            asked.append((name, channel.exchange(name)))
        joined.settle()
    assert all(future.result(0) == b"re " + name for name, future in asked)


def test_every_slot_may_be_under_way_and_the_next_message_is_refused_at_once(
    joined: Joined,
) -> None:
    joined.ask()
    joined.verbs.hold()
    futures = [joined.here.exchange(bytes([i % 251]) * 1000) for i in range(SLOTS)]
    with pytest.raises(TransportError, match="all 256 slots"):
        joined.here.exchange(b"one more")
    joined.verbs.release()
    joined.settle()
    assert [future.result(0) for future in futures] == [
        bytes([i % 251]) * 1000 for i in range(SLOTS)
    ]
    assert joined.ask() == b"hello"


def test_a_receiver_that_does_not_answer_holds_back_its_peer_and_not_itself(joined: Joined) -> None:
    joined.ask()
    futures = [joined.here.exchange(b"x") for _ in range(SLOTS)]
    joined.a.poll()
    joined.b.poll()  # all wait for the worker of b: no receive is posted
    more = joined.here.exchange(b"waits in the sender's slot")
    joined.b.poll()
    assert len(joined.b.jobs) == SLOTS
    joined.settle()
    assert all(future.done() for future in futures)
    assert more.result(0) == b"waits in the sender's slot"


def test_what_the_engine_refuses_fails_with_its_words_and_the_channel_lives_on(
    joined: Joined,
) -> None:
    def refuse(message: bytes) -> bytes:
        raise TransportError("no such session")

    joined.b.answer = refuse
    with pytest.raises(TransportError, match="refused a notification: no such session"):
        joined.ask()
    joined.b.answer = lambda message: bytes(PAYLOAD_LIMIT + 1)
    with pytest.raises(TransportError, match="beyond"):
        joined.ask()
    joined.b.answer = bytes
    assert joined.ask() == b"hello"


def test_an_answer_that_comes_too_late_changes_nothing(joined: Joined) -> None:
    late = joined.here.exchange(b"late")
    joined.b.poll()
    joined.a.now = ANSWER_S
    next_ = joined.here.exchange(b"next")
    with pytest.raises(TransportError, match="no answer within"):
        late.result(0)
    joined.settle()
    assert next_.result(0) == b"next"


def test_a_request_cannot_be_cancelled_under_its_completion(joined: Joined) -> None:
    future = joined.here.exchange(b"hello")
    assert not future.cancel()
    joined.settle()
    assert future.result(0) == b"hello"


@pytest.mark.parametrize("noise", [b"", b"TENn", b"\x00" * HEADER_BYTES, b"\xff" * 1000])
def test_a_peer_that_sends_what_is_no_message_breaks_the_channel_and_nothing_else(
    joined: Joined, noise: bytes
) -> None:
    joined.ask()
    send = joined.here._memory["send"]
    send._memory[: len(noise)] = noise
    queue_pair = joined.here._queue_pair
    assert queue_pair is not None
    joined.here._outstanding += 1
    queue_pair.post_send(SLOTS, send.start, joined.here._registrations["send"].lkey, len(noise))
    joined.settle()
    assert joined.there.state is State.BROKEN
    assert len(joined.b.failures) == 1
    assert joined.b.got == [b"hello"]


# -------------------------------------------------------------------- failures


@pytest.mark.parametrize("status", [Status.RETRIES_EXCEEDED, Status.REMOTE_INVALID, 13, 99])
def test_a_failed_work_request_fails_all_that_wait_and_tells_the_owner_once(
    joined: Joined, status: int
) -> None:
    joined.ask()
    joined.verbs.hold()
    futures = [joined.here.exchange(b"x") for _ in range(10)]
    joined.verbs.faults.fail_work(status, nic="fake0")
    joined.verbs.release()
    joined.settle()
    assert all("notification failed" in str(future.exception(0)) for future in futures)
    assert len(joined.a.failures) == 1
    assert not joined.here.ready
    with pytest.raises(TransportError, match="is broken"):
        joined.here.exchange(b"x")


def test_a_peer_that_is_gone_is_noticed_by_the_next_message(joined: Joined) -> None:
    joined.ask()
    assert joined.there.close(0.0)
    future = joined.here.exchange(b"x")
    joined.settle()
    with pytest.raises(TransportError, match="transport retries exceeded"):
        future.result(0)


def test_a_post_that_fails_gives_its_slot_back(joined: Joined) -> None:
    joined.verbs.faults.fail_next("post_send", errno.ENOMEM, times=SLOTS + 1)
    for _ in range(SLOTS + 1):
        with pytest.raises(VerbsError):
            joined.here.exchange(b"x")
    assert joined.ask() == b"hello"


def test_a_receive_that_cannot_be_posted_again_breaks_the_channel(joined: Joined) -> None:
    joined.verbs.faults.fail_next("post_receive", errno.EIO)
    joined.here.exchange(b"x")
    joined.settle()
    assert joined.there.state is State.BROKEN


def test_closing_fails_what_waits_and_is_not_told_as_a_failure(joined: Joined) -> None:
    future = joined.here.exchange(b"x")
    assert joined.here.close(0.0)
    with pytest.raises(TransportError, match="was closed"):
        future.result(0)
    assert joined.a.failures == []
    joined.settle()


def test_a_job_that_runs_after_the_close_does_no_harm(joined: Joined) -> None:
    joined.here.exchange(b"x")
    joined.b.poll()
    assert joined.there.close(0.0)
    assert joined.b.work() == 1


def test_it_is_made_once_and_connected_when_it_is_made(joined: Joined) -> None:
    with pytest.raises(TransportError, match="prepared once"):
        joined.here.prepare()
    with pytest.raises(TransportError, match="cannot be connected"):
        joined.here.connect(joined.a.route(joined.b, Ready(number=1, psn=1)))
    assert joined.ask() == b"hello"


# -------------------------------------------------------------------- what is held


def test_nothing_is_made_before_the_first_notification_and_then_two_registrations(
    joined: Joined,
) -> None:
    nic = Nic(fabric(), "fake0")
    channel = nic.channel(passive=False)
    assert nothing_left(nic.verbs)
    channel.prepare()
    counts = nic.verbs.counts
    assert counts.alive("registration") == 2
    assert counts.pinned == 2 * SLOTS * SLOT_BYTES
    assert counts.alive("queue_pair") == 1
    assert counts.receives == SLOTS
    assert channel.close(0.0)
    assert nothing_left(nic.verbs)
    assert nic.verbs.counts.closed["registration"] == 2
    assert nic.verbs.counts.closed_again["registration"] == 0


def test_the_slots_cannot_be_reached_by_one_sided_requests(joined: Joined) -> None:
    nic = joined.verbs.nics["fake0"]
    assert {(r.remote_read, r.remote_write) for r in nic.by_lkey.values()} == {(False, False)}
    assert {(q.remote_read, q.remote_write) for q in nic.queue_pairs.values()} == {(False, False)}


def calls_of(verbs: FakeVerbs) -> dict[str, int]:
    return {step: verbs.counts.calls[step] for step in STEPS}


def steps() -> list[tuple[str, int]]:
    """Every call that `prepare` makes, by operation and number."""
    nic = Nic(fabric(), "fake0")
    channel = nic.channel(passive=False)
    channel.prepare()
    counted = calls_of(nic.verbs)
    channel.close(0.0)
    some = {"post_receive": (0, 1, SLOTS - 1)}
    return [(step, i) for step in STEPS for i in some.get(step, range(counted[step]))]


@pytest.mark.parametrize(("step", "number"), steps())
def test_whatever_step_of_making_it_fails_all_before_it_is_undone_once(
    step: Any, number: int
) -> None:
    nic = Nic(fabric(), "fake0")
    nic.verbs.faults.fail_next(step, errno.ENOMEM, after=number)
    channel = nic.channel(passive=False)
    with pytest.raises(VerbsError) as failure:
        channel.prepare()
    assert failure.value.scarce
    assert nothing_left(nic.verbs)
    counts = nic.verbs.counts
    assert counts.made == counts.closed + Counter(device=1)
    assert set(counts.closed_again.values()) <= {0}
    assert channel.held == 0
    assert len(nic.queues) == len(nic.watched) == 0
    assert nic.failures == []
    again = nic.channel(passive=False)
    again.prepare()
    assert again.close(0.0)


@pytest.mark.parametrize(("step", "number"), steps())
@pytest.mark.parametrize("undo", ["close_registration", "close_queue_pair", "to_error"])
def test_what_cannot_be_undone_is_kept_and_tried_again(step: Any, number: int, undo: Any) -> None:
    nic = Nic(fabric(), "fake0")
    nic.verbs.faults.fail_next(step, errno.ENOMEM, after=number)
    nic.verbs.faults.fail_next(undo, errno.EBUSY)
    remains, channel = Remains(), nic.channel(passive=False)
    with pytest.raises(VerbsError):
        channel.prepare()
    remains.keep(channel)
    assert len(remains) == bool(channel.held)
    if undo == "close_registration" and nic.verbs.counts.alive("registration"):
        assert len(remains) == 1
    nic.verbs.faults.fail_next(undo, 0, times=0)
    assert remains.try_again()
    assert nothing_left(nic.verbs)
    assert channel.held == 0


def test_a_connection_that_cannot_be_made_leaves_nothing_when_it_is_closed() -> None:
    nic = Nic(fabric(), "fake0")
    channel = nic.channel(passive=True)
    end = channel.prepare()
    nic.verbs.faults.fail_next("connect", errno.EINVAL)
    with pytest.raises(VerbsError):
        channel.connect(nic.route(nic, end))
    assert channel.close(0.0)
    assert nothing_left(nic.verbs)


def test_a_queue_pair_goes_before_the_registrations_and_those_before_the_memory(
    joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(thing: Any, method: str, name: str) -> None:
        inner = getattr(thing, method)
        monkeypatch.setattr(thing, method, lambda *a: (order.append(name), inner(*a))[1])

    channel = joined.here
    noted(channel._queue_pair, "to_error", "to error")
    noted(channel._queue_pair, "close", "destroy")
    for what in ("receive", "send"):
        noted(channel._registrations[what], "close", "deregister")
        noted(channel._memory[what], "close", "unmap")
    assert channel.close(0.0)
    assert order == ["to error", "destroy", "deregister", "deregister", "unmap", "unmap"]


def test_a_close_waits_until_what_is_outstanding_has_drained(joined: Joined) -> None:
    joined.ask()
    joined.verbs.hold()
    joined.here.exchange(b"x")
    ended: Future[bool] = Future()
    closing = threading.Thread(target=lambda: ended.set_result(joined.here.close(30.0)))
    gate = joined.verbs.faults.gate("close_queue_pair")
    closing.start()
    assert not gate.entered.wait(0.05)  # held NICs flush nothing
    joined.verbs.release()
    joined.settle()
    assert gate.entered.wait(10)
    assert joined.here._outstanding == 0
    gate.open()
    assert ended.result(10)
    closing.join()


@pytest.mark.parametrize("stuck", ["close_queue_pair", "close_registration"])
def test_memory_that_a_device_may_still_write_to_stays(joined: Joined, stuck: Any) -> None:
    joined.verbs.faults.fail_next(stuck, errno.EBUSY, times=3)
    remains = Remains()
    remains.close(joined.here, 0.0)
    held = joined.here.held
    assert held > 0
    assert len(remains) == 1
    mapped = len(joined.here._memory)
    assert mapped >= len(joined.here._registrations) > 0
    while not remains.try_again():
        pass
    assert joined.here.held == len(remains) == 0


def test_channels_of_a_nic_share_completion_queues_which_go_with_the_last_one() -> None:
    verbs = FakeVerbs(
        tent_rdma.verbs, limits={"max_completions": 5 * CHANNEL_COMPLETIONS}
    )  # four to a queue
    nic = Nic(verbs, "fake0")
    channels = [nic.channel(passive=False) for _ in range(10)]
    for channel in channels:
        channel.prepare()
    assert verbs.counts.alive("completion_queue") == len(nic.watched) == len(nic.queues) == 3
    for channel in channels[:4]:
        assert channel.close(0.0)
    assert len(nic.queues) == 2
    refill = nic.channel(passive=False)
    refill.prepare()
    assert len(nic.queues) == 2
    for channel in (*channels[4:], refill):
        assert channel.close(0.0)
    assert nothing_left(verbs)
    assert verbs.counts.overflows == 0


def test_a_completion_of_a_queue_pair_that_is_gone_is_ignored(joined: Joined) -> None:
    neighbour = joined.b.channel(passive=False)
    neighbour.prepare()
    joined.here.exchange(b"x")
    assert joined.there.close(0.0)
    assert joined.b.poll() > 0
    assert joined.b.got == []
    assert joined.b.failures == []
    assert neighbour.close(0.0)


@pytest.mark.slow
def test_three_thousand_channels_fit_into_ten_thousand_registrations() -> None:
    nic = Nic(fabric(), "fake0")
    nic.verbs.faults.max_registrations = 10_000
    channels = [nic.channel(passive=False) for _ in range(3000)]
    for channel in channels:
        channel.prepare()
    counts = nic.verbs.counts
    assert counts.alive("registration") == 6000
    for channel in channels:
        assert channel.close(0.0)
    assert nothing_left(nic.verbs)
    assert nic.verbs.counts.closed["registration"] == 6000
    assert set(nic.verbs.counts.closed_again.values()) <= {0}


def test_patience_doubles_with_each_failure_up_to_its_longest_and_ends_with_a_success() -> None:
    patience = Patience(1.0, 5.0)
    now, pauses = 0.0, []
    for _ in range(5):
        assert patience.over(now)
        patience.failed(now)
        began = now
        while not patience.over(now):
            now += 0.5
        pauses.append(now - began)
    assert pauses == [1, 2, 4, 5, 5]
    patience.failed(now)
    patience.worked()
    assert patience.over(now)
    patience.failed(now)
    assert patience.over(now + 1)


# -------------------------------------------------------------------- whatever happens


@given(
    seed=st.integers(0, 1 << 32),
    faults=st.lists(
        st.tuples(
            st.sampled_from(["post_send", "post_receive", "work", "port"]), st.integers(0, 40)
        ),
        max_size=2,
    ),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_each_exchange_ends_once_with_its_own_answer_or_an_error(
    seed: int, faults: list[tuple[Any, int]]
) -> None:
    chance = random.Random(seed)
    made = join(fabric())
    made.ask()
    for operation, after in faults:
        if operation == "work":
            made.verbs.faults.fail_work(Status.RETRIES_EXCEEDED, after=after)
        elif operation != "port":
            made.verbs.faults.fail_next(operation, errno.EIO, after=after)
    for nic in (made.a, made.b):
        nic.answer = lambda message: b"re " + message
    asked: list[tuple[bytes, Future[bytes]]] = []
    for number in range(60):
        action = chance.randrange(6)
        if action < 3:
            message = f"{number} ".encode() + secrets.token_bytes(chance.randrange(300))
            try:
                asked.append((message, chance.choice((made.here, made.there)).exchange(message)))
            except TransportError:
                continue
        elif action == 3:
            made.a.poll() if chance.random() < 0.5 else made.b.poll()
        elif action == 4:
            made.a.work() if chance.random() < 0.5 else made.b.work()
        elif any(f == ("port", number) for f in faults):
            made.verbs.nics["fake1"].set_port(False)
    made.settle()
    for message, future in asked:
        if future.done() and future.exception(0) is None:
            assert future.result(0) == b"re " + message
    for channel in (made.here, made.there):
        assert channel.close(0.0)
    assert all(future.done() for _, future in asked)
    assert nothing_left(made.verbs)
    assert len(made.a.failures) <= 1
    assert len(made.b.failures) <= 1


def test_a_completion_after_the_close_is_not_looked_at(joined: Joined) -> None:
    assert joined.there.close(0.0)
    joined.there.completed(Completion(0, 0, 100, 1))
