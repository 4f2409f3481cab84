"""Freeing and closing with work in flight: one test for each row of the table in `docs/transfers.md`."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import tent_core as tent
import tent_mock
from tent_core.plugins import Registry
from tent_core.testing import wait_until
from tent_core.types import Priority, Reach, Status

SIZE = 64 << 10
NEVER_S = 30.0
SOON_S = 0.05


class World:
    """Two engines with a mock transport, and a buffer of 64 KiB on each side."""

    def __init__(self, config: dict[str, Any] | None = None, **capabilities: Any) -> None:
        claimed = {"cancellation": True, "reach": Reach.NETWORK, **capabilities}
        registry = Registry.of(tent_mock.declare("mock", 1000, **claimed))
        base = {
            "transports": {"mock": {"enable": True}},
            "policy": [{"name": "all", "transports": ["mock"]}],
            "log": {"level": "error"},
        }
        self.there = tent.Engine({**base, "notifications": {"queue": 1}}, plugins=registry)
        self.here = tent.Engine({**base, **(config or {})}, plugins=registry)
        self.mock = tent_mock.controller(self.here, "mock")
        self.target = self.there.allocate(SIZE, name="target")
        self.source = self.here.allocate(SIZE, name="source")
        self.source.array[:] = 7
        self.segment = self.here.open_segment(self.there.segment_name)
        self.remote = self.segment.buffer("target")
        self.segment.write(self.source[:1], self.remote[:1])  # connected

    def submit(self, start: int = 1024, **options: Any) -> tent.Batch:
        where = ([start], self.remote, [start], 256)
        return self.segment.submit("write", self.source, *where, **options)

    def under_way(self, **options: Any) -> tent.Batch:
        """A batch that its transport has, and will not end before it is told."""
        before = self.mock.held
        self.mock.plan("hang", at=1)
        batch = self.submit(**options)
        self.mock.wait_held(before + 1)
        return batch

    def close(self) -> None:
        self.mock.clear()
        self.mock.release()
        self.here.close()
        self.there.close()


Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    worlds: list[World] = []

    def made(config: dict[str, Any] | None = None, **capabilities: Any) -> World:
        worlds.append(World(config, **capabilities))
        return worlds[-1]

    yield made
    for world in worlds:
        world.close()


@pytest.fixture
def world(make: Make) -> World:
    return make()


@contextmanager
def in_a_thread(call: Callable[[], Any]) -> Iterator[Future[Any]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(call)


def statuses(batch: tent.Batch) -> set[Status]:
    return {Status(s) for s in batch.status.tolist()}


# -------------------------------------------------------------------- Buffer.unregister


def test_unregister_refuses_what_is_new_and_waits_for_what_is_under_way(world: World) -> None:
    batch = world.under_way()
    with in_a_thread(world.source.unregister) as unregistered:
        wait_until(lambda: not world.source.inflight._open)
        with pytest.raises(tent.BufferRevoked):
            world.submit()
        assert not unregistered.done()
        world.mock.release()
        unregistered.result(NEVER_S)
    assert statuses(batch.wait(NEVER_S)) == {Status.COMPLETED}
    with pytest.raises(tent.StaleHandle):
        world.submit()


def test_unregister_gives_up_at_its_timeout_and_the_memory_stays(world: World) -> None:
    batch = world.under_way()
    with pytest.raises(tent.RevocationTimeout, match="1 transfers of this engine"):
        world.source.unregister(SOON_S)
    assert world.source.array[0] == 7
    world.mock.release()
    batch.wait(NEVER_S)
    world.source.unregister()


def test_unregister_after_a_cancel_waits_until_no_byte_can_move(make: Make) -> None:
    world = make(cancellation=False)
    batch = world.under_way()
    batch.cancel()
    with pytest.raises(tent.RevocationTimeout):
        world.source.unregister(SOON_S)
    world.mock.release()
    world.source.unregister()
    assert batch.done


def test_unregistering_twice_at_once_is_done_once(world: World) -> None:
    batch = world.under_way()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(world.source.unregister) for _ in range(2)]
        wait_until(lambda: not world.source.inflight._open)
        world.mock.release()
        errors = [one.exception(NEVER_S) for one in both]
    assert sum(error is None for error in errors) >= 1
    assert all(error is None or isinstance(error, tent.ClosedError) for error in errors)
    batch.wait(NEVER_S)


def test_the_owner_of_a_buffer_waits_for_a_peers_transfer_to_it(make: Make) -> None:
    world = make(owner_checked=False)
    batch = world.under_way()
    with pytest.raises(tent.RevocationTimeout, match="still in use by"):
        world.target.unregister(SOON_S)
    wait_until(lambda: not world.segment.buffers())
    with pytest.raises(tent.BufferRevoked):
        world.submit()
    world.mock.release()
    assert statuses(batch.wait(NEVER_S)) == {Status.COMPLETED}
    world.target.unregister()


def test_a_buffer_that_is_dropped_stays_registered(world: World) -> None:
    world.there.allocate(4096, name="dropped")
    gc.collect()
    remote = world.segment.buffer("dropped")
    world.segment.write(world.source[:4096], remote)


# -------------------------------------------------------------------- Segment.close


def test_closing_a_segment_leaves_what_is_under_way_alone(world: World) -> None:
    batch = world.under_way()
    world.segment.close()
    world.segment.close()
    with pytest.raises(tent.ClosedError):
        world.submit()
    with pytest.raises(tent.ClosedError):
        world.segment.notify("n")
    world.mock.release()
    assert statuses(batch.wait(NEVER_S)) == {Status.COMPLETED}


def test_a_peer_with_work_under_way_is_not_retired(make: Make) -> None:
    world = make({"peers": {"idle_timeout_s": 0.02}})
    other = world.here.open_segment(world.there.segment_name)
    batch = world.under_way()
    world.segment.close()
    other.close()
    assert not world.segment.peer.retire(0.0, "it is asked to")
    world.mock.release()
    assert statuses(batch.wait(NEVER_S)) == {Status.COMPLETED}
    wait_until(lambda: world.segment.peer.departed is not None)  # nothing keeps it any more


# -------------------------------------------------------------------- Prepared


def test_a_prepared_transfer_outlives_nothing_that_it_uses(make: Make) -> None:
    world = make()
    other = world.here.open_segment(world.there.segment_name)
    by_segment = other.prepare("write", world.source[:8], world.remote[:8])
    other.close()
    with pytest.raises(tent.ClosedError):
        by_segment.run()
    by_buffer = world.segment.prepare("write", world.source[:8], world.remote[:8])
    world.source.unregister()
    with pytest.raises(tent.StaleHandle):
        by_buffer.post()
    world.here.close()
    for call in (by_buffer.run, by_buffer.post):
        with pytest.raises(tent.ClosedError):
            call()


def test_posts_of_a_prepared_transfer_go_on_when_it_is_dropped(world: World) -> None:
    prepared = world.segment.prepare("write", world.source[:8], world.remote[:8])
    world.mock.plan("hang", at=1)
    batch = prepared.post()
    world.mock.wait_held(1)
    del prepared
    gc.collect()
    world.mock.release()
    assert statuses(batch.wait(NEVER_S)) == {Status.COMPLETED}


# -------------------------------------------------------------------- Batch


def test_a_batch_that_nobody_holds_goes_on_and_its_memory_is_kept(world: World) -> None:
    ended = threading.Event()
    batch = world.under_way()
    batch.add_done_callback(lambda _: ended.set())
    del batch
    gc.collect()
    assert world.source.inflight.count == 1
    world.mock.release()
    assert ended.wait(NEVER_S)
    assert world.source.inflight.count == 0
    assert (world.target.array[1024:1280] == 7).all()


def test_a_wait_that_times_out_ends_only_the_wait(world: World) -> None:
    batch = world.under_way()
    with pytest.raises(tent.WaitTimeout):
        batch.wait(SOON_S)
    world.mock.release()
    assert statuses(batch.wait(NEVER_S)) == {Status.COMPLETED}


def test_a_coroutine_that_is_cancelled_ends_only_the_wait(world: World) -> None:
    batch = world.under_way()

    async def run() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(SOON_S):
                await batch
        world.mock.release()
        await batch

    asyncio.run(run())
    assert statuses(batch) == {Status.COMPLETED}


# -------------------------------------------------------------------- Engine.close


def test_closing_an_engine_ends_what_is_under_way(world: World) -> None:
    batch = world.under_way()
    with in_a_thread(lambda: batch.wait(NEVER_S)) as waiting:
        world.here.close()
        with pytest.raises(tent.TransferFailed, match="closed"):
            waiting.result(NEVER_S)
    assert statuses(batch) <= {Status.FAILED, Status.CANCELED}


def test_closing_an_engine_ends_the_calls_that_wait_in_it(world: World) -> None:
    world.mock.plan("hang", at=1)
    with in_a_thread(lambda: world.segment.write(world.source[:8], world.remote[:8])) as writing:
        world.mock.wait_held(1)
        world.here.close()
        with pytest.raises(tent.TransferFailed):
            writing.result(NEVER_S)


def test_closing_an_engine_ends_what_waits_its_turn(make: Make) -> None:
    one = {"low": {"bytes": 1, "tasks": 1}, "promotion_timeout_s": 600}
    world = make({"scheduling": one})
    first = world.under_way(priority=Priority.LOW)
    second = world.submit(priority=Priority.LOW)
    world.here.close()
    for batch in (first, second):
        batch.wait(NEVER_S, check=False)
        assert Status.COMPLETED not in statuses(batch)


def test_closing_an_engine_wakes_who_waits_for_notifications(world: World) -> None:
    with (
        in_a_thread(lambda: list(world.here.notifications())) as iterating,
        in_a_thread(world.here.next_notification) as waiting,
    ):
        wait_until(lambda: iterating.running() and waiting.running())
        world.here.close()
        assert iterating.result(NEVER_S) == []
        with pytest.raises(tent.ClosedError):
            waiting.result(NEVER_S)


def test_closing_an_engine_ends_a_notification_that_is_not_taken(world: World) -> None:
    world.segment.notify("fills the queue")
    with in_a_thread(lambda: world.segment.notify("waits")) as notifying:
        wait_until(lambda: world.segment.peer._life.users)
        world.here.close()
        with pytest.raises(tent.TentError):
            notifying.result(NEVER_S)


def test_closing_an_engine_ends_the_opening_of_a_segment(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        name = f"127.0.0.1:{silent.getsockname()[1]}"
        with in_a_thread(lambda: world.here.open_segment(name, timeout=NEVER_S)) as opening:
            silent.accept()[0].close()
            world.here.close()
            with pytest.raises(tent.TentError):
                opening.result(NEVER_S / 2)


def test_a_process_that_ends_says_goodbye_although_nobody_has_closed_its_engine(
    world: World,
) -> None:
    source = (
        "import sys, tent_core as tent\n"
        "engine = tent.Engine({'transports': {}, 'log': {'level': 'error'}})\n"
        "segment = engine.open_segment(sys.argv[1])\n"
        "segment.notify(engine.segment_name)\n"
    )
    command = [sys.executable, "-c", source, world.there.segment_name]
    subprocess.run(command, check=True, timeout=NEVER_S)
    name = world.there.next_notification(NEVER_S).name
    wait_until(lambda: name not in [peer.name for peer in world.there.peers()])


def test_a_closed_engine_refuses_everything(world: World) -> None:
    world.here.close()
    for call in (
        lambda: world.submit(),
        lambda: world.segment.write(world.source[:8], world.remote[:8]),
        lambda: world.segment.notify("n"),
        lambda: world.source.unregister(),
        lambda: world.here.allocate(64),
        lambda: world.here.open_segment(world.there.segment_name),
        lambda: world.here.next_notification(0.0),
        lambda: world.here.peers(),
    ):
        with pytest.raises(tent.ClosedError):
            call()  # type: ignore[no-untyped-call]
    world.segment.close()
    assert world.here.poll_notifications() == []


def test_closing_twice_at_once_closes_once_and_cancelling_meanwhile_harms_nobody(
    world: World,
) -> None:
    batch = world.under_way()
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(world.here.close) for _ in range(2)]
        calls += [pool.submit(batch.cancel) for _ in range(2)]
        for call in calls:
            call.result(NEVER_S)
    batch.wait(NEVER_S, check=False)
    assert Status.COMPLETED not in statuses(batch)
    batch.cancel()


def test_closing_in_a_callback_on_the_control_thread_is_refused_and_the_engine_lives(
    world: World,
) -> None:
    raised: Future[BaseException] = Future()

    def close(_: tent.Batch) -> None:
        try:
            world.here.close()
        except tent.UsageError as error:
            raised.set_result(error)

    world.segment.notify("fills the queue")
    world.submit(notify="waits").add_done_callback(close)
    wait_until(lambda: world.source.inflight.count == 0)
    world.there.poll_notifications()
    assert "another thread" in str(raised.result(NEVER_S))
    world.segment.write(world.source[:8], world.remote[:8])


def test_what_is_reported_after_the_engine_was_closed_still_ends(world: World) -> None:
    ended: list[int] = []
    world.here.close()
    world.here.dispatcher.later(lambda: ended.append(1))
    assert ended == [1]


def test_a_peer_that_closes_ends_what_is_under_way_to_it(world: World) -> None:
    batch = world.under_way()
    world.there.close()
    with pytest.raises(tent.TransferFailed, match="departed"):
        batch.wait(NEVER_S)
    with pytest.raises(tent.PeerDeparted):
        world.submit()


def test_an_engine_that_is_dropped_stays_open_with_its_memory() -> None:
    registry = Registry.of(tent_mock.declare("mock", 1000))
    engine = tent.Engine({"transports": {"mock": {"enable": True}}}, plugins=registry)
    engine.allocate(4096)
    found = weakref.ref(engine)
    del engine
    gc.collect()
    kept = found()
    assert kept is not None
    kept.close()


def test_an_array_of_a_buffer_outlives_its_engine(world: World) -> None:
    array = world.source.array
    world.here.close()
    assert (np.asarray(array) == 7).all()
