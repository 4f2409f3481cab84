"""Work on an endpoint: every request is reported once, with the right bytes, whatever happens on the way."""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from rig import (
    KIB,
    MIB,
    ONE_QUEUE_PAIR,
    QUEUE_PAIRS,
    Rig,
    completed,
    connected,
    ended,
    fabric,
    link,
    side,
    transport,
)

from tent_core.descriptor import Attribute, BufferDescriptor
from tent_core.errors import TransportError
from tent_core.testing.harness import Row, Submitted, requests
from tent_core.testing.waiting import wait_until
from tent_core.types import Opcode, Status
from tent_core.work import Work
from tent_mock.verbs import FakeVerbs
from tent_rdma.wire import Open

READ, WRITE = Opcode.READ, Opcode.WRITE


@pytest.mark.parametrize("opcode", [READ, WRITE])
@pytest.mark.parametrize("size", [1, 4 * KIB, 64 * KIB + 1, 3 * MIB + 5])
def test_bytes_arrive_whatever_the_length(opcode: Opcode, size: int) -> None:
    with connected() as rig:
        here, ours = rig.buffer(rig.a, size)
        there, theirs = rig.buffer(rig.b, size)
        expected = (ours if opcode is WRITE else theirs).copy()
        work = completed(rig.submit(opcode, (here, 0, there, 0, size)))
        assert work.moved.tolist() == [size]
        assert (ours == expected).all()
        assert (theirs == expected).all()


def test_many_requests_over_several_buffers_end_up_where_each_belongs() -> None:
    with connected() as rig:
        pairs = [(rig.buffer(rig.a, 64 * KIB), rig.buffer(rig.b, 64 * KIB)) for _ in range(3)]
        rows = [
            (here, i * 4 * KIB, there, (15 - i) * 4 * KIB, 4 * KIB)
            for (here, _), (there, _) in pairs
            for i in range(16)
        ]
        completed(rig.submit(WRITE, *rows))
        for (_, ours), (_, theirs) in pairs:
            assert (ours.reshape(16, -1) == theirs.reshape(16, -1)[::-1]).all()


def test_registrations_in_chunks_carry_requests_across_their_borders() -> None:
    with connected(largest_registration="64KiB") as rig:
        here, ours = rig.buffer(rig.a, 300 * KIB + 3)
        there, theirs = rig.buffer(rig.b, 300 * KIB + 3)
        completed(rig.submit(WRITE, (here, 0, there, 0, 300 * KIB + 3)))
        assert (ours == theirs).all()
        completed(rig.submit(READ, (here, 7, there, 100, 200 * KIB)))
        assert (ours[7 : 7 + 200 * KIB] == theirs[100 : 100 + 200 * KIB]).all()


def test_more_work_than_the_send_queue_holds_goes_as_there_is_room() -> None:
    with connected(fabric(nics=1), send_depth=16, group=4) as rig:
        here, ours = rig.buffer(rig.a, MIB)
        there, theirs = rig.buffer(rig.b, MIB)
        rig.verbs.hold()
        submitted = rig.submit(WRITE, *((here, i * KIB, there, i * KIB, KIB) for i in range(1024)))
        wait_until(lambda: rig.verbs.counts.posted == 16 * QUEUE_PAIRS)
        rig.verbs.release()
        completed(submitted)
        assert (ours == theirs).all()


