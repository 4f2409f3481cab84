"""Notifications that a transport carries: which way each goes, with no loss, no double and no disorder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tent_core as tent
import tent_mock
from tent_core.control.carrier import LONGEST_S, NOT_NOW_S
from tent_core.control.contract import NOTIFICATION_LIMIT
from tent_core.plugins import Registry
from tent_core.testing import wait_until
from tent_mock.controller import Controller

Make = Callable[..., tent.Engine]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes engines with the mocks `plain`, and `first` and `second`, which carry notifications."""
    engines: list[tent.Engine] = []

    def made(*preferred: str, **config: Any) -> tent.Engine:
        names = preferred or ("plain", "first", "second")
        registry = Registry.of(
            tent_mock.declare("plain", 1001),
            tent_mock.declare("first", 1002, notifications=True),
            tent_mock.declare("second", 1003, notifications=True),
        )
        base = {
            "transports": {name: {"enable": True} for name in ("plain", "first", "second")},
            "policy": [{"name": "all", "transports": list(names)}],
            "log": {"level": "error"},
            **config,
        }
        engines.append(tent.Engine(base, plugins=registry))
        return engines[-1]

    yield made
    for engine in engines:
        engine.close()


class Joined:
    """`here` has the segment of `there` open, and has written to it over the transports named."""

    def __init__(self, here: tent.Engine, there: tent.Engine, *over: str) -> None:
        self.here, self.there = here, there
        self.segment = here.open_segment(there.segment_name)
        local, target = here.allocate(64), there.allocate(64, name="target")
        for name in over:
            self.segment.write(local, self.segment.buffer(target.name), transport=name)

    def mock(self, name: str = "first") -> Controller:
        return tent_mock.controller(self.here, name)

    def asked(self, name: str = "first") -> int:
        return self.mock(name).count("exchange")

    def carried(self) -> dict[str, int]:
        return self.here.stats()["notifications"]["carried"]  # type: ignore[no-any-return]

    def taken(self, count: int) -> list[str]:
        """The next `count` notifications, and there are no more."""
        names = [self.there.next_notification(10).name for _ in range(count)]
        assert self.there.poll_notifications() == []
        return names


@pytest.fixture
def joined(make: Make) -> Joined:
    return Joined(make(), make(), "first")


def test_a_notification_goes_by_the_preferred_transport_that_carries_them(make: Make) -> None:
    joined = Joined(make(), make(), "plain", "first", "second")
    joined.segment.notify("one", b"payload")
    assert joined.there.next_notification(5).payload == b"payload"
    assert joined.carried() == {"first": 1}
    assert [joined.asked(name) for name in ("plain", "first", "second")] == [0, 1, 0]


def test_the_order_of_the_policy_decides(make: Make) -> None:
    joined = Joined(make("second", "first"), make(), "first", "second")
    joined.segment.notify("one")
    assert joined.carried() == {"second": 1}


def test_a_transport_that_the_policy_does_not_name_carries_none(make: Make) -> None:
    joined = Joined(make("plain"), make(), "plain")
    joined.segment.notify("one")
    assert joined.taken(1) == ["one"]
    assert joined.carried() == {}


def test_a_notification_alone_connects_nothing_and_goes_by_the_control_plane(make: Make) -> None:
    joined = Joined(make(), make())
    joined.segment.notify("one")
    assert joined.taken(1) == ["one"]
    assert joined.mock().count("connect") == 0
    assert joined.carried() == {}


def test_where_the_preferred_one_has_no_channel_the_next_one_is_asked(make: Make) -> None:
    joined = Joined(make(), make(), "second")
    joined.segment.notify("one")
    assert joined.carried() == {"second": 1}


def test_a_channel_that_comes_later_is_found_soon(make: Make) -> None:
    joined = Joined(make(), make())
    joined.segment.notify("before")
    target = joined.there.allocate(64, name="late")
    wait_until(lambda: joined.segment.buffer("late") is not None)
    joined.segment.write(
        joined.here.allocate(64), joined.segment.buffer(target.name), transport="first"
    )

    def carried() -> bool:
        joined.segment.notify("again")
        return bool(joined.carried())

    wait_until(carried, interval=NOT_NOW_S / 4)


def test_the_side_that_made_no_endpoint_uses_what_the_other_side_made(joined: Joined) -> None:
    back = joined.there.open_segment(joined.here.segment_name)
    back.notify("back")
    assert joined.here.next_notification(5).name == "back"
    assert joined.there.stats()["notifications"]["carried"] == {"first": 1}


def test_the_largest_notification_fits(joined: Joined) -> None:
    name = "é" * 1000
    payload = bytes(range(256)) * 256
    payload = payload[: NOTIFICATION_LIMIT - len(name.encode())]
    joined.segment.notify(name, payload)
    assert joined.there.next_notification(5).payload == payload
    assert joined.carried() == {"first": 1}


@pytest.mark.parametrize("trouble", ["fail", "crash", "hang", "drop", "refuse"])
def test_what_the_transport_does_not_carry_the_control_plane_does(
    joined: Joined, trouble: str
) -> None:
    joined.mock().plan(trouble, on="exchange", at=1)
    joined.segment.notify("one", timeout=10)
    joined.segment.notify("two", timeout=10)
    assert joined.taken(2) == ["one", "two"]
    assert joined.mock().release() == (trouble == "hang")
    assert joined.there.poll_notifications() == []  # the late copy is known


