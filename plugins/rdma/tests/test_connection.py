"""How connections are made and let go: whatever step fails, nothing is left, and the next attempt works."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rig import (
    KIB,
    MIB,
    QUEUE_PAIRS,
    Rig,
    completed,
    connected,
    ended,
    fabric,
    link,
    live,
    side,
    transport,
)

import tent_rdma.transport
from tent_core.errors import TransportError
from tent_core.testing.harness import Row, Submitted
from tent_core.testing.waiting import wait_until
from tent_core.types import Opcode
from tent_mock.verbs import FakeVerbs, Operation
from tent_rdma.connection import State
from tent_rdma.passive import PassiveEnd
from tent_rdma.paths import CONNECTS
from tent_rdma.settings import Settings
from tent_rdma.wire import Open, Opened, Ready, decode

READ, WRITE = Opcode.READ, Opcode.WRITE
BUSY: dict[str, Any] = {"pools": {"default": {"queue_pairs": 3}}}


def transfer(rig: Rig) -> Callable[[], Submitted]:
    """Something to submit, again and again."""
    here, _ = rig.buffer(rig.a, 16 * KIB)
    there, _ = rig.buffer(rig.b, 16 * KIB)
    return lambda: rig.submit(WRITE, (here, 0, there, 0, 16 * KIB))


@pytest.mark.parametrize("operation", ["queue_pair", "connect"])
@pytest.mark.parametrize("step", range(6))  # three at each side, the peer's in the midst
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_whatever_step_of_making_fails_nothing_is_left(
    operation: Operation, step: int, number: int
) -> None:
    with connected(fabric(nics=1), **BUSY) as rig:
        submit = transfer(rig)
        before = live(rig.verbs)
        rig.verbs.faults.fail_next(operation, number, after=step)
        work = ended(submit())
        assert "fake0" in str(work.causes[0].cause)
        assert not work.unfenced
        wait_until(lambda: live(rig.verbs) == before)
        wait_until(lambda: len(transport(rig.b)._passive) == 0)
        assert rig.a.transport.holdings()["connections"] == 0
        wait_until(lambda: rig.b.transport.holdings()["connections"] == 0)
        completed(submit())
        assert transport(rig.a)._nics[0]._markers + 3 == transport(rig.b)._nics[0]._markers


@pytest.mark.parametrize("step", range(3))
def test_an_end_that_can_neither_be_made_nor_destroyed_is_destroyed_later(step: int) -> None:
    with connected(fabric(nics=1), **BUSY) as rig:
        submit = transfer(rig)
        faults = rig.verbs.faults
        faults.fail_next("connect", errno.EINVAL, after=step)  # the peer's
        faults.fail_next("close_queue_pair", errno.EBUSY, times=2)  # the peer's, then one here
        ended(submit())
        wait_until(lambda: len(transport(rig.b)._passive) == 0)
        wait_until(lambda: rig.b.transport.holdings()["connections"] == 0)
        assert rig.a.transport.holdings()["stuck_connections"] == 1
        completed(submit())
        assert rig.a.transport.holdings()["stuck_connections"] == 0
        assert live(rig.verbs)["queue_pair"] == 6


def answers(ready: list[Ready]) -> bytes:
    return Opened.model_construct(queue_pairs=ready).encode()


@pytest.mark.parametrize(
    "answer",
    [
        lambda opened: b"",
        lambda opened: b"null",
        lambda opened: opened.encode()[:-2],
        lambda opened: answers(opened.queue_pairs[:1]),
        lambda opened: answers(opened.queue_pairs * 2),
        lambda opened: answers([]),
        lambda opened: b'{"queue_pairs": [{"number": -1, "psn": 0}]}',
        lambda opened: b'{"queue_pairs": [{"number": 16777216, "psn": 0}]}',
    ],
)
def test_a_malformed_answer_is_an_error_and_leaves_nothing(
    answer: Callable[[Opened], bytes],
) -> None:
    with connected(fabric(nics=1), **BUSY) as rig:
        submit = transfer(rig)
        before = live(rig.verbs)

        def intercept(message: object, ask: Callable[[], bytes]) -> bytes:
            said = ask()
            return answer(decode(Opened, said)) if isinstance(message, Open) else said

        rig.wire.intercept = intercept
        work = ended(submit())
        assert not work.unfenced
        wait_until(lambda: live(rig.verbs) == before)


def test_an_answer_that_comes_too_late_leaves_nothing_at_the_peer() -> None:
    with connected(fabric(nics=1)) as rig:
        submit = transfer(rig)
        before = live(rig.verbs)

        def intercept(message: object, ask: Callable[[], bytes]) -> bytes:
            said = ask()
            if isinstance(message, Open):
                raise TransportError("no answer within 5 s")
            return said

        rig.wire.intercept = intercept
        work = ended(submit())
        assert "no answer within 5 s" in str(work.causes[0].cause)
        wait_until(lambda: live(rig.verbs) == before)


def test_many_who_want_a_connection_make_one() -> None:
    with connected(fabric(nics=1)) as rig:
        submit = transfer(rig)
        made: list[Submitted] = []
        threads = [threading.Thread(target=lambda: made.append(submit())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for submitted in made:
            completed(submitted)
        assert rig.wire.asked == {"open": 1}


def test_both_sides_that_begin_at_once_do_not_clash() -> None:
    with connected() as rig:
        back, wire = link(rig.b, rig.a)
        barrier = threading.Barrier(2)

        def intercept(message: object, ask: Callable[[], bytes]) -> bytes:
            if isinstance(message, Open) and message.nic == 0:
                barrier.wait(30)  # neither has answered when the other asks
            return ask()

        rig.wire.intercept = wire.intercept = intercept
        here, ours = rig.buffer(rig.a, 2 * MIB)
        there, theirs = rig.buffer(rig.b, 2 * MIB)
        one = rig.submit(WRITE, (here, 0, there, 0, MIB))
        other = Submitted(back, WRITE, [(there, MIB, here, MIB, MIB)])
        completed(one)
        completed(other)
        assert (ours == theirs).all()
        back.close("the test ends")


def test_every_packet_sequence_starts_elsewhere() -> None:
    with connected(fabric(nics=1), pools={"default": {"queue_pairs": 16}}) as rig:
        completed(transfer(rig)())
        numbers = [qp.psn for qp in rig.verbs.nics["fake0"].queue_pairs.values()]
        assert len(set(numbers)) == len(numbers) == 32


def test_states_only_grow_and_nothing_happens_twice() -> None:
    with connected(fabric(nics=1)) as rig:
        completed(transfer(rig)())
        connection = next(iter(rig.endpoint.paths._connections.values()))
        states = [connection.state]
        with pytest.raises(TransportError, match="given up"):
            connection.open()
        assert connection.break_off()
        assert not connection.break_off()
        assert not connection.retire()
        states.append(connection.state)
        assert connection.destroy(1)
        assert connection.destroy(0)
        assert connection.take_back() == []
        assert [*states, connection.state] == [State.READY, State.DESTROYING, State.DESTROYED]
        assert rig.verbs.counts.closed["queue_pair"] == QUEUE_PAIRS
        assert rig.verbs.counts.closed_again["queue_pair"] == 0


# -------------------------------------------------------------------- the cap


def fan(verbs: FakeVerbs, count: int, **settings: Any) -> Fan:
    return Fan(verbs, count, settings)


class Fan:
    """One side with endpoints for several others."""

    def __init__(self, verbs: FakeVerbs, count: int, settings: dict[str, Any]) -> None:
        self.verbs = verbs
        self.a = side(verbs, **settings).start()
        self.others = [side(verbs).start() for _ in range(count)]
        linked = [link(self.a, other) for other in self.others]
        self.endpoints = [endpoint for endpoint, _ in linked]
        self.wires = [wire for _, wire in linked]
        self.ours = np.arange(16 * KIB, dtype=np.uint32).view(np.uint8)
        self.theirs = [np.zeros_like(self.ours) for _ in self.others]
        self.here = self.a.register(self.ours)
        self.there = [o.register(t) for o, t in zip(self.others, self.theirs, strict=True)]

    def row(self, index: int) -> Row:
        return (self.here, 0, self.there[index], 0, self.ours.nbytes)

    def submit(self, index: int) -> Submitted:
        return Submitted(self.endpoints[index], WRITE, [self.row(index)])

    def connections(self) -> list[bool]:
        return [bool(e.paths._connections) for e in self.endpoints]

    def __enter__(self) -> Fan:
        return self

    def __exit__(self, *_: object) -> None:
        self.verbs.release()
        for each in (self.a, *self.others):
            each.transport.stop()
        assert not live(self.verbs)


def test_at_the_cap_the_one_that_is_used_least_makes_room() -> None:
    with fan(fabric(nics=1), 5, max_connections=3) as f:
        for index in (0, 1, 2):
            completed(f.submit(index))
        completed(f.submit(0))
        completed(f.submit(3))
        assert f.connections() == [True, False, True, True, False]
        completed(f.submit(4))
        assert f.connections() == [True, False, False, True, True]
        for index in range(5):
            completed(f.submit(index))
            assert (f.theirs[index] == f.ours).all()
        assert f.a.transport.holdings()["connections"] == 3
        wait_until(lambda: sum(len(transport(o)._passive) for o in f.others) == 3)


def test_room_is_made_without_waiting_for_the_peer_that_loses_its_connection() -> None:
    with fan(fabric(nics=1), 2, max_connections=1) as f:
        completed(f.submit(0))
        gate = threading.Event()

        def intercept(message: object, ask: Callable[[], bytes]) -> bytes:
            assert gate.wait(30)
            return ask()

        f.wires[0].intercept = intercept
        completed(f.submit(1))
        gate.set()
        wait_until(lambda: len(transport(f.others[0])._passive) == 0)


def test_what_has_work_pending_is_not_evicted_and_who_comes_then_is_told() -> None:
    with fan(fabric(nics=1), 2, max_connections=1) as f:
        completed(f.submit(0))
        f.verbs.hold()
        pending = f.submit(0)
        work = ended(f.submit(1))
        assert "max_connections" in str(work.causes[0].cause)
        assert not work.unfenced
        f.verbs.release()
        completed(pending)
        completed(f.submit(1))


def test_ends_that_peers_began_are_never_evicted() -> None:
    with connected(fabric(nics=1), max_connections=1) as rig:
        completed(transfer(rig)())
        back, _ = link(rig.b, rig.a)
        here, _ = rig.buffer(rig.a, KIB)
        there, _ = rig.buffer(rig.b, KIB)
        work = ended(Submitted(back, WRITE, [(there, 0, here, 0, KIB)]))
        assert "keeps 1 connections" in str(work.causes[0].cause)
        completed(transfer(rig)())
        back.close("the test ends")


@pytest.mark.parametrize("operation", ["queue_pair", "connect"])
def test_a_lack_of_resources_evicts_an_idle_one_and_is_tried_once_more(
    operation: Operation,
) -> None:
    with fan(fabric(nics=1), 3) as f:
        completed(f.submit(0))
        completed(f.submit(1))
        completed(f.submit(0))
        f.verbs.faults.fail_next(operation, errno.ENOMEM, after=1 if operation == "connect" else 0)
        completed(f.submit(2))
        assert f.connections() == [True, False, True]
        assert (f.theirs[2] == f.ours).all()
        wait_until(lambda: sum(len(transport(o)._passive) for o in f.others) == 2)


def test_a_lack_of_resources_without_anything_idle_is_told_as_it_is() -> None:
    with fan(fabric(nics=1), 1) as f:
        f.verbs.faults.fail_next("queue_pair", errno.ENOMEM)
        work = ended(f.submit(0))
        assert "Cannot allocate memory" in str(work.causes[0].cause)
        completed(f.submit(0))


def test_newcomers_at_once_at_the_cap_all_get_their_room() -> None:
    with fan(fabric(nics=1), 8, max_connections=4) as f:
        for index in range(4):
            completed(f.submit(index))
        submitted = [f.submit(index) for index in range(4, 8)]
        for one in submitted:
            completed(one)
        assert f.a.transport.holdings()["connections"] == 4


def test_work_that_comes_while_its_connection_is_evicted_goes_over_a_new_one() -> None:
    with fan(fabric(nics=1), 2, max_connections=1) as f:
        completed(f.submit(0))
        gate = f.verbs.faults.gate("close_queue_pair")
        second = f.submit(1)
        assert gate.entered.wait(30)
        first = f.submit(0)
        gate.open()
        # Both want the only place: each may find the other at work, and none waits for ever.
        for one in (first, second):
            work = ended(one)
            assert not work.unfenced
        completed(f.submit(0))


def test_a_use_in_the_moment_of_eviction_saves_the_connection() -> None:
    with fan(fabric(nics=1), 1) as f:
        completed(f.submit(0))
        connection = next(iter(f.endpoints[0].paths._connections.values()))
        f.verbs.hold()
        submitted = f.submit(0)
        assert not connection.retire()
        assert connection.state is State.READY
        f.verbs.release()
        completed(submitted)
        assert connection.retire()


def test_work_that_finds_its_connection_retired_goes_over_the_next_one() -> None:
    with fan(fabric(nics=1), 1) as f:
        completed(f.submit(0))
        paths = f.endpoints[0].paths
        connection = next(iter(paths._connections.values()))
        assert connection.retire()
        submitted = f.submit(0)  # between the choice of the connection and its end
        assert not submitted.work.finished
        paths.evict(connection)
        completed(submitted)


def test_an_end_that_was_closed_is_not_made_any_more() -> None:
    verbs = fabric(nics=1)
    with side(verbs) as made:
        end = PassiveEnd(transport(made)._nics[0])
        end.close()
        sender = transport(made)._nics[0].address
        asked = Open(connection=1, nic=0, sender=sender, queue_pairs=[Ready(number=1, psn=1)])
        with pytest.raises(TransportError, match="closed while it was made"):
            end.open(asked, Settings())
        assert verbs.counts.calls["queue_pair"] == 0


# -------------------------------------------------------------------- closing


def test_closing_an_endpoint_gives_everything_back_at_once_when_it_is_idle() -> None:
    with connected(**BUSY) as rig:
        before = live(rig.verbs)
        endpoint, _ = link(rig.a, rig.b)
        here, _ = rig.buffer(rig.a, MIB)
        there, _ = rig.buffer(rig.b, MIB)
        completed(Submitted(endpoint, WRITE, [(here, 0, there, 0, MIB)]))
        endpoint.close("the test ends")
        endpoint.close("twice")
        assert endpoint.holdings() == {"connections": 0, "queue_pairs": 0}
        rig.b.transport.release(rig.a.segment.snapshot.key, "it said goodbye")
        rig.a.unregister(here)
        rig.b.unregister(there)
        assert live(rig.verbs) == before
        assert rig.verbs.counts.calls["to_error"] == 0  # nothing was under way: nothing to drain


def test_closing_reports_what_is_under_way_and_what_waits() -> None:
    with connected(fabric(nics=1), send_depth=16, group=16) as rig:
        here, _ = rig.buffer(rig.a, 64 * KIB)
        there, theirs = rig.buffer(rig.b, 64 * KIB)
        rig.work_through()
        rig.verbs.hold()
        rows = [(here, i * KIB, there, i * KIB, KIB) for i in range(64)]
        write = rig.submit(WRITE, *rows)
        rig.endpoint.close("the peer departed")
        work = write.work
        assert work.finished
        assert ended(write).unfenced  # those that were posted
        assert all("the peer departed" in str(f.cause) for f in work.causes)
        with pytest.raises(TransportError, match="closed: the peer departed"):
            rig.submit(WRITE, *rows)
        theirs[:] = 1
        rig.verbs.release()
        assert (theirs == 1).all()


def test_closing_while_connecting_destroys_what_was_made() -> None:
    with connected(fabric(nics=1)) as rig:
        before = live(rig.verbs)
        submit = transfer(rig)
        asked, gate = threading.Event(), threading.Event()

        def intercept(message: object, ask: Callable[[], bytes]) -> bytes:
            asked.set()
            assert gate.wait(30)
            return ask()

        rig.wire.intercept = intercept
        submitted = submit()
        assert asked.wait(30)
        assert live(rig.verbs).get("queue_pair") == QUEUE_PAIRS
        rig.endpoint.close("enough")
        ended(submitted)
        assert "queue_pair" not in live(rig.verbs)
        gate.set()
        wait_until(lambda: len(transport(rig.b)._passive) == 1)
        rig.b.transport.release(rig.a.segment.snapshot.key, "it departed")
        wait_until(lambda: live(rig.verbs) == {**before, "registration": 2})
        wait_until(lambda: rig.a.transport.holdings()["connections"] == 0)


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_closing_while_a_rail_recovers_reports_once(opcode: Opcode) -> None:
    with connected() as rig:
        here, _ = rig.buffer(rig.a, 256 * KIB)
        there, _ = rig.buffer(rig.b, 256 * KIB)
        rig.work_through()
        closing, gate = threading.Event(), threading.Event()

        def intercept(message: object, ask: Callable[[], bytes]) -> bytes:
            closing.set()
            assert gate.wait(30)
            return ask()

        rig.wire.intercept = intercept
        rig.verbs.hold()
        submitted = rig.submit(opcode, *((here, i * KIB, there, i * KIB, KIB) for i in range(256)))
        rig.verbs.nics["fake0"].set_port(False)
        rig.verbs.nics["fake0"].release()
        assert closing.wait(30)
        rig.endpoint.close("enough")
        assert submitted.work.finished
        gate.set()
        work = ended(submitted)
        assert work.unfenced is (opcode is WRITE)


def test_closing_while_a_rail_drains_reports_once() -> None:
    with connected(drain_timeout="30s") as rig:
        here, _ = rig.buffer(rig.a, 256 * KIB)
        there, _ = rig.buffer(rig.b, 256 * KIB)
        rig.work_through()
        rig.verbs.hold()
        submitted = rig.submit(WRITE, *((here, i * KIB, there, i * KIB, KIB) for i in range(256)))
        rig.verbs.nics["fake0"].set_port(False)
        wait_until(lambda: rig.endpoint.paths._ending)
        rig.endpoint.close("enough")
        assert submitted.work.finished
        assert ended(submitted).unfenced


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_a_verb_that_hangs_does_not_hold_up_closing(opcode: Opcode) -> None:
    with connected() as rig:
        here, _ = rig.buffer(rig.a, 256 * KIB)
        there, _ = rig.buffer(rig.b, 256 * KIB)
        rig.work_through()
        rig.verbs.hold()
        gate = rig.verbs.faults.gate("close_queue_pair")
        submitted = rig.submit(opcode, *((here, i * KIB, there, i * KIB, KIB) for i in range(256)))
        rig.endpoint.close("enough")  # would be killed by the time limit
        assert submitted.work.finished
        assert ended(submitted).unfenced
        gate.open()
        wait_until(lambda: rig.verbs.counts.alive("queue_pair") == 2 * QUEUE_PAIRS)  # the peer's
        wait_until(lambda: rig.a.transport.holdings()["connections"] == 0)


@pytest.mark.parametrize("again", range(10))
def test_submitting_from_many_threads_while_it_closes_reports_everything_once(again: int) -> None:
    with connected(send_depth=16, group=4) as rig:
        here, _ = rig.buffer(rig.a, 64 * KIB)
        there, _ = rig.buffer(rig.b, 64 * KIB)
        rows = [(here, i * KIB, there, i * KIB, KIB) for i in range(64)]
        made: list[Submitted] = []
        begun = threading.Semaphore(0)

        def submit() -> None:
            while True:
                try:
                    made.append(rig.submit(WRITE, *rows))
                except TransportError:
                    return
                finally:
                    begun.release()

        threads = [threading.Thread(target=submit) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(4 + 3 * again):
            assert begun.acquire(timeout=30)
        rig.endpoint.close("enough")
        for thread in threads:
            thread.join()
        for one in made:
            ended(one)
        wait_until(lambda: rig.a.transport.holdings()["connections"] == 0)


def test_release_while_the_peer_connects_leaves_nothing() -> None:
    with connected(fabric(nics=1), **BUSY) as rig:
        submit = transfer(rig)
        gate = rig.verbs.faults.gate("connect")
        submitted = submit()
        assert gate.entered.wait(30)  # the peer's first queue pair
        released: list[BaseException | None] = []

        def release() -> None:
            try:
                rig.b.transport.release(rig.a.segment.snapshot.key, "it departed")
            except TransportError as error:
                released.append(error)
            else:
                released.append(None)

        thread = threading.Thread(target=release)
        thread.start()
        wait_until(lambda: any(not end._wanted for end in transport(rig.b)._passive._ends.values()))
        gate.open()
        thread.join()
        ended(submitted)
        assert released == [None]
        wait_until(lambda: rig.b.transport.holdings()["passive_connections"] == 0)
        wait_until(lambda: rig.b.transport.holdings()["connections"] == 0)


def test_a_port_that_goes_down_while_connecting_moves_the_work() -> None:
    with connected() as rig:
        here, ours = rig.buffer(rig.a, 256 * KIB)
        there, theirs = rig.buffer(rig.b, 256 * KIB)
        rig.endpoint.paths._health.down(1)
        asked, gate = threading.Event(), threading.Event()

        def intercept(message: object, ask: Callable[[], bytes]) -> bytes:
            if isinstance(message, Open) and message.nic == 0:
                asked.set()
                assert gate.wait(30)
            return ask()

        rig.wire.intercept = intercept
        submitted = rig.submit(WRITE, (here, 0, there, 0, 256 * KIB))
        assert asked.wait(30)
        rig.endpoint.paths._health.up(1)
        rig.verbs.nics["fake0"].set_port(False)
        completed(submitted)  # while the other is still being made
        assert (ours == theirs).all()
        gate.set()


def test_peers_that_do_not_answer_keep_no_other_from_recovering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tent_rdma.transport, "WORKERS", 3)
    with fan(fabric(nics=2), 4) as f:
        gate = threading.Event()

        def intercept(message: object, ask: Callable[[], bytes]) -> bytes:
            assert gate.wait(30)
            raise TransportError("too late")

        completed(f.submit(3))
        wait_until(lambda: len(f.endpoints[3].paths._connections) == 2)
        for wire in f.wires[:3]:
            wire.intercept = intercept
        silent = [f.submit(index) for index in range(3)]
        f.verbs.faults.fail_work(12, nic="fake0")
        for _ in range(2):
            completed(f.submit(3))
        assert (f.theirs[3] == f.ours).all()
        gate.set()
        for one in silent:
            ended(one)


def test_a_peer_that_does_not_answer_occupies_only_some_workers() -> None:
    with connected(fabric(nics=8)) as rig:
        asked, gate = threading.Semaphore(0), threading.Event()

        def intercept(message: object, ask: Callable[[], bytes]) -> bytes:
            asked.release()
            assert gate.wait(30)
            return ask()

        rig.wire.intercept = intercept
        submitted = transfer(rig)()
        for _ in range(CONNECTS):
            assert asked.acquire(timeout=30)
        assert rig.endpoint.paths._connectors == CONNECTS
        assert len(transport(rig.a)._workers[0]._threads) == CONNECTS
        gate.set()
        completed(submitted)