def test_a_run_is_one_post_with_one_signalled_request() -> None:
    with connected(fabric(nics=1), group=32) as rig:
        here, _ = rig.buffer(rig.a, MIB)
        there, _ = rig.buffer(rig.b, MIB)
        completed(rig.submit(WRITE, *((here, i * KIB, there, i * KIB, KIB) for i in range(1000))))
        counts = rig.verbs.counts
        assert counts.posted == 1000
        assert counts.posts == counts.signalled == -(-1000 // 32)


@pytest.mark.parametrize(("size", "together"), [(32 * KIB, 32), (64 * KIB, 16), (256 * KIB, 8)])
def test_a_run_is_a_mebibyte_but_no_less_than_a_quarter_of_a_group(
    size: int, together: int
) -> None:
    with connected(fabric(nics=1), group=32, slice=256 * KIB) as rig:
        here, ours = rig.buffer(rig.a, 64 * size)
        there, theirs = rig.buffer(rig.b, 64 * size)
        completed(rig.submit(WRITE, *((here, i * size, there, i * size, size) for i in range(64))))
        assert rig.verbs.counts.posts == 64 // together
        assert (ours == theirs).all()


def test_many_threads_submit_at_once() -> None:
    with connected(send_depth=32, group=8) as rig:
        count, each = 8, 40
        here, ours = rig.buffer(rig.a, count * each * 4 * KIB)
        there, theirs = rig.buffer(rig.b, count * each * 4 * KIB)
        barrier = threading.Barrier(count)
        made: list[Submitted] = []

        def submit(first: int) -> None:
            barrier.wait()
            for i in range(first, first + each):
                made.append(rig.submit(WRITE, (here, i * 4 * KIB, there, i * 4 * KIB, 4 * KIB)))

        threads = [threading.Thread(target=submit, args=(n * each,)) for n in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for submitted in made:
            completed(submitted)
        assert (ours == theirs).all()


def test_endpoints_that_share_a_nic_without_room_all_get_their_turn() -> None:
    verbs = fabric(nics=1, max_completions=32)
    with connected(verbs, send_depth=16, group=8) as rig, side(verbs) as c:
        other, _ = link(rig.a, c)
        here, ours = rig.buffer(rig.a, MIB)
        there, theirs = rig.buffer(rig.b, MIB)
        third, thirds = rig.buffer(c, MIB)
        verbs.hold()
        rows = [(here, i * KIB, there, i * KIB, KIB) for i in range(1024)]
        first = rig.submit(WRITE, *rows)
        wait_until(lambda: verbs.counts.posted >= 16)
        second = Submitted(
            other, WRITE, [(here, i * KIB, third, i * KIB, KIB) for i in range(1024)]
        )
        wait_until(
            lambda: verbs.counts.posted == 24
        )  # all there is room for: a quarter is for markers
        while not second.work.moved.any() and not first.work.finished:
            wait_until(lambda: verbs.step(4))
        assert not first.work.finished
        verbs.release()
        completed(first)
        completed(second)
        assert (ours == theirs).all()
        assert (ours == thirds).all()
        other.close("the test ends")


def test_a_transfer_that_waits_for_its_own_nics_or_pool_does_not_keep_others_waiting() -> None:
    with connected(pools={"slow": {}}) as rig:
        here, ours = rig.buffer(rig.a, 8 * KIB)
        there, theirs = rig.buffer(rig.b, 8 * KIB)
        rig.work_through()
        gate = threading.Event()

        def intercept(message: object, ask: Callable[[], bytes]) -> bytes:
            assert gate.wait(30)
            return ask()

        rig.wire.intercept = intercept
        slow = submit(rig, WRITE, (here, 0, there, 0, 4 * KIB), qp_pool="slow")
        completed(rig.submit(WRITE, (here, 4 * KIB, there, 4 * KIB, 4 * KIB)))
        assert not slow.work.finished
        gate.set()
        completed(slow)
        assert (ours == theirs).all()


def submit(rig: Rig, opcode: Opcode, *rows: Row, **work: Any) -> Submitted:
    """With what the policy or the caller asks for beside: devices, qp_pool, deadline, may_block."""
    submitted = Submitted.__new__(Submitted)
    submitted.finished = 0
    submitted._ended = threading.Event()
    submitted.work = Work(requests(opcode, rows), submitted._finish, **work)
    rig.endpoint.submit(submitted.work)
    return submitted


# -------------------------------------------------------------------- what the policy asks for


def test_only_the_nics_that_the_policy_names_are_used() -> None:
    with connected() as rig:
        here, _ = rig.buffer(rig.a, MIB)
        there, _ = rig.buffer(rig.b, MIB)
        completed(submit(rig, WRITE, (here, 0, there, 0, MIB), devices=("fake1",)))
        assert rig.verbs.nics["fake0"].counts.posted == 0
        assert rig.verbs.nics["fake1"].counts.posted > 0


def test_nics_of_the_policy_that_are_not_there_are_said_so() -> None:
    with connected() as rig:
        here, _ = rig.buffer(rig.a, KIB)
        there, _ = rig.buffer(rig.b, KIB)
        work = ended(submit(rig, WRITE, (here, 0, there, 0, KIB), devices=("mlx5_7",)))
        assert "the policy allows only mlx5_7" in str(work.causes[0].cause)
        assert not work.unfenced


def test_a_pool_has_connections_of_its_own_with_its_marks() -> None:
    pools = {"bulk": {"queue_pairs": 3, "service_level": 5, "traffic_class": 96}}
    with connected(fabric(nics=1), pools=pools) as rig:
        here, ours = rig.buffer(rig.a, KIB)
        there, theirs = rig.buffer(rig.b, KIB)
        completed(rig.submit(WRITE, (here, 0, there, 0, KIB)))
        completed(submit(rig, WRITE, (here, 0, there, 0, KIB), qp_pool="bulk"))
        assert (ours == theirs).all()
        marks = Counter(
            (qp.route.service_level, qp.route.traffic_class)
            for qp in rig.verbs.nics["fake0"].queue_pairs.values()
        )
        assert marks == {(0, 0): 2 * QUEUE_PAIRS, (5, 96): 6}  # both ends


def test_an_unknown_pool_is_refused_with_those_that_there_are() -> None:
    with connected(pools={"bulk": {}}) as rig:
        here, _ = rig.buffer(rig.a, KIB)
        there, _ = rig.buffer(rig.b, KIB)
        with pytest.raises(TransportError, match=r"'fast'.*bulk, default.*transports\.rdma\.pools"):
            submit(rig, WRITE, (here, 0, there, 0, KIB), qp_pool="fast")
        assert rig.verbs.counts.posts == 0


def test_a_pool_that_cannot_connect_fails_its_own_work_alone() -> None:
    pools = {"bulk": {"service_level": 5}}
    with connected(fabric(nics=1), pools=pools, send_depth=16, group=16) as rig:
        here, _ = rig.buffer(rig.a, KIB)
        there, _ = rig.buffer(rig.b, KIB)
        rig.work_through()

        def intercept(message: object, ask: Callable[[], bytes]) -> bytes:
            if isinstance(message, Open) and message.service_level == 5:
                rig.verbs.hold()
                # More than there is room for: some of it waits, and is not for the pool that fails.
                waiting.append(rig.submit(WRITE, *[(here, 0, there, 0, KIB)] * 64))
                raise TransportError("no such level")
            return ask()

        waiting: list[Submitted] = []
        rig.wire.intercept = intercept
        work = ended(submit(rig, WRITE, (here, 0, there, 0, KIB), qp_pool="bulk"))
        assert "no such level" in str(work.causes[0].cause)
        rig.verbs.release()
        completed(waiting[0])


@pytest.mark.parametrize(("location", "nic"), [("cpu:0", "fake0"), ("cpu:1", "fake1")])
def test_the_priority_matrix_steers(location: str, nic: str) -> None:
    matrix = {"cpu:0": [["fake0"], ["fake1"]], "cpu:1": [["fake1"], ["fake0"]]}
    with connected(nic_priority=matrix, numa_penalty=100) as rig:
        ours = np.arange(4 * KIB, dtype=np.uint16).view(np.uint8)
        here = rig.a.register(ours, location=location)
        there, theirs = rig.buffer(rig.b, 8 * KIB)
        rig.work_through()
        for rail in rig.endpoint.paths._health._rails:  # whatever this machine was busy with
            rail.bytes = rail.seconds = 1.0
        before = Counter({name: n.counts.posted for name, n in rig.verbs.nics.items()})
        rig.verbs.hold()
        submitted = [rig.submit(WRITE, (here, 0, there, 0, 8 * KIB)) for _ in range(4)]
        rig.verbs.release()
        for one in submitted:
            completed(one)
        assert (ours == theirs).all()
        after = Counter({name: n.counts.posted for name, n in rig.verbs.nics.items()})
        assert after - before == {nic: 4}


def test_rails_take_turns_where_settings_say_so() -> None:
    with connected(rail_choice="round_robin") as rig:
        here, _ = rig.buffer(rig.a, KIB)
        there, _ = rig.buffer(rig.b, KIB)
        rig.work_through()
        before = [nic.counts.posted for nic in rig.verbs.nics.values()]
        for _ in range(10):
            completed(rig.submit(WRITE, (here, 0, there, 0, KIB)))
        after = [nic.counts.posted for nic in rig.verbs.nics.values()]
        assert [b - a for a, b in zip(before, after, strict=True)] == [5, 5]


# -------------------------------------------------------------------- bad input


def test_a_buffer_that_is_gone_fails_only_the_work_that_names_it() -> None:
    with connected(fabric(nics=1), group=4) as rig:
        here, ours = rig.buffer(rig.a, 64 * KIB)
        there, theirs = rig.buffer(rig.b, 64 * KIB)
        gone, _ = rig.buffer(rig.b, 64 * KIB)
        rig.work_through()
        rig.verbs.hold()
        before = [(here, i * KIB, there, i * KIB, KIB) for i in range(32)]
        after = [(here, i * KIB, there, i * KIB, KIB) for i in range(32, 64)]
        first = rig.submit(WRITE, *before)
        bad = rig.submit(WRITE, (here, 0, gone, 0, KIB))
        second = rig.submit(WRITE, *after)
        rig.b.transport.remove_buffer(gone, 1.0)  # behind the back of the initiator
        rig.verbs.release()
        work = ended(bad)
        assert "remote access error" in str(work.causes[0].cause)
        assert not work.unfenced
        completed(first)
        completed(second)
        assert (ours == theirs).all()
        completed(rig.submit(WRITE, *before))


def test_another_generation_of_a_buffer_is_refused_before_anything_is_posted() -> None:
    with connected() as rig:
        here, _ = rig.buffer(rig.a, KIB)
        old, _ = rig.buffer(rig.b, KIB)
        completed(rig.submit(WRITE, (here, 0, old, 0, KIB)))
        posted = rig.verbs.counts.posted
        before = rig.b.segment.snapshot
        rig.b.unregister(old)
        new, _ = rig.buffer(rig.b, KIB)
        assert new.id == old.id
        rig.endpoint.refresh(before, rig.b.segment.snapshot)
        with pytest.raises(TransportError, match="not registered any more"):
            rig.submit(WRITE, (here, 0, old, 0, KIB))
        assert rig.verbs.counts.posted == posted
        completed(rig.submit(WRITE, (here, 0, new, 0, KIB)))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"[]",
        b'{"chunk": 0, "rkeys": []}',
        b'{"chunk": 1024, "rkeys": [[1]]}',
        b'{"chunk": 512, "rkeys": [[1], [2]]}',
        b'{"chunk": 1024, "rkeys": [[1, 2], [3, 4]]}',
        b'{"chunk": 1024, "rkeys": [[], []]}',
        b'{"chunk": 1024, "rkeys": [[-1], [2]]}',
        b'{"chunk": 1024, "rkeys": [[4294967296], [2]]}',
        b'{"chunk": 1e400, "rkeys": [[1], [2]]}',
    ],
)
def test_keys_that_do_not_fit_the_peer_are_refused(payload: bytes) -> None:
    with connected() as rig:
        here, _ = rig.buffer(rig.a, KIB)
        there, _ = rig.buffer(rig.b, KIB)

        def change(buffers: Mapping[int, BufferDescriptor]) -> Mapping[int, BufferDescriptor]:
            attributes = MappingProxyType({"rdma": Attribute(1, "rdma", payload)})
            return {there.id: replace(buffers[there.id], attributes=attributes)}

        rig.b._change_buffers(change)
        with pytest.raises(TransportError):
            rig.submit(WRITE, (here, 0, there, 0, KIB))
        assert rig.verbs.counts.posts == 0