def test_after_a_failure_the_transport_is_left_alone_for_a_while(joined: Joined) -> None:
    joined.mock().plan("fail", on="exchange", at=1)
    for i in range(20):
        joined.segment.notify(str(i))
    assert joined.asked() == 1
    assert joined.taken(20) == [str(i) for i in range(20)]


def test_what_arrives_twice_is_taken_once(joined: Joined) -> None:
    joined.mock().plan("twice", on="exchange")
    for i in range(5):
        joined.segment.notify(str(i))
    assert joined.taken(5) == [str(i) for i in range(5)]
    assert joined.carried() == {"first": 5}


def test_a_transport_that_hangs_in_the_call_delays_a_notification_and_no_more(
    joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = joined.here._transports.get("first")
    assert running is not None
    entered, gate = threading.Event(), threading.Event()

    def stuck(*_: object) -> None:
        entered.set()
        gate.wait(30)

    monkeypatch.setattr(running.transport, "exchange", stuck)
    joined.segment.notify("one", timeout=10)
    assert entered.is_set()
    assert joined.taken(1) == ["one"]
    gate.set()


def test_a_full_receiver_holds_back_what_is_carried_as_well(make: Make) -> None:
    joined = Joined(make(), make(notifications={"queue": 1}), "first")
    joined.segment.notify("one")
    with pytest.raises(tent.WaitTimeout, match="was full"):
        joined.segment.notify("two", timeout=LONGEST_S)
    assert joined.there.next_notification(5).name == "one"


def test_a_peer_that_has_forgotten_the_session_says_so_over_the_transport_too(
    joined: Joined,
) -> None:
    sessions = joined.there._control._server._sessions
    (held,) = sessions._live.values()

    async def forget() -> None:
        sessions._live.clear()
        sessions._by_name.clear()

    joined.there._control._loop.run(forget(), 5)
    assert held.info.key == joined.here.key
    with pytest.raises(tent.PeerDeparted):
        joined.segment.notify("one")


def test_the_end_of_the_peer_ends_a_notification_that_a_transport_keeps(joined: Joined) -> None:
    joined.mock().plan("hang", on="exchange")
    joined.there.close()
    with pytest.raises(tent.PeerDeparted):
        joined.segment.notify("one", timeout=30)


@pytest.mark.parametrize("message", [b"\xff" * 20, b"\x12\x02\x08", b""])
def test_a_malformed_message_is_refused_by_the_engine_that_it_reaches(
    joined: Joined, message: bytes
) -> None:
    transport = tent_mock.transport._transport("first", joined.there.key)
    assert transport is not None
    assert transport._context is not None
    if message:
        with pytest.raises(tent.TransportError, match="a malformed message"):
            transport._context.notified(joined.here.key, message)
    else:  # of a session that nobody knows: the answer says so
        assert transport._context.notified(joined.here.key, message)
    joined.segment.notify("still works")
    assert joined.taken(1) == ["still works"]


def test_a_message_of_another_peers_session_is_refused(joined: Joined, make: Make) -> None:
    stranger = make()
    transport = tent_mock.transport._transport("first", joined.there.key)
    assert transport is not None
    assert transport._context is not None
    (session,) = joined.there._control.sessions()
    message = b"\x09" + session.session.to_bytes(8, "little")
    assert transport._context.notified(joined.here.key, message)
    with pytest.raises(tent.TransportError, match="it names a session of"):
        transport._context.notified(stranger.key, message)


def test_a_closed_engine_takes_none(joined: Joined) -> None:
    transport = tent_mock.transport._transport("first", joined.there.key)
    assert transport is not None
    context = transport._context
    assert context is not None
    joined.there.close()
    with pytest.raises(tent.TransportError, match="not open"):
        context.notified(joined.here.key, b"")


trouble = st.sampled_from(["fail", "drop", "refuse", "twice", "delay", None])


@given(steps=st.lists(trouble, max_size=8))
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_becomes_of_messages_each_notification_is_taken_once_and_in_order(
    make: Make, monkeypatch: pytest.MonkeyPatch, steps: list[str | None]
) -> None:
    monkeypatch.setattr("tent_core.control.carrier.FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr("tent_core.control.carrier.NOT_NOW_S", 0.0)
    monkeypatch.setattr("tent_core.control.carrier.LONGEST_PAUSE_S", 0.0)
    monkeypatch.setattr("tent_core.control.carrier.LONGEST_S", 0.02)
    with make() as here, make() as there:
        joined = Joined(here, there, "first")
        for number, step in enumerate(steps, 1):
            if step is not None:
                late = {"seconds": 0.03} if step == "delay" else {}
                joined.mock().plan(step, on="exchange", at=number, **late)
        for i in range(10):
            joined.segment.notify(str(i))
        assert joined.taken(10) == [str(i) for i in range(10)]
        assert joined.asked() == 10


@pytest.mark.parametrize("trouble", ["fail", "crash", "drop", "refuse", "twice"])
def test_one_about_a_batch_arrives_once_and_after_its_data_whichever_way_it_goes(
    joined: Joined, trouble: str
) -> None:
    source, target = joined.here.allocate(64), joined.there.allocate(64, name="data")
    remote = joined.segment.buffer("data")
    joined.mock().plan(trouble, on="exchange")
    for value in range(1, 9):
        source.array[:] = value
        batch = joined.segment.submit("write", source, [0], remote, [0], 64, notify=str(value))
        note = joined.there.next_notification(10)
        assert (note.name, note.ok, set(target.array.tolist())) == (str(value), True, {value})
        batch.wait(10)
    assert joined.there.poll_notifications() == []
