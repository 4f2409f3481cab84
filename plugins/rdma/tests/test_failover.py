"""Rails that fail: work moves only when nothing of the old attempt can be written any more."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable

import pytest
from rig import (
    KIB,
    ONE_QUEUE_PAIR,
    QUEUE_PAIRS,
    Rig,
    completed,
    connected,
    ended,
    fabric,
    transport,
)

import tent_rdma.verbs
from tent_core.errors import TransportError
from tent_core.testing.harness import Row, Submitted
from tent_core.testing.waiting import wait_until
from tent_core.types import Opcode, Status
from tent_rdma import farewells
from tent_rdma.wire import Close, Open

READ, WRITE = Opcode.READ, Opcode.WRITE
SIZE = 512 * KIB
COMPLETED = Status.COMPLETED
RETRIES_EXCEEDED, LOCAL_FAULT = 12, 2


def rows(rig: Rig) -> tuple[list[Row], Callable[[Opcode], bool]]:
    """Many requests between two buffers, and whether the bytes are right after them."""
    here, ours = rig.buffer(rig.a, SIZE)
    there, theirs = rig.buffer(rig.b, SIZE)
    kept = {WRITE: ours.copy(), READ: theirs.copy()}

    def right(opcode: Opcode) -> bool:
        return bool((ours == kept[opcode]).all() and (theirs == kept[opcode]).all())

    return [(here, i * KIB, there, i * KIB, KIB) for i in range(SIZE // KIB)], right


@pytest.mark.parametrize("opcode", [READ, WRITE])
@pytest.mark.parametrize("status", [RETRIES_EXCEEDED, LOCAL_FAULT])
def test_a_port_that_goes_down_moves_its_work_to_the_other_rail(
    opcode: Opcode, status: int
) -> None:
    with connected() as rig:
        requests, right = rows(rig)
        rig.work_through()
        rig.verbs.hold()
        submitted = rig.submit(opcode, *requests)
        rig.verbs.step(100)
        rig.verbs.nics["fake0"].set_port(False, status=status)
        rig.verbs.release()
        completed(submitted)
        assert right(opcode)
        assert rig.wire.asked["close"] >= 1


def test_a_port_that_hangs_is_left_when_its_event_comes_and_not_when_retries_are_used_up() -> None:
    with connected() as rig:
        requests, right = rows(rig)
        rig.work_through()
        rig.verbs.nics["fake0"].hangs = True  # before anybody is told
        submitted = rig.submit(WRITE, *requests)
        assert not submitted.work.finished
        rig.verbs.nics["fake0"].set_port(False, hang=True)
        completed(submitted)
        assert right(WRITE)


def test_a_device_that_breaks_moves_its_work_to_the_other_rail() -> None:
    with connected() as rig:
        requests, right = rows(rig)
        rig.work_through()
        rig.verbs.hold()
        submitted = rig.submit(WRITE, *requests)
        rig.verbs.nics["fake0"].fatal()
        rig.verbs.release()
        completed(submitted)
        assert right(WRITE)
        completed(rig.submit(WRITE, *requests))


@pytest.mark.parametrize("operation", ["poll", "take", "arm"])
def test_a_completion_queue_that_is_lost_costs_the_rail_and_not_the_work(operation: str) -> None:
    with connected() as rig:
        requests, right = rows(rig)
        rig.work_through()
        rig.verbs.hold()
        rig.verbs.faults.fail_next(operation, errno.EIO, times=10_000, nic="fake0")  # type: ignore[arg-type]
        submitted = rig.submit(WRITE, *requests)
        rig.verbs.release()
        completed(submitted)
        assert right(WRITE)
        assert rig.verbs.nics["fake1"].counts.posted > 0
        completed(rig.submit(READ, *requests))


def test_an_end_that_the_peer_has_destroyed_is_replaced() -> None:
    with connected() as rig:
        requests, right = rows(rig)
        rig.work_through()
        rig.b.transport.release(rig.a.segment.snapshot.key, "it was thought to be gone")
        assert rig.b.transport.holdings()["passive_connections"] == 0
        # The work finds both rails broken; what comes afterwards finds new connections.
        ended(rig.submit(WRITE, *requests))
        completed(rig.submit(WRITE, *requests))
        assert right(WRITE)


def test_a_write_is_not_posted_again_before_the_peer_has_destroyed_its_end() -> None:
    with connected() as rig:
        requests, right = rows(rig)
        rig.work_through()
        gate, closing = threading.Event(), threading.Event()

        def intercept(message: object, ask: Callable[[], bytes]) -> bytes:
            if isinstance(message, Close):
                closing.set()
                assert gate.wait(30)
            return ask()

        rig.wire.intercept = intercept
        fake0, fake1 = rig.verbs.nics.values()
        rig.verbs.hold()
        submitted = rig.submit(WRITE, *requests)
        other = fake1.counts.posted
        fake0.set_port(False)
        fake0.release()
        assert closing.wait(30)
        assert fake1.counts.posted == other
        assert not submitted.work.finished
        gate.set()
        rig.verbs.release()
        completed(submitted)
        assert right(WRITE)


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_without_confirmation_a_read_moves_and_a_write_fails_with_its_outcome_unknown(
    opcode: Opcode,
) -> None:
    with connected() as rig:
        requests, right = rows(rig)
        rig.work_through()
        rig.wire.refuse(Close)
        rig.verbs.hold()
        submitted = rig.submit(opcode, *requests)
        fake0, fake1 = rig.verbs.nics.values()
        posted = fake0.counts.posted + fake1.counts.posted
        fake0.set_port(False)
        rig.verbs.release()
        if opcode is READ:
            completed(submitted)
            assert right(opcode)
            return
        work = ended(submitted)
        assert work.unfenced
        assert "did not confirm" in str(work.causes[0].cause)
        assert (
            fake0.counts.posted + fake1.counts.posted <= posted + QUEUE_PAIRS
        )  # the drain markers
        assert (work.status == 4).sum() + (work.status == 6).sum() == len(work)


def test_what_was_held_up_on_a_failed_rail_cannot_be_written_after_it_moved() -> None:
    with connected() as rig:
        here, ours = rig.buffer(rig.a, 64 * KIB)
        there, theirs = rig.buffer(rig.b, 64 * KIB)
        rig.work_through()
        fake0, fake1 = rig.verbs.nics.values()
        fake0.hold()  # its requests are under way, and stay so
        fake1.hold()
        old = ours.copy()
        submitted = rig.submit(WRITE, *((here, i * KIB, there, i * KIB, KIB) for i in range(64)))
        fake0.set_port(False, hang=True)
        fake1.release()
        fake0.release()
        completed(submitted)
        assert (theirs == old).all()
        ours[:] = 0
        theirs[:] = 1
        fake0.set_port(True)
        rig.verbs.step(1000)
        assert (theirs == 1).all()


def test_a_drain_that_does_not_end_is_waited_for_only_so_long() -> None:
    with connected(drain_timeout="50ms") as rig:
        requests, right = rows(rig)
        rig.work_through()
        fake0, _ = rig.verbs.nics.values()
        fake0.hold()  # flushing waits as well
        submitted = rig.submit(WRITE, *requests)
        fake0.set_port(False)
        completed(submitted)
        assert right(WRITE)


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_when_both_rails_fail_the_cause_names_both(opcode: Opcode) -> None:
    with connected() as rig:
        requests, _ = rows(rig)
        rig.work_through()
        rig.verbs.hold()
        submitted = rig.submit(opcode, *requests)
        for nic in rig.verbs.nics.values():
            nic.set_port(False)
        rig.verbs.release()
        work = ended(submitted)
        cause = str(work.causes[-1].cause)
        assert "fake0" in cause
        assert "fake1" in cause
        assert not work.unfenced


def test_what_is_for_a_buffer_that_was_taken_away_ends_with_the_connections_that_it_breaks() -> (
    None
):
    with connected() as rig:
        here, _ = rig.buffer(rig.a, SIZE)
        gone, _ = rig.buffer(rig.b, SIZE)
        stays, theirs = rig.buffer(rig.b, SIZE)
        rig.work_through()
        rig.verbs.hold()
        lost = rig.submit(WRITE, *((here, i * KIB, gone, i * KIB, KIB) for i in range(512)))
        mixed = [
            (here, i * KIB, gone if i % 3 == 0 else stays, i * KIB, KIB) for i in range(256, 512)
        ]
        partly = rig.submit(WRITE, *mixed)
        opened = rig.wire.asked["open"]
        theirs[:] = 0
        rig.b.unregister(gone)
        rig.verbs.release()
        work = ended(lost)
        assert "remote access error" in str(work.causes[-1].cause)
        assert not work.unfenced
        work = ended(partly)
        failed = {number for c in work.causes for number in range(c.start, c.stop)}
        assert failed == {i for i, row in enumerate(mixed) if row[2] is gone}
        assert (theirs[256 * KIB :].reshape(256, KIB).any(1) == (work.status == COMPLETED)).all()
        assert rig.wire.asked["open"] - opened <= 2  # one for each rail, for what is left


def test_a_key_that_is_refused_is_not_tried_again_although_no_snapshot_says_so_yet() -> None:
    with connected() as rig:
        requests, _ = rows(rig)
        there = requests[0][2]
        rig.work_through()
        rig.verbs.hold()
        submitted = rig.submit(WRITE, *requests)  # more runs than there are queue pairs
        opened = rig.wire.asked["open"]
        rig.b.transport.remove_buffer(there, 1.0)
        rig.verbs.release()
        work = ended(submitted)
        assert {str(c.cause).rpartition(": ")[2] for c in work.causes} == {"remote access error"}
        assert rig.wire.asked["close"] <= 2
        assert rig.wire.asked["open"] == opened


def test_of_each_queue_pair_that_fails_at_once_the_one_to_blame_is_found() -> None:
    with connected(fabric(nics=1)) as rig:
        here, _ = rig.buffer(rig.a, KIB)
        gone = [rig.buffer(rig.b, KIB)[0] for _ in range(QUEUE_PAIRS)]
        rig.work_through()
        rig.verbs.hold()
        submitted = [rig.submit(WRITE, (here, 0, buffer, 0, KIB)) for buffer in gone]
        for buffer in gone:
            rig.b.transport.remove_buffer(buffer, 1.0)
        polls = rig.verbs.faults.gate("poll")
        rig.verbs.release()
        polls.open()
        for one in submitted:
            assert "remote access error" in str(ended(one).causes[0].cause)
        assert rig.wire.asked["close"] == 1


def test_without_any_rail_work_fails_at_once() -> None:
    with connected() as rig:
        requests, _ = rows(rig)
        for nic in rig.verbs.nics.values():
            nic.set_port(False)
        wait_until(lambda: not any(nic.usable for nic in transport(rig.a)._nics))
        work = ended(rig.submit(WRITE, *requests))
        assert "fake0 is down here" in str(work.causes[0].cause)
        assert "fake1 is down here" in str(work.causes[0].cause)


def test_a_rail_whose_port_came_back_carries_again() -> None:
    with connected() as rig:
        requests, right = rows(rig)
        rig.work_through()
        fake0, fake1 = rig.verbs.nics.values()
        fake0.set_port(False)
        wait_until(lambda: not transport(rig.a)._nics[0].usable)
        before = fake0.counts.posted
        completed(rig.submit(WRITE, *requests))
        assert fake0.counts.posted == before
        fake0.set_port(True)
        wait_until(lambda: transport(rig.a)._nics[0].usable)
        fake1.set_port(False)
        wait_until(lambda: not transport(rig.a)._nics[1].usable)
        completed(rig.submit(READ, *requests))
        assert fake0.counts.posted > before
        assert right(WRITE)


def test_a_transfer_uses_a_rail_again_that_has_come_back_since_it_failed() -> None:
    with connected(send_depth=16, group=16) as rig:
        requests, right = rows(rig)
        rig.work_through()
        fake0, fake1 = rig.verbs.nics.values()
        ours = transport(rig.a)._nics
        rig.verbs.hold()
        submitted = rig.submit(WRITE, *requests)
        fake0.set_port(False)
        fake0.release()
        wait_until(lambda: rig.wire.asked["close"] == 1)
        fake0.set_port(True)
        wait_until(lambda: ours[0].usable)
        fake1.set_port(False)
        rig.verbs.release()
        completed(submitted)
        assert right(WRITE)


def test_an_event_of_one_port_does_not_end_the_pause_of_another() -> None:
    with connected(
        error_threshold=1, cooldown="1h", longest_cooldown="1h", **ONE_QUEUE_PAIR
    ) as rig:
        requests, right = rows(rig)
        rig.work_through()
        rig.verbs.faults.fail_work(RETRIES_EXCEEDED, nic="fake0")
        completed(rig.submit(WRITE, *requests))
        assert right(WRITE)
        posted = rig.verbs.nics["fake0"].counts.posted
        events = rig.verbs.counts.calls["next_event"]
        rig.verbs.nics["fake1"].emit("PORT_ACTIVE")
        wait_until(lambda: rig.verbs.counts.calls["next_event"] == events + 2)
        assert "fake0 to fake0 paused" in rig.endpoint.paths.describe()
        completed(rig.submit(WRITE, *requests))
        assert rig.verbs.nics["fake0"].counts.posted == posted


def test_a_rail_that_cannot_be_connected_is_passed_over() -> None:
    with connected() as rig:
        requests, right = rows(rig)

        def intercept(message: object, ask: Callable[[], bytes]) -> bytes:
            if isinstance(message, Open) and message.nic == 0:
                raise TransportError("not over this one")
            return ask()

        rig.wire.intercept = intercept
        completed(rig.submit(WRITE, *requests))
        assert right(WRITE)
        assert rig.verbs.nics["fake0"].counts.posted == 0


def test_whatever_the_way_to_the_peer_raises_the_work_ends() -> None:
    with connected() as rig:
        requests, _ = rows(rig)

        def intercept(message: object, ask: Callable[[], bytes]) -> bytes:
            raise RuntimeError("a broken control plane")

        rig.wire.intercept = intercept
        work = ended(rig.submit(WRITE, *requests))
        assert "a broken control plane" in str(work.causes[0].cause)


def test_a_post_that_fails_costs_the_rail_and_not_the_work() -> None:
    with connected() as rig:
        requests, right = rows(rig)
        rig.work_through()
        rig.verbs.faults.fail_next("post", errno.EIO, nic="fake0")
        completed(rig.submit(WRITE, *requests))
        assert right(WRITE)


def test_a_queue_pair_that_cannot_be_put_in_error_or_destroyed_is_destroyed_later() -> None:
    with connected() as rig:
        requests, right = rows(rig)
        rig.work_through()
        rig.verbs.hold()
        submitted = rig.submit(WRITE, *requests)
        faults = rig.verbs.faults
        faults.fail_next("to_error", errno.EIO, nic="fake0")
        faults.fail_next("close_queue_pair", errno.EBUSY, nic="fake0")
        rig.verbs.nics["fake0"].set_port(False)
        rig.verbs.release()
        completed(submitted)
        assert right(WRITE)
        assert rig.a.transport.holdings()["stuck_connections"] == 1
        rig.a.transport.release(rig.b.segment.snapshot.key, "any")
        assert rig.a.transport.holdings()["stuck_connections"] == 0


def test_a_read_is_not_posted_again_while_its_queue_pair_may_still_write_here() -> None:
    with connected() as rig:
        requests, _ = rows(rig)
        rig.work_through()
        rig.wire.refuse(Close)
        rig.verbs.hold()
        submitted = rig.submit(READ, *requests)
        faults = rig.verbs.faults
        faults.fail_next("to_error", errno.EIO, nic="fake0")
        faults.fail_next("close_queue_pair", errno.EBUSY, nic="fake0")
        rig.verbs.nics["fake0"].set_port(False, hang=True)
        work = None
        rig.verbs.nics["fake1"].release()
        work = ended(submitted)
        assert work.unfenced
        rig.verbs.nics["fake0"].set_port(True)


def test_ends_that_a_silent_peer_kept_are_destroyed_when_it_answers_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(farewells, "SWEEP_S", 0.02)
    with connected() as rig:
        requests, right = rows(rig)
        rig.work_through()
        rig.wire.refuse(Close)
        rig.verbs.faults.fail_work(RETRIES_EXCEEDED, nic="fake0")
        completed(rig.submit(READ, *requests))
        assert right(READ)
        rig.wire.intercept = None
        wait_until(lambda: not rig.endpoint.paths._farewells._unconfirmed)
        kept = len(transport(rig.b)._passive)
        assert kept == rig.endpoint.holdings()["connections"]


def test_who_connects_does_not_ask_again_for_what_the_peer_is_being_asked_for() -> None:
    with connected() as rig:
        requests, _ = rows(rig)
        rig.work_through()
        farewells = rig.endpoint.paths._farewells

        def intercept(message: object, ask: Callable[[], bytes]) -> bytes:
            if isinstance(message, Close) and rig.wire.asked["close"] == 1:
                farewells.sweep()  # as after a connection was made meanwhile
            return ask()

        rig.wire.intercept = intercept
        rig.verbs.faults.fail_work(RETRIES_EXCEEDED, nic="fake0")
        completed(rig.submit(WRITE, *requests))
        assert rig.wire.asked["close"] == 1
        assert not farewells._unconfirmed


def test_a_run_that_is_posted_at_the_moment_when_its_nic_is_lost_moves() -> None:
    with connected() as rig:
        here, ours = rig.buffer(rig.a, KIB)
        there, theirs = rig.buffer(rig.b, KIB)
        rig.work_through()
        nic = transport(rig.a)._nics[0]
        gate = rig.verbs.faults.gate("post", nic="fake0")
        made: list[Submitted] = []
        row = (here, 0, there, 0, KIB)
        thread = threading.Thread(target=lambda: made.append(rig.submit(WRITE, row)))
        rig.endpoint.paths._health.down(1)  # so that it goes over the other
        thread.start()
        assert gate.entered.wait(30)
        rig.endpoint.paths._health.up(1)
        nic.lost(tent_rdma.verbs.VerbsError("cannot poll", errno.EIO))
        gate.open()
        thread.join()
        completed(made[0])
        assert (ours == theirs).all()


def test_who_breaks_a_connection_off_has_its_end_looked_for() -> None:
    with connected(fabric(nics=1)) as rig:
        here, _ = rig.buffer(rig.a, KIB)
        there, _ = rig.buffer(rig.b, KIB)
        rig.work_through()
        rig.verbs.hold()
        submitted = rig.submit(WRITE, (here, 0, there, 0, KIB))
        nic = transport(rig.a)._nics[0]
        nic._armed = nic.queue._armed = False  # type: ignore[attr-defined]  # as after a wait in submit
        connection = next(iter(rig.endpoint.paths._connections.values()))
        assert connection.break_off()
        rig.verbs.release()
        assert connection.destroy(3600)  # no sooner than it is drained, which somebody has to see
        rig.endpoint.close("enough")
        ended(submitted)


def test_what_a_failed_rail_had_under_way_does_not_count_against_it() -> None:
    with connected() as rig:
        requests, right = rows(rig)
        rig.work_through()
        rig.verbs.faults.fail_work(RETRIES_EXCEEDED, nic="fake0", after=10)
        completed(rig.submit(WRITE, *requests))
        assert right(WRITE)
        rails = rig.endpoint.paths._health.state(time.monotonic())
        assert [rail.in_flight for rail in rails] == [0] * len(rails)
        assert rails[0].failures == 1