def test_a_buffer_that_the_peer_could_not_register_is_refused() -> None:
    with connected() as rig:
        here, _ = rig.buffer(rig.a, KIB)
        rig.verbs.faults.fail_next("register", errno.ENOMEM)
        there, _ = rig.buffer(rig.b, KIB)
        with pytest.raises(TransportError, match="not offered by rdma"):
            rig.submit(WRITE, (here, 0, there, 0, KIB))


def test_a_peer_with_fewer_nics_is_reached_over_what_it_has() -> None:
    verbs = fabric(nics=3)
    with side(verbs, devices=["fake1"]) as b, side(verbs) as a:
        endpoint, _ = link(a, b)
        ours, theirs = np.full(MIB, 7, np.uint8), np.zeros(MIB, np.uint8)
        here, there = a.register(ours), b.register(theirs)
        completed(Submitted(endpoint, WRITE, [(here, 0, there, 0, MIB)]))
        assert (ours == theirs).all()
        endpoint.close("the test ends")


# -------------------------------------------------------------------- deadlines


def test_work_that_waits_past_its_deadline_ends_as_timed_out() -> None:
    with connected(fabric(nics=1), send_depth=16, group=16, **ONE_QUEUE_PAIR) as rig:
        here, _ = rig.buffer(rig.a, 64 * KIB)
        there, _ = rig.buffer(rig.b, 64 * KIB)
        rig.work_through()
        rig.verbs.hold()
        first = rig.submit(WRITE, *((here, i * KIB, there, i * KIB, KIB) for i in range(16)))
        late = submit(rig, WRITE, (here, 0, there, 0, KIB), deadline=time.monotonic() + 0.05)
        later = rig.submit(WRITE, (here, 0, there, 0, KIB))
        work = ended(late)
        assert work.status.tolist() == [Status.TIMEOUT]
        assert "deadline" in str(work.causes[0].cause)
        assert not work.unfenced
        assert not first.work.finished
        rig.verbs.release()
        completed(first)
        completed(later)


