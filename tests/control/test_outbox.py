"""Notifications keep their order and their numbers, whatever becomes of deliveries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from tent_core.control import tent_pb2 as pb
from tent_core.control.outbox import Outbox, Rejected, Undelivered
from tent_core.errors import PeerDeparted, TentError, WaitTimeout

Taken = pb.NotifyResponse.Taken


class Receiver:
    """Takes notifications as a peer's engine does; `trouble` may spoil a delivery before or after that."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room = room
        self.names: list[str] = []
        self.last = 0
        self.deliveries = 0
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None

    async def deliver(self, notes: list[pb.Notification], deadline: float) -> Taken:
        self.deliveries += 1
        await asyncio.sleep(0)
        self.before()
        full = False
        for note in notes:
            if note.sequence > self.last:
                if len(self.names) >= self.room:
                    full = True
                    break
                self.names.append(note.name)
                self.last = note.sequence
        self.after()
        return Taken(through=self.last, full=full)


def outbox(receiver: Receiver) -> Outbox:
    return Outbox("peer", receiver.deliver, lambda work, name: asyncio.ensure_future(work))


async def settled(box: Outbox) -> None:
    """Wait for a delivery that was under way when its caller gave up."""
    if box._pump is not None:
        await asyncio.wait([box._pump], timeout=5)


async def test_many_callers_are_served_in_the_order_of_their_calls_in_few_deliveries() -> None:
    receiver = Receiver()
    box = outbox(receiver)
    await asyncio.gather(*(box.put(str(i), b"", 5) for i in range(1000)))
    assert receiver.names == [str(i) for i in range(1000)]
    assert receiver.deliveries < 20


async def test_what_is_sent_again_because_its_answer_was_lost_arrives_once() -> None:
    receiver = Receiver()
    losses = iter([True, True, False, True, False] + [False] * 100)

    def lose() -> None:
        if next(losses):
            raise Undelivered("lost")

    receiver.after = lose
    box = outbox(receiver)
    await asyncio.gather(*(box.put(str(i), b"", 5) for i in range(10)))
    await box.put("last", b"", 5)
    assert receiver.names == [*map(str, range(10)), "last"]


async def test_a_full_receiver_holds_the_sender_back_until_it_has_room() -> None:
    receiver = Receiver(room=3)
    box = outbox(receiver)
    puts = [asyncio.ensure_future(box.put(str(i), b"", 5)) for i in range(6)]
    done, waiting = await asyncio.wait(puts, timeout=0.05)
    assert len(done) == 3
    receiver.room = 6
    await asyncio.wait_for(asyncio.gather(*waiting), 5)
    assert receiver.names == list("012345")


async def test_a_receiver_that_stays_full_is_an_error_at_the_deadline_and_blocks_nobody_later() -> (
    None
):
    receiver = Receiver(room=0)
    box = outbox(receiver)
    with pytest.raises(
        WaitTimeout, match=r"'first' was not taken by peer within 0\.05 s: its queue"
    ):
        await box.put("first", b"", 0.05)
    await settled(box)
    receiver.room = 1
    await box.put("second", b"", 5)
    assert receiver.names == ["second"]


async def test_one_that_gets_no_answer_says_that_its_fate_is_unknown() -> None:
    receiver = Receiver()

    def break_down() -> None:
        raise Undelivered("cut")

    receiver.before = break_down
    with pytest.raises(WaitTimeout, match="unreachable; whether the last try arrived is unknown"):
        await outbox(receiver).put("a", b"", 0.05)


async def test_a_late_copy_of_one_that_was_given_up_is_a_duplicate() -> None:
    receiver = Receiver()
    box = outbox(receiver)

    def break_down() -> None:
        raise Undelivered("cut")

    receiver.before = break_down
    with pytest.raises(WaitTimeout):
        await box.put("given up", b"", 0.02)
    await settled(box)
    receiver.before = lambda: None
    await box.put("next", b"", 5)
    await receiver.deliver([pb.Notification(sequence=1, name="given up")], 0)
    assert receiver.names == ["next"]


async def test_a_departure_fails_all_that_wait() -> None:
    receiver = Receiver(room=0)
    box = outbox(receiver)
    puts = [asyncio.ensure_future(box.put(str(i), b"", 5)) for i in range(3)]
    await asyncio.sleep(0.01)
    box.fail(PeerDeparted("gone"))
    results = await asyncio.wait_for(asyncio.gather(*puts, return_exceptions=True), 5)
    assert [type(r) for r in results] == [PeerDeparted] * 3


async def test_one_that_the_peer_calls_malformed_is_an_error_and_is_not_sent_again() -> None:
    receiver = Receiver()

    def reject() -> None:
        raise Rejected("too large")

    receiver.before = reject
    with pytest.raises(TentError, match="rejected the notification: too large"):
        await outbox(receiver).put("a", b"", 5)
    assert receiver.deliveries == 1


async def test_a_caller_that_is_cancelled_is_not_delivered_to_any_more() -> None:
    receiver = Receiver(room=0)
    box = outbox(receiver)
    put = asyncio.ensure_future(box.put("a", b"", 5))
    await asyncio.sleep(0.01)
    put.cancel()
    await asyncio.wait([put], timeout=1)
    await settled(box)
    receiver.room = 10
    await box.put("b", b"", 5)
    assert receiver.names == ["b"]


async def posted(box: Outbox, name: str, within: float = 5) -> Future[None]:
    """Post one; its outcome."""
    outcome: Future[None] = Future()
    box.post(pb.Notification(name=name), asyncio.get_running_loop().time() + within, outcome)
    return outcome


async def test_what_is_posted_stands_in_one_line_with_what_is_waited_for() -> None:
    receiver = Receiver()
    box = outbox(receiver)
    first = await posted(box, "first")
    waiting = asyncio.ensure_future(box.put("second", b"", 5))
    await asyncio.sleep(0)
    third = await posted(box, "third")
    await asyncio.wait_for(asyncio.gather(waiting, *map(asyncio.wrap_future, (first, third))), 5)
    assert receiver.names == ["first", "second", "third"]


async def test_what_is_posted_to_a_full_receiver_ends_at_its_deadline() -> None:
    box = outbox(Receiver(room=0))
    late = await posted(box, "late", 0.05)
    with pytest.raises(
        WaitTimeout, match=r"'late' was not taken by peer by its deadline: its queue"
    ):
        await asyncio.wait_for(asyncio.wrap_future(late), 5)
    await settled(box)


async def test_what_was_posted_and_given_up_is_not_sent() -> None:
    receiver = Receiver(room=0)
    box = outbox(receiver)
    given_up = await posted(box, "given up")
    assert given_up.cancel()
    kept = await posted(box, "kept")
    receiver.room = 5
    await asyncio.wait_for(asyncio.wrap_future(kept), 5)
    assert receiver.names == ["kept"]


async def test_what_is_posted_ends_with_the_reason_when_the_peer_takes_no_more() -> None:
    box = outbox(Receiver(room=0))
    outcomes = [await posted(box, name) for name in "abc"]
    box.fail(PeerDeparted("gone"))
    for outcome in outcomes:
        with pytest.raises(PeerDeparted, match="gone"):
            outcome.result(0)
