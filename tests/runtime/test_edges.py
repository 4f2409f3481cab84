"""What happens at the edges of a task: cancelled in the very moment of its turn, connecting for ever, waiting
past its deadline, woken while nobody wants it any more."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import tent_core as tent
import tent_mock
from tent_core import carry, dispatch
from tent_core.alarm import Alarm
from tent_core.dispatch import Drive
from tent_core.plugins import Registry
from tent_core.testing import wait_until
from tent_core.testing.steps import StepAlarm, StepQueue, steps
from tent_core.types import Priority, Status

SIZE = 1 << 16
NEVER_S = 30.0
LOW = Priority.LOW
ONE = {"policy": [{"name": "one", "transports": ["first"]}]}
TURNS = {"scheduling": {"low": {"bytes": 1, "tasks": 1}, "promotion_timeout_s": 600}}


class World:
    """Two engines with the mock transports `first` and `second`; on step time unless `real`."""

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        *,
        real: bool = False,
        partial_progress: bool = False,
    ) -> None:
        drive: Drive | None = None
        self.alarm: StepAlarm
        self.queue: StepQueue
        if not real:
            drive, self.alarm, self.queue = steps()
        clock = None if real else self.alarm
        self.registry = Registry.of(
            *(
                tent_mock.declare(
                    name,
                    number,
                    clock=clock,
                    cancellation=True,
                    partial_progress=partial_progress,
                )
                for name, number in (("first", 1001), ("second", 1002))
            )
        )
        base = {
            "transports": {"first": {"enable": True}, "second": {"enable": True}},
            "policy": [{"name": "both", "transports": ["first", "second"]}],
            "log": {"level": "error"},
        }
        self.there = tent.Engine(base, plugins=self.registry)
        self.here = tent.Engine({**base, **(config or {})}, plugins=self.registry, drive=drive)
        self.there.allocate(SIZE, name="target")
        self.source = self.here.allocate(SIZE)
        self.segment = self.here.open_segment(self.there.segment_name)
        self.remote = self.segment.buffer("target")

    def mock(self, name: str = "first") -> tent_mock.Controller:
        return tent_mock.controller(self.here, name)

    def submit(self, start: int = 0, length: int = 256, **options: Any) -> tent.Batch:
        where = np.array([start])
        return self.segment.submit(
            "write", self.source, where, self.remote, where, length, **options
        )

    def connect(self) -> None:
        for name in ("first", "second"):
            self.segment.peer.endpoint(name)

    def pushed(self, batch: tent.Batch) -> bool:
        """Push on what there is; whether the batch has ended."""
        self.queue.run()
        return batch.done

    def run_for(self, seconds: float) -> None:
        """Let time pass in small steps, and push on what there is after each."""
        for _ in range(int(seconds * 128)):
            self.queue.run()
            self.alarm.advance(1 / 128)
        self.queue.run()

    def under_way(self, name: str = "first") -> tuple[int, int]:
        gate = self.segment.peer.traffic._gates[name]
        return gate.tasks, gate.waiting

    def close(self) -> None:
        for name in ("first", "second"):
            with suppress(LookupError):  # the engine may be closed
                self.mock(name).clear()
                self.mock(name).release()
        self.here.close()
        self.there.close()


Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    worlds: list[World] = []

    def made(config: dict[str, Any] | None = None, **options: bool) -> World:
        worlds.append(World(config, **options))
        return worlds[-1]

    yield made
    for world in worlds:
        world.close()


def ended(batch: tent.Batch) -> Status:
    assert batch.done
    (status,) = {Status(s) for s in batch.status.tolist()}
    return status


# -------------------------------------------------------------------- turns


def test_what_is_cancelled_when_its_turn_has_come_gives_its_room_back(make: Make) -> None:
    world = make(TURNS)
    world.connect()
    world.mock().plan("hang", at=1)
    first, second, third = (world.submit(i * 256, priority=LOW) for i in range(3))
    world.mock().release()
    assert ended(first) is Status.COMPLETED
    second.cancel()  # its turn has come, and nobody has pushed it on yet
    world.queue.run()
    assert ended(second) is Status.CANCELED
    assert ended(third) is Status.COMPLETED
    assert world.under_way() == (0, 0)


def test_what_waits_for_its_turn_times_out_at_its_deadline_also_if_nobody_waits_for_it(
    make: Make,
) -> None:
    world = make(TURNS)
    world.connect()
    world.mock().plan("hang", at=1)
    running = world.submit(priority=LOW)
    late = world.submit(256, priority=LOW, timeout=1.0)
    patient = world.submit(512, priority=LOW, timeout=8.0)
    world.alarm.advance(1.0)
    world.queue.run()
    assert ended(late) is Status.TIMEOUT
    assert "waited its turn" in late.explain_failures()
    assert world.under_way() == (1, 1)
    world.mock().release()
    world.queue.run()
    assert ended(running) is ended(patient) is Status.COMPLETED


def test_one_alarm_looks_after_all_that_wait_for_a_transport(make: Make) -> None:
    world = make(TURNS)
    world.connect()
    before = len(world.alarm._heap)
    for _ in range(20):
        world.mock().plan("hang", at=1)
        running, waiting = (world.submit(priority=LOW) for _ in range(2))
        waiting.cancel()
        world.mock().release()
        world.queue.run()
        assert ended(running) is Status.COMPLETED
    assert len(world.alarm._heap) - before <= 2


def test_alarms_that_were_cancelled_do_not_pile_up() -> None:
    alarm = Alarm("test")
    later = time.monotonic() + NEVER_S
    for _ in range(10_000):
        alarm.at(later, lambda: None).cancel()
    assert len(alarm._heap) <= 64
    alarm.close(1.0)


# -------------------------------------------------------------------- connecting


def _connects_for_ever(world: World, name: str = "first") -> None:
    world.mock(name).plan("hang", on="connect")


def test_a_connection_that_is_never_made_leaves_the_task_to_the_next_transport(make: Make) -> None:
    world = make()
    _connects_for_ever(world)
    batch = world.submit(attempt_timeout=1.0)
    wait_until(lambda: world.mock().held == 1)
    world.alarm.advance(1.0)
    wait_until(lambda: world.pushed(batch))
    assert batch.transports() == {"second": 256}


def test_a_connection_that_is_never_made_ends_a_task_at_its_deadline(make: Make) -> None:
    world = make()
    _connects_for_ever(world)
    batch = world.submit(timeout=1.0)
    world.alarm.advance(1.0)
    world.queue.run()
    assert ended(batch) is Status.TIMEOUT


def test_a_task_that_waits_for_a_connection_is_cancelled_at_once(make: Make) -> None:
    world = make()
    _connects_for_ever(world)
    batch = world.submit()
    batch.cancel()
    world.queue.run()
    assert ended(batch) is Status.CANCELED
    assert world.source.inflight.count == 0


def test_a_peer_that_departs_ends_what_waits_for_a_connection_to_it(make: Make) -> None:
    world = make()
    _connects_for_ever(world)
    batch = world.submit()
    world.segment.peer.depart("scripted")
    world.queue.run()
    assert ended(batch) is Status.FAILED
    assert "scripted" in batch.explain_failures()


def test_a_blocking_call_does_not_wait_for_a_connection_beyond_its_time(make: Make) -> None:
    world = make(real=True)
    _connects_for_ever(world)
    world.segment.write(world.source[:256], world.remote[:256], attempt_timeout=0.05)
    assert world.here.stats()["transports"]["second"]["bytes"] == 256


def test_one_who_gives_up_on_a_connection_does_not_take_it_from_others(make: Make) -> None:
    world = make(real=True)
    world.mock().plan("hang", on="connect", at=1)
    patient = world.submit()
    with pytest.raises(tent.TransportError, match="did not finish connect"):
        world.segment.peer.endpoint("first", 0.02)
    world.mock().wait_held(1)
    world.mock().release()
    assert patient.wait(NEVER_S).transports() == {"first": 256}


# -------------------------------------------------------------------- another turn


def tried(batch: tent.Batch) -> list[str]:
    (failed,) = batch.failures
    return [one.transport for one in failed.tries]


def test_what_stalls_after_the_other_transport_has_refused_is_carried_by_that_one(
    make: Make,
) -> None:
    world = make(partial_progress=True)
    world.connect()
    world.mock("first").plan("refuse", at=1)
    world.mock("second").plan("hang", at=1)
    batch = world.submit(stall=0.5)
    world.run_for(1.0)
    assert batch.transports() == {"first": 256}
    assert world.here.stats()["failovers"] == 2


def test_what_the_only_transport_drops_is_offered_to_it_again_a_little_later(make: Make) -> None:
    world = make(ONE)
    world.connect()
    world.mock().plan("fail", at=1)
    batch = world.submit()
    world.queue.run()
    assert not batch.done
    world.alarm.advance(1 / 64)
    assert world.pushed(batch)
    assert batch.transports() == {"first": 256}


def test_a_blocking_call_survives_failures_of_its_only_transport(make: Make) -> None:
    world = make(ONE, real=True)
    world.mock().plan("fail", times=3)
    world.segment.write(world.source[:256], world.remote[:256], timeout=NEVER_S)
    assert world.mock().count("request") == 4


@pytest.mark.parametrize("most", [0, 1, 5])
def test_there_are_no_more_attempts_than_the_settings_allow_and_each_is_listed(
    make: Make, most: int
) -> None:
    world = make({"failover": {"max_attempts": most}})
    world.connect()
    world.mock("first").plan("fail")
    world.mock("second").plan("refuse")
    batch = world.submit()
    world.run_for(4.0)
    assert ended(batch) is Status.FAILED
    assert len(tried(batch)) == 1 + most
    assert world.mock("first").count("request") + world.mock("second").count("request") == 1 + most


def test_of_those_that_have_another_turn_the_failing_ones_go_last(make: Make) -> None:
    world = make({"failover": {"failures": 1, "pause_s": 600}})
    world.connect()
    world.mock("first").plan("fail")
    first, second = world.submit(), world.submit()
    world.run_for(1.0)
    assert [b.transports() for b in (first, second)] == [{"second": 256}] * 2
    world.mock("second").plan("refuse")
    batch = world.submit()
    world.run_for(1.0)
    assert tried(batch) == ["second", "first", "first", "second"]


def test_a_transport_that_can_never_reach_the_peer_has_no_other_turn(make: Make) -> None:
    world = make()
    world.segment.peer.endpoint("first")
    world.mock("first").plan("fail", times=2)
    world.mock("second").plan("unreachable", on="connect")
    batch = world.submit()
    wait_until(lambda: world.segment.peer.unreachable)
    wait_until(lambda: (world.alarm.advance(1 / 128), world.pushed(batch))[1])
    assert batch.transports() == {"first": 256}
    assert world.mock("second").count("connect") == 1


def test_a_task_that_no_transport_can_ever_carry_fails_without_a_rest(make: Make) -> None:
    world = make()
    for name in ("first", "second"):
        world.mock(name).plan("unreachable", on="connect")
    batch = world.submit()
    wait_until(lambda: world.pushed(batch))
    assert ended(batch) is Status.FAILED
    assert tried(batch) == ["first", "second"]


def test_what_has_no_time_for_a_rest_fails_at_once_with_its_causes(make: Make) -> None:
    world = make(ONE)
    world.connect()
    world.mock().plan("fail")
    batch = world.submit(timeout=1 / 64)
    assert world.pushed(batch)
    assert ended(batch) is Status.FAILED
    assert tried(batch) == ["first"]


def test_a_write_of_unknown_outcome_has_no_other_turn(make: Make) -> None:
    world = make(ONE)
    world.connect()
    world.mock().plan("fail", fenced=False, at=1)
    batch = world.submit()
    assert world.pushed(batch)
    assert "outcome unknown" in batch.explain_failures()


def _rests(world: World) -> tent.Batch:
    world.connect()
    world.mock().plan("fail")
    batch = world.submit()
    world.queue.run()
    assert not batch.done
    return batch


def test_what_rests_is_cancelled_at_once(make: Make) -> None:
    world = make(ONE)
    batch = _rests(world)
    batch.cancel()
    assert world.pushed(batch)
    assert ended(batch) is Status.CANCELED
    world.run_for(0.1)
    assert world.source.inflight.count == 0
    assert world.mock().count("request") == 1


def test_a_peer_that_departs_ends_what_rests_at_once(make: Make) -> None:
    world = make(ONE)
    batch = _rests(world)
    world.segment.peer.depart("scripted")
    assert world.pushed(batch)
    assert ended(batch) is Status.FAILED
    assert "scripted" in batch.explain_failures()
    world.run_for(0.1)


def test_an_engine_that_closes_ends_what_rests(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry, "rest_s", lambda tries: NEVER_S)
    world = make(ONE, real=True)
    world.connect()
    world.mock().plan("fail")
    batch = world.submit(timeout=2 * NEVER_S)
    world.here.close()
    assert ended(batch) is Status.FAILED


# -------------------------------------------------------------------- waking


def _keep_the_patient_thread(world: World) -> threading.Event:
    entered, free = threading.Event(), threading.Event()

    def keep() -> None:
        entered.set()
        free.wait(NEVER_S)

    world.here.dispatcher.patiently(keep)
    entered.wait(NEVER_S)
    return free


def test_a_batch_is_cancelled_at_once_while_its_peer_is_being_woken(make: Make) -> None:
    world = make()
    peer = world.segment.peer
    assert peer.retire(0.0, "test")
    wait_until(lambda: peer.state.name == "DORMANT")
    free = _keep_the_patient_thread(world)
    batch = world.submit()
    batch.cancel()
    assert ended(batch) is Status.CANCELED
    free.set()
    wait_until(lambda: world.here.dispatcher._patient.busy_for() == 0)
    assert world.mock().count("request") == 0


def test_a_peer_that_takes_long_to_wake_does_not_hold_up_the_failover_of_others(make: Make) -> None:
    world = make(real=True)
    world.segment.write(world.source[:1], world.remote[:1])
    free = _keep_the_patient_thread(world)
    world.mock().plan("hang", at=1)
    batch = world.submit()
    world.mock().wait_held(1)
    world.mock().abandon(None, tent.TransportError("cut"))
    assert batch.wait(NEVER_S).transports() == {"second": 256}
    free.set()


# -------------------------------------------------------------------- broken plugins, and the last word


def test_a_plugin_that_keeps_the_progress_thread_does_not_hold_up_others(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "STUCK_S", 0.02)
    world = make(real=True)
    world.connect()
    free = threading.Event()

    def keep() -> None:
        free.wait(NEVER_S)

    world.here.dispatcher.later(keep)
    wait_until(lambda: world.here.dispatcher.progress.busy_for() > 0)
    world.mock().plan("hang", at=1)
    batch = world.submit()
    world.mock().wait_held(1)
    world.mock().abandon(None, tent.TransportError("cut"))
    assert batch.wait(NEVER_S).transports() == {"second": 256}
    free.set()


def test_a_transport_that_raises_in_cancel_harms_nobody(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    world.connect()

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    endpoint = world.segment.peer.endpoints.ready["first"]
    monkeypatch.setattr(endpoint, "cancel", broken)
    world.mock().plan("hang", at=1)
    batch = world.submit()
    batch.cancel()
    world.mock().release()
    assert ended(batch) is Status.COMPLETED


def test_the_error_of_a_task_that_no_transport_could_carry_lists_every_attempt(make: Make) -> None:
    world = make()
    world.connect()
    world.mock("first").plan("fail")
    world.mock("second").plan("refuse")
    batch = world.submit()
    world.run_for(1.0)
    assert ended(batch) is Status.FAILED
    (failed,) = batch.failures
    assert [t.transport for t in failed.tries] == ["first", "second"] * 2
    text = batch.explain_failures()
    assert "first after 0.000 s: transport first was told to fail" in text
    assert "second after 0.000 s: transport second was told to refuse" in text


def test_requests_that_failed_for_different_reasons_are_told_all_of_them(make: Make) -> None:
    world = make()
    world.connect()
    world.mock("first").plan("fail", at=1)
    world.mock("first").plan("refuse")
    world.mock("second").plan("refuse")
    batch = world.segment.submit("write", world.source, [0, 1024], world.remote, [4096, 0], 256)
    world.run_for(1.0)
    assert ended(batch) is Status.FAILED
    assert "told to fail" in batch.explain_failures()
    assert "told to refuse" in batch.explain_failures()


# -------------------------------------------------------------------- with all threads


@pytest.mark.parametrize("seed", range(4))
def test_whatever_threads_do_at_once_every_batch_ends_and_no_room_is_lost(
    make: Make, seed: int
) -> None:
    """Submitters, cancellers, transports that delay, fail and hang, and turns of which there are few."""
    world = make(
        {
            "scheduling": {
                "low": {"bytes": 512, "tasks": 2},
                "slice": "4KiB",
                "promotion_timeout_s": 0.005,
            },
            "failover": {"pause_s": 0.01, "failures": 2},
        },
        real=True,
    )
    for name in ("first", "second"):
        mock = world.mock(name)
        mock.plan("delay", chance=0.3, jitter=0.002)
        mock.plan("fail", chance=0.2)
        mock.plan("refuse", chance=0.1)
        mock.plan("hang", chance=0.1)
    batches: list[tent.Batch] = []

    def submit(number: int) -> None:
        draw = random.Random(f"{seed}/{number}")
        for _ in range(60):
            batch = world.submit(
                draw.randrange(200) * 256,
                draw.choice([256, 9000]),
                priority=draw.choice([LOW, LOW, Priority.HIGH]),
                attempt_timeout=draw.choice([None, 0.002]),
                timeout=draw.choice([0.005, 2.0]),
            )
            batches.append(batch)
            if draw.random() < 0.5:
                batch.cancel()
            batch.poll()

    threads = [threading.Thread(target=submit, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for name in ("first", "second"):
            world.mock(name).release()
        threads[0].join(0.001)
    for name in ("first", "second"):
        world.mock(name).clear()
    wait_until(
        lambda: (
            [world.mock(name).release() for name in ("first", "second")]
            and all(batch.done for batch in batches)
        )
    )
    assert all(Status(s).name != "PENDING" for b in batches for s in b.status.tolist())
    for name in world.segment.peer.traffic._gates:
        assert world.under_way(name) == (0, 0)
    assert world.source.inflight.count == 0