def test_an_endpoint_that_closed_is_not_kept_for_its_deadlines() -> None:
    with connected(fabric(nics=1), send_depth=16, group=16) as rig:
        here, _ = rig.buffer(rig.a, 64 * KIB)
        there, _ = rig.buffer(rig.b, 64 * KIB)
        rig.work_through()
        rig.verbs.hold()
        rows = [(here, i * KIB, there, i * KIB, KIB) for i in range(64)]
        submitted = rig.submit(WRITE, *rows, timeout=3600)
        assert transport(rig.a)._pollers[0]._calls
        rig.endpoint.close("enough")
        ended(submitted)
        assert not transport(rig.a)._pollers[0]._calls


# -------------------------------------------------------------------- waiting


def test_nobody_polls_while_nothing_is_under_way_and_a_completion_wakes_the_poller() -> None:
    with connected(fabric(nics=1)) as rig:
        here, ours = rig.buffer(rig.a, KIB)
        there, theirs = rig.buffer(rig.b, KIB)
        rig.work_through()
        rig.verbs.hold()
        submitted = rig.submit(WRITE, (here, 0, there, 0, KIB))
        before = settled(rig.verbs)
        assert settled(rig.verbs) == before
        rig.verbs.release()
        completed(submitted)
        assert (ours == theirs).all()
        wait_until(lambda: rig.verbs.counts.polls > before)


