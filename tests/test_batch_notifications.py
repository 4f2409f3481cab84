"""Notifications about batches: after the data, once, in order of completion, and told also when it fails."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tent_core as tent
import tent_mock
from tent_core.plugins import Registry
from tent_core.testing import wait_until
from tent_core.types import Reach, Status
from tent_mock.controller import Controller

KIB = 1 << 10
SIZE = 64 * KIB
NEVER_S = 30.0


class World:
    """Two engines with the mock transports `first` and `second`, and a buffer of 64 KiB on each side."""

    def __init__(self, there: dict[str, Any] | None = None, here: Any = None) -> None:
        claimed = {"cancellation": True, "reach": Reach.NETWORK}
        registry = Registry.of(
            tent_mock.declare("first", 1001, **claimed),
            tent_mock.declare("second", 1002, **claimed),
        )
        base = {
            "transports": {"first": {"enable": True}, "second": {"enable": True}},
            "policy": [{"name": "both", "transports": ["first", "second"]}],
            "log": {"level": "error"},
        }
        self.there = tent.Engine({**base, **(there or {})}, plugins=registry)
        self.here = tent.Engine({**base, **(here or {})}, plugins=registry)
        self._mocks = [tent_mock.controller(self.here, name) for name in ("first", "second")]
        self.target = self.there.allocate(SIZE, name="target")
        self.source = self.here.allocate(SIZE, name="source")
        self.source.array[:] = np.random.default_rng(5).integers(0, 256, SIZE, np.uint8)
        self.segment = self.here.open_segment(self.there.segment_name)
        self.remote = self.segment.buffer("target")
        self.segment.write(self.source[:1], self.remote[:1])  # connected

    def mock(self, name: str = "first") -> Controller:
        return tent_mock.controller(self.here, name)

    def submit(self, offsets: Any = 0, length: int = 256, **options: Any) -> tent.Batch:
        offsets = np.atleast_1d(np.array(offsets))
        opcode = options.pop("opcode", "write")
        return self.segment.submit(
            opcode, self.source, offsets, self.remote, offsets, length, **options
        )

    def taken(self) -> tent.Notification:
        return self.there.next_notification(NEVER_S)

    def close(self) -> None:
        for mock in self._mocks:
            mock.clear()
            mock.release()
        self.here.close()
        self.there.close()


Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    worlds: list[World] = []

    def made(**configs: Any) -> World:
        worlds.append(World(**configs))
        return worlds[-1]

    yield made
    for world in worlds:
        world.close()


@pytest.fixture
def world(make: Make) -> World:
    return make()


# -------------------------------------------------------------------- when all of it has arrived


def test_a_batch_notifies_once_all_of_it_has_arrived(world: World) -> None:
    batch = world.submit([0, 1024, 4096], notify=("layer 3", b"blocks")).wait(NEVER_S)
    note = world.taken()
    assert (note.name, note.payload, note.ok, note.error) == ("layer 3", b"blocks", True, None)
    for start in (0, 1024, 4096):
        assert (world.target.array[start : start + 256] == world.source.array[start:][:256]).all()
    assert batch.notify_error is None
    assert world.there.poll_notifications() == []


def test_the_calls_that_wait_notify_as_well(world: World) -> None:
    world.segment.write(world.source[:64], world.remote[:64], notify="written")
    world.segment.read(world.source[64:128], world.remote[64:128], notify="read")
    offsets = np.array([0, 512])
    many = (world.source, offsets, world.remote, offsets, 100)
    world.segment.write_many(*many, notify=("many", b"1"))
    world.segment.read_many(*many, notify=("many", b"2"))
    names = [(note.name, note.payload) for note in world.there.poll_notifications()]
    assert names == [("written", b""), ("read", b""), ("many", b"1"), ("many", b"2")]


def test_a_batch_of_nothing_only_notifies(world: World) -> None:
    none = np.array([], np.int64)
    world.segment.submit("write", world.source, none, world.remote, none, none, notify="n").wait(5)
    assert world.taken().name == "n"


def test_each_post_of_a_prepared_transfer_notifies_what_it_is_given(world: World) -> None:
    prepared = world.segment.prepare("write", world.source[:64], world.remote[:64], notify="usual")
    prepared.post(notify=("layer", b"0")).wait(NEVER_S)
    prepared.run(notify=("layer", b"1"))
    prepared.run()
    notes = [(note.name, note.payload) for note in world.there.poll_notifications()]
    assert notes == [("layer", b"0"), ("layer", b"1"), ("usual", b"")]


def test_nothing_is_said_while_part_of_the_data_is_under_way(world: World) -> None:
    world.mock().plan("hang", at=1)
    late = world.submit(0, notify="late")
    world.mock().wait_held(1)
    world.submit(1024, notify="early").wait(NEVER_S)
    assert world.taken().name == "early"
    assert not late.poll()
    assert world.there.poll_notifications() == []
    world.mock().release()
    late.wait(NEVER_S)
    assert world.taken().name == "late"


def test_order_is_order_of_completion_and_plain_ones_keep_their_place(world: World) -> None:
    world.mock().plan("hang", at=1)
    first = world.submit(0, notify="submitted first")
    world.mock().wait_held(1)
    world.segment.notify("plain 1")
    world.submit(1024, notify="second").wait(NEVER_S)
    world.segment.notify("plain 2")
    world.mock().release()
    first.wait(NEVER_S)
    names = [note.name for note in world.there.poll_notifications()]
    assert names == ["plain 1", "second", "plain 2", "submitted first"]


def test_data_that_moves_to_another_transport_is_announced_once(world: World) -> None:
    world.mock().plan("fail", at=1)
    batch = world.submit([0, 1024], notify="moved").wait(NEVER_S)
    assert world.taken().ok
    assert batch.transports() == {"first": 256, "second": 256}
    assert world.there.poll_notifications() == []


def test_a_batch_with_a_notification_can_be_awaited(world: World) -> None:
    async def run() -> tent.Notification:
        async def receive() -> tent.Notification:
            async for note in world.there.aio.notifications():
                return note
            raise AssertionError("the engine closed")

        receiving = asyncio.ensure_future(receive())
        await world.submit(notify="awaited")
        return await receiving

    assert asyncio.run(run()).name == "awaited"


def test_the_memory_is_free_while_the_notification_waits_for_room(make: Make) -> None:
    world = make(there={"notifications": {"queue": 1}})
    world.segment.notify("fills the queue")
    batch = world.submit(notify="waits")
    wait_until(lambda: world.source.inflight.count == 0)
    assert {Status(s) for s in batch.status.tolist()} == {Status.COMPLETED}
    assert not batch.poll()
    world.there.unregister(world.target)
    assert world.taken().name == "fills the queue"
    batch.wait(NEVER_S)
    assert world.taken().name == "waits"


# -------------------------------------------------------------------- when it cannot be announced


def test_a_receiver_that_stays_full_fails_the_notification_and_the_batch_says_that_its_data_arrived(
    make: Make,
) -> None:
    world = make(there={"notifications": {"queue": 1}})
    world.segment.notify("fills the queue")
    batch = world.submit(notify="not taken", timeout=0.05)
    with pytest.raises(tent.NotificationFailed, match=r"have arrived.*'not taken'.*full"):
        batch.wait(NEVER_S)
    assert {Status(s) for s in batch.status.tolist()} == {Status.COMPLETED}
    assert isinstance(batch.notify_error, tent.NotificationFailed)
    assert (world.target.array[:256] == world.source.array[:256]).all()


def test_a_departure_ends_what_is_not_acknowledged(make: Make) -> None:
    world = make(there={"notifications": {"queue": 1}})
    world.segment.notify("fills the queue")
    batch = world.submit(notify="unknown")
    wait_until(lambda: world.source.inflight.count == 0)
    world.there.close()
    with pytest.raises(tent.NotificationFailed, match="departed"):
        batch.wait(NEVER_S)


def test_closing_the_engine_ends_what_is_not_acknowledged(make: Make) -> None:
    world = make(there={"notifications": {"queue": 1}})
    world.segment.notify("fills the queue")
    batch = world.submit(notify="unknown")
    wait_until(lambda: world.source.inflight.count == 0)
    world.here.close()
    with pytest.raises(tent.NotificationFailed):
        batch.wait(NEVER_S)


def test_a_cancelled_notification_is_not_waited_for_any_more(make: Make) -> None:
    world = make(there={"notifications": {"queue": 1}})
    world.segment.notify("fills the queue")
    batch = world.submit(notify="given up")
    wait_until(lambda: world.source.inflight.count == 0)
    batch.cancel()
    batch.cancel()
    with pytest.raises(tent.NotificationFailed, match="cancelled"):
        batch.wait(NEVER_S)
    world.submit(notify="next")
    names = [world.taken().name]
    while names[-1] != "next":
        names.append(world.taken().name)
    assert set(names) <= {"fills the queue", "given up", "next"}
    assert len(set(names)) == len(names)


# -------------------------------------------------------------------- when there is no data


def fail(world: World) -> None:
    for name in ("first", "second"):
        world.mock(name).plan("fail")


def test_a_batch_whose_data_cannot_be_sent_tells_the_receiver(world: World) -> None:
    fail(world)
    batch = world.submit(notify=("layer", b"7"))
    with pytest.raises(tent.TransferFailed):
        batch.wait(NEVER_S)
    note = world.taken()
    assert (note.name, note.payload, note.ok) == ("layer", b"7", False)
    assert "could not move it" in (note.error or "")


def test_one_request_of_many_that_fails_is_a_failure(world: World) -> None:
    world.mock().plan("fail", at=2, fenced=False)
    with pytest.raises(tent.TransferFailed):
        world.submit([0, 1024, 4096], notify="some").wait(NEVER_S)
    assert not world.taken().ok


def test_a_deadline_that_passes_is_told(world: World) -> None:
    world.mock().plan("hang", at=1)
    batch = world.submit(notify="late", timeout=0.05)
    world.mock().wait_held(1)
    world.mock().abandon(None, tent.TransportError("cut"))
    batch.wait(NEVER_S, check=False)
    note = world.taken()
    assert note.ok == (set(batch.status.tolist()) == {int(Status.COMPLETED)})


def test_a_cancelled_batch_tells_the_receiver(world: World) -> None:
    world.mock().plan("hang", at=1)
    batch = world.submit(notify="cancelled")
    world.mock().wait_held(1)
    batch.cancel()
    batch.wait(NEVER_S, check=False)
    assert "cancel" in (world.taken().error or "")


def test_a_call_that_is_refused_before_anything_starts_tells_the_receiver_too(world: World) -> None:
    with pytest.raises(tent.RangeError):
        world.submit(SIZE, notify=("refused", b"1"))
    assert (world.taken().error or "").startswith("the sender could not move it")
    with pytest.raises(tent.RangeError):
        world.segment.write(world.source[:8], world.remote[:9], notify="unequal")
    assert "equal length" in (world.taken().error or "")
    world.there.unregister(world.target)
    wait_until(lambda: world.remote.gone() is not None and not world.segment.buffers())
    with pytest.raises(tent.StaleHandle):
        world.segment.write(world.source[:8], world.remote[:8], notify="stale")
    assert "unregistered" in (world.taken().error or "")


def test_a_refused_call_tells_a_receiver_that_has_been_retired(make: Make) -> None:
    world = make(here={"peers": {"idle_timeout_s": 0.05}})
    wait_until(lambda: world.here.peers()[0].state == "dormant")
    with pytest.raises(tent.RangeError):
        world.submit(SIZE, notify="refused")
    assert not world.taken().ok


def test_the_failure_of_a_batch_does_not_wait_until_it_has_been_told(make: Make) -> None:
    world = make(there={"notifications": {"queue": 1}})
    world.segment.notify("fills the queue")
    fail(world)
    with pytest.raises(tent.TransferFailed):
        world.submit(notify="waits").wait(NEVER_S)
    assert world.taken().name == "fills the queue"
    assert not world.taken().ok


# -------------------------------------------------------------------- what is asked for


@pytest.mark.parametrize(
    "options",
    [
        {"notify": 7},
        {"notify": ("a", b"", b"")},
        {"notify": (b"a", b"")},
        {"notify": ("a", "text")},
        {"notify": ("a", b"x" * (64 << 10))},
        {"notify": "\udc80"},
        {"integrity": "crc32c"},
        {"notify": "a", "integrity": "md5"},
    ],
)
def test_what_is_no_notification_is_refused_and_nothing_moves(
    world: World, options: dict[str, Any]
) -> None:
    before = world.mock().count("request")
    with pytest.raises(tent.UsageError):
        world.submit(**options)
    assert world.mock().count("request") == before
    assert world.there.poll_notifications() == []


def test_the_thread_of_a_transport_is_never_made_to_wait(make: Make) -> None:
    """The receiver is full and the control thread busy: whoever reports the data goes on all the same."""
    world = make(there={"notifications": {"queue": 1}})
    world.segment.notify("fills the queue")
    hold, held = threading.Event(), threading.Event()

    def block() -> None:
        held.set()
        hold.wait(NEVER_S)

    world.here._control._loop.call(block)
    assert held.wait(NEVER_S)
    try:
        world.submit(notify="queued")
        wait_until(lambda: world.source.inflight.count == 0)  # settled, and its memory is free
    finally:
        hold.set()
    assert world.taken().name == "fills the queue"
    assert world.taken().name == "queued"


# -------------------------------------------------------------------- checksums


def test_data_that_is_right_is_verified(world: World) -> None:
    world.submit([0, 256, 4096], notify="sum", integrity="crc32c").wait(NEVER_S)
    note = world.taken()
    assert (note.ok, note.verified) == (True, True)
    assert world.there.stats()["notifications"]["verified"] == 1


def test_what_was_read_is_compared_at_its_owner(world: World) -> None:
    world.target.array[:] = 9
    world.submit([0, 512], opcode="read", notify="sum", integrity="crc32c").wait(NEVER_S)
    assert world.taken().verified


def test_data_that_is_wrong_is_reported_with_its_place_and_counted(make: Make) -> None:
    liar = {"enable": True, "move": False}  # says that it has moved what it has not
    world = make(here={"transports": {"first": liar, "second": liar}})
    batch = world.submit([1024, 8192], notify=("sum", b"kept"), integrity="crc32c").wait(NEVER_S)
    note = world.taken()
    assert batch.notify_error is None
    assert (note.ok, note.verified, note.payload) == (False, False, b"kept")
    assert "checksum mismatch in buffer 'target': 512 bytes in 2 ranges" in (note.error or "")
    assert world.there.stats()["notifications"]["wrong"] == 1


def test_data_is_compared_once_though_its_notification_is_sent_often(make: Make) -> None:
    world = make(there={"notifications": {"queue": 1}})
    world.segment.notify("fills the queue")
    batch = world.submit(notify="sum", integrity="crc32c")
    wait_until(lambda: world.there.stats()["notifications"]["verified"] == 1)
    world.target.array[:256] ^= 255  # its owner goes on before it takes the notification
    assert world.taken().name == "fills the queue"
    batch.wait(NEVER_S)
    assert world.taken().verified
    assert world.there.stats()["notifications"]["verified"] == 1


def test_memory_that_is_gone_cannot_be_verified_and_that_is_said(world: World) -> None:
    sums = world.segment.prepare("write", world.source[:8], world.remote[:8])._checked.sums()
    world.there.unregister(world.target)
    verdict = world.there._integrity.verify(sums.checksums()).result(NEVER_S)
    assert "buffer 0 has been unregistered" in (verdict or "")


def test_ranges_that_overlap_where_they_are_written_are_refused(world: World) -> None:
    with pytest.raises(tent.UsageError, match="overlap"):
        world.submit([0, 100], notify="sum", integrity="crc32c")
    assert not world.taken().ok


def test_more_ranges_than_a_notification_carries_are_refused(world: World) -> None:
    with pytest.raises(tent.UsageError, match="16384 ranges"):
        world.submit(np.arange(0, 2 * 16_385, 2), 1, notify="sum", integrity="crc32c")
    world.submit(np.arange(16_385), 1, notify="joined", integrity="crc32c").wait(NEVER_S)
    assert [world.taken().ok, world.taken().verified] == [False, True]


def test_without_the_library_the_sender_is_told_what_to_install(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "crc32c", None)
    with pytest.raises(tent.UsageError, match=r"pip install 'tent-core\[integrity\]'"):
        world.submit(notify="sum", integrity="crc32c")


def test_without_the_library_the_receiver_says_that_it_did_not_compare(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = world.segment.prepare("write", world.source[:8], world.remote[:8])._checked.sums()
    checksums = sums.checksums()
    monkeypatch.setitem(sys.modules, "crc32c", None)
    verdict = world.there._integrity.verify(checksums).result(NEVER_S)
    assert "not verified" in (verdict or "")
