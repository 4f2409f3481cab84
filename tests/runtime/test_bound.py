"""Prepared requests that are bound to their endpoint: what a call may skip, and what it may not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tent_core as tent
import tent_mock
from tent_core.bound import Bound
from tent_core.life import PeerState
from tent_core.plugins import Registry
from tent_core.testing import wait_until
from tent_core.transport import BoundCall, Resume
from tent_core.work import Work

SIZE = 4096


class World:
    """Two engines with the mocks `first`, which binds, and `second`; one prepared write between them."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        registry = Registry.of(
            tent_mock.declare("first", 1001, owner_checked=False), tent_mock.declare("second", 1002)
        )
        base = {
            "transports": {"first": {"enable": True, "bind": True}, "second": {"enable": True}},
            "policy": [{"name": "both", "transports": ["first", "second"]}],
            "log": {"level": "error"},
        }
        self.there = tent.Engine(base, plugins=registry)
        self.here = tent.Engine({**base, **(config or {})}, plugins=registry)
        self.target = self.there.allocate(SIZE, name="target")
        self.source = self.here.allocate(SIZE, name="source")
        self.segment = self.here.open_segment(self.there.segment_name)
        self.write = self.prepare("write")

    def prepare(self, opcode: str, **options: Any) -> tent.Prepared:
        return self.segment.prepare(
            opcode, self.source[0:SIZE], self.segment.buffer("target")[0:SIZE], **options
        )

    def mock(self, name: str = "first") -> tent_mock.controller.Controller:
        return tent_mock.controller(self.here, name)

    def submitted(self, name: str = "first") -> int:
        return sum(
            call.on == "request" and "bound" not in call.detail for call in self.mock(name).calls
        )

    def fill(self, value: int) -> None:
        self.source.array[:] = value

    def arrived(self) -> set[int]:
        return set(self.target.array.tolist())

    def bind_to(self, call: BoundCall) -> None:
        """Connect, and have what is prepared bound to this call."""
        self.segment.write(self.source[:1], self.segment.buffer("target")[:1])
        self.segment.peer.endpoints.ready["first"].bind = lambda requests: call
        self.write.run()
        assert isinstance(self.write._bound, Bound)

    def stats(self) -> dict[str, Any]:
        return self.here.stats()["transports"]["first"]


Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    worlds: list[World] = []

    def made(config: dict[str, Any] | None = None) -> World:
        worlds.append(World(config))
        return worlds[-1]

    yield made
    for world in worlds:
        world.here.close()
        world.there.close()


@pytest.mark.parametrize("opcode", ["write", "read"])
def test_what_is_prepared_is_bound_when_it_has_run_once(make: Make, opcode: str) -> None:
    world = make()
    prepared = world.prepare(opcode)
    for value in range(1, 6):
        mine, theirs = world.source.array, world.target.array
        (mine if opcode == "write" else theirs)[:] = value
        prepared.run()
        assert (mine == value).all()
        assert (theirs == value).all()
    assert world.submitted() == 1
    assert world.stats()["tasks"] == 5
    assert world.stats()["bytes"] == 5 * SIZE
    (peer,) = world.here.stats()["peers"].values()
    assert peer["transports"]["first"]["tasks"] == 5


def test_calls_of_many_threads_are_all_counted(make: Make) -> None:
    world = make()
    world.write.run()
    threads = [
        threading.Thread(target=lambda: [world.write.run() for _ in range(500)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert world.stats()["tasks"] == 2001


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 5.0},
        {"deadline": time.monotonic() + 600},
        {"notify": "done"},
        {"attempt_timeout": 5.0},
    ],
)
def test_what_has_a_time_of_its_own_or_tells_somebody_is_not_bound(
    make: Make, options: dict[str, Any]
) -> None:
    world = make()
    prepared = world.prepare("write", **options)
    for _ in range(3):
        prepared.run()
    assert world.submitted() == 3