def test_what_others_left_to_a_thread_that_posts_is_heard_of_although_its_own_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with connected(fabric(nics=1)) as rig:
        here, _ = rig.buffer(rig.a, KIB)
        there, _ = rig.buffer(rig.b, KIB)
        rig.work_through()
        settled(rig.verbs)
        row = (here, 0, there, 0, KIB)
        nic = transport(rig.a)._nics[0]
        post = rig.endpoint._post_run
        mine: list[Any] = []
        others: list[Submitted] = []

        def post_run(*run: Any) -> None:
            if others:
                rig.verbs.release()
                wait_until(lambda: mine[0].work.finished)
                settled(rig.verbs)
                assert not nic._armed  # the poller was woken by that, and sleeps again
                post(*run)
                return
            mine.append(run[0])
            post(*run)
            thread = threading.Thread(target=lambda: others.append(rig.submit(WRITE, row)))
            thread.start()  # it arms, and leaves its own to the one that posts
            thread.join()

        rig.verbs.hold()
        monkeypatch.setattr(rig.endpoint, "_post_run", post_run)
        completed(rig.submit(WRITE, row))
        completed(others[0])


def settled(verbs: FakeVerbs) -> int:
    """How often was polled, once pollers sleep: an event that comes then is taken without polling."""
    last = -1
    while (now := verbs.counts.polls) != last:
        last = now
        for nic in verbs.nics.values():
            events = verbs.counts.calls["next_event"] + len(nic.contexts)
            nic.emit("OTHER")
            wait_until(partial(taken, verbs, events))
    return last


def taken(verbs: FakeVerbs, events: int) -> bool:
    return verbs.counts.calls["next_event"] == events


def test_who_waits_in_submit_takes_its_completions_itself() -> None:
    with connected(fabric(nics=1), spin=10_000) as rig:
        here, _ = rig.buffer(rig.a, KIB)
        there, _ = rig.buffer(rig.b, KIB)
        rig.work_through()
        rig.verbs.faults.fail_next("arm", errno.EIO, times=1000)
        submitted = submit(rig, WRITE, (here, 0, there, 0, KIB), may_block=True)
        assert submitted.work.finished
        rig.verbs.faults.clear()
        completed(submitted)


def test_a_mistake_while_posting_does_not_end_all_posting(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(fabric(nics=1)) as rig:
        here, ours = rig.buffer(rig.a, KIB)
        there, theirs = rig.buffer(rig.b, KIB)
        rig.work_through()
        with monkeypatch.context() as patched:
            patched.setattr(rig.endpoint.paths, "posted", None)
            with pytest.raises(TypeError):
                rig.submit(WRITE, (here, 0, there, 0, KIB))
        completed(rig.submit(WRITE, (here, 0, there, 0, KIB)))
        assert (ours == theirs).all()