def test_a_notification_or_a_timeout_of_one_post_goes_the_ordinary_way(make: Make) -> None:
    world = make()
    world.write.run()
    world.write.run(timeout=5)
    world.write.run(notify="done")
    assert world.there.next_notification(5).name == "done"
    assert world.submitted() == 3


def test_transfers_that_wait_for_room_are_not_bound(make: Make) -> None:
    world = make({"scheduling": {"low": {"bytes": 1 << 20, "tasks": 8}}})
    prepared = world.prepare("write", priority=tent.Priority.LOW)
    for _ in range(3):
        prepared.run()
    assert world.submitted() == 3


def test_a_transfer_of_one_call_is_not_bound(make: Make) -> None:
    world = make()
    for _ in range(3):
        world.segment.write(world.source[:8], world.segment.buffer("target")[:8])
    assert world.submitted() == 3


# -------------------------------------------------------------------- what must end before memory goes


class Slow:
    """A bound call that waits until it is let go."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.answer: bool | Resume = True

    def __call__(self) -> bool | Resume:
        self.entered.set()
        assert self.go.wait(30)
        return self.answer


def running(world: World, slow: Slow) -> threading.Thread:
    world.bind_to(slow)
    thread = threading.Thread(target=world.write.run)
    thread.start()
    assert slow.entered.wait(30)
    return thread


def test_memory_here_is_not_given_back_while_a_call_uses_it(make: Make) -> None:
    world, slow = make(), Slow()
    thread = running(world, slow)
    freeing = threading.Thread(target=lambda: world.here.unregister(world.source))
    freeing.start()
    wait_until(lambda: not world.source.inflight.is_open)
    assert world.source.inflight.count == 1
    slow.go.set()
    thread.join(30)
    freeing.join(30)
    assert not freeing.is_alive()
    with pytest.raises(tent.StaleHandle):
        world.write.run()


def test_memory_there_is_not_given_back_while_a_call_uses_it(make: Make) -> None:
    world, slow = make(), Slow()
    thread = running(world, slow)
    remote = world.segment.buffer("target")
    freeing = threading.Thread(target=lambda: world.there.unregister(world.target))
    freeing.start()
    wait_until(lambda: not remote.inflight.is_open)
    assert remote.inflight.count == 1
    assert freeing.is_alive()
    slow.go.set()
    freeing.join(30)
    assert not freeing.is_alive()
    thread.join(30)
    with pytest.raises(tent.StaleHandle):
        world.write.run()


def test_a_peer_that_departs_is_released_when_the_call_has_ended(make: Make) -> None:
    world, slow = make(), Slow()
    thread = running(world, slow)
    peer = world.segment.peer
    peer.depart("for the test")
    assert peer.state is PeerState.DEPARTED
    assert peer._life.users == 1
    slow.go.set()
    thread.join(30)
    assert peer._life.users == 0
    with pytest.raises(tent.PeerDeparted):
        world.write.run()


@pytest.mark.parametrize("what", ["segment", "engine"])
def test_nothing_is_carried_once_its_segment_or_engine_is_closed(make: Make, what: str) -> None:
    world = make()
    world.write.run()
    world.write.run()
    world.fill(7)
    (world.segment if what == "segment" else world.here).close()
    with pytest.raises(tent.ClosedError):
        world.write.run()
    assert world.arrived() == {0}


# -------------------------------------------------------------------- idle


def test_a_peer_that_only_bound_calls_use_is_not_idle(make: Make) -> None:
    world = make({"peers": {"idle_timeout_s": 3600}})
    peer = world.segment.peer
    for _ in range(3):
        world.write.run()
    before = peer._life.last_used
    world.write.run()
    assert peer.idle_for() is not None
    assert peer._life.last_used > before


def test_a_peer_is_not_retired_under_a_call_and_is_when_it_has_ended(make: Make) -> None:
    world, slow = make({"peers": {"idle_timeout_s": 3600}}), Slow()
    thread = running(world, slow)
    peer = world.segment.peer
    assert not peer.retire(0.0, "for the test")
    slow.go.set()
    thread.join(30)
    assert peer.retire(0.0, "for the test")
    wait_until(lambda: peer.state is PeerState.DORMANT)
    world.fill(9)
    world.write.run()  # which wakes it
    world.write.run()
    assert world.arrived() == {9}
    assert isinstance(world.write._bound, Bound)
    assert world.write._bound.lease.is_open


# -------------------------------------------------------------------- what does not end at once


def test_a_call_that_cannot_goes_the_ordinary_way(make: Make) -> None:
    world = make()
    world.bind_to(lambda: False)
    world.fill(5)
    world.write.run()
    assert world.arrived() == {5}
    assert world.submitted() == 3  # the one that connects, the one that binds, and this one


def test_what_a_call_has_started_is_waited_for_and_counted_once(make: Make) -> None:
    world = make()
    given: list[Work] = []
    world.bind_to(lambda: given.append)
    tasks = world.stats()["tasks"]
    thread = threading.Thread(target=world.write.run)
    thread.start()
    wait_until(lambda: bool(given))
    assert thread.is_alive()
    freeing = threading.Thread(target=lambda: world.here.unregister(world.source))
    freeing.start()
    wait_until(lambda: not world.source.inflight.is_open)
    given[0].complete()
    thread.join(30)
    freeing.join(30)
    assert not thread.is_alive()
    assert not freeing.is_alive()
    assert world.stats()["tasks"] == tasks + 1


def test_what_a_call_has_started_and_lost_moves_to_another_transport(make: Make) -> None:
    world = make()
    world.bind_to(lambda: lambda work: work.fail(tent.TransportError("cut")))
    world.fill(6)
    world.write.run()
    assert world.arrived() == {6}
    assert world.submitted("second") == 1


def test_what_a_call_has_started_is_not_moved_while_it_may_still_write(make: Make) -> None:
    world = make()
    world.bind_to(lambda: lambda work: work.fail(tent.TransportError("cut"), fenced=False))
    with pytest.raises(tent.TransferFailed, match="cut"):
        world.write.run()
    assert world.submitted("second") == 0


def test_a_call_that_refuses_moves_on_and_one_that_breaks_has_an_unknown_outcome(
    make: Make,
) -> None:
    def refuse() -> bool:
        raise tent.TransportError("no room")

    def break_down() -> bool:
        raise ValueError("a mistake of the plugin's")

    world = make()
    world.bind_to(refuse)
    world.write.run()
    assert world.submitted("second") == 1
    other = make()
    other.bind_to(break_down)
    with pytest.raises(tent.TransferFailed, match="a mistake of the plugin's"):
        other.write.run()


def test_a_transport_that_cannot_bind_does_as_well(make: Make) -> None:
    def bind(requests: object) -> BoundCall:
        raise ValueError("a mistake of the plugin's")

    world = make()
    world.segment.write(world.source[:1], world.segment.buffer("target")[:1])
    world.segment.peer.endpoints.ready["first"].bind = bind
    for _ in range(3):
        world.write.run()
    assert world.submitted() == 4


def test_a_transport_in_trouble_is_not_called_directly(make: Make) -> None:
    world = make()
    world.write.run()
    world.write.run()
    before = world.submitted()
    world.mock().plan("fail")
    world.write.run()  # goes to the second
    world.mock().clear()
    assert world.segment.peer.traffic.troubled
    world.write.run()
    assert world.submitted() + world.submitted("second") >= before + 2


def test_an_interrupted_call_leaves_no_use_behind(make: Make) -> None:
    def interrupted() -> bool:
        raise KeyboardInterrupt

    world = make()
    world.bind_to(interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.write.run()
    assert world.write._bound.lease.count == 0
    world.here.unregister(world.source)


def test_arrays_of_a_bound_request_are_the_applications_memory(make: Make) -> None:
    world = make()
    memory = np.zeros(SIZE, np.uint8)
    source = world.here.register(memory)
    prepared = world.segment.prepare("write", source[:], world.segment.buffer("target")[:])
    prepared.run()
    memory[:] = 3
    prepared.run()
    assert world.arrived() == {3}
