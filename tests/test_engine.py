"""The engine over mock transports: memory, transfers, failover, notifications, and how each call fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tent_core as tent
import tent_mock
from tent_core.plugins import Registry
from tent_core.testing import wait_until
from tent_core.types import DRAM_TO_DRAM, MemoryKind, MemoryPair
from tent_mock.controller import Controller

FIRST, SECOND = 1001, 1002
ONE = [{"name": "one", "transports": ["second"]}]
Pair = tuple[tent.Engine, tent.Engine]
Make = Callable[..., tent.Engine]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes engines with two mock transports, `first` and `second`, of which the policy prefers `first`."""
    engines: list[tent.Engine] = []

    def made(config: dict[str, Any] | None = None, **capabilities: Any) -> tent.Engine:
        registry = Registry.of(
            tent_mock.declare("first", FIRST, **{"owner_checked": False, **capabilities}),
            tent_mock.declare("second", SECOND),
        )
        base = {
            "transports": {"first": {"enable": True}, "second": {"enable": True}},
            "policy": [{"name": "both", "transports": ["first", "second"]}],
            "log": {"level": "error"},
        }
        engines.append(tent.Engine({**base, **(config or {})}, plugins=registry))
        return engines[-1]

    yield made
    for engine in engines:
        engine.close()


@pytest.fixture
def pair(make: Make) -> Pair:
    return make(), make()


class Joined:
    """Two engines, a buffer of 64 KiB on each side, and the controllers of the initiator's transports."""

    def __init__(self, here: tent.Engine, there: tent.Engine) -> None:
        self.here, self.there = here, there
        self.target = there.allocate(1 << 16, name="target")
        self.local = here.allocate(1 << 16, name="local")
        self.local.array[:] = np.random.default_rng(3).integers(0, 256, 1 << 16, np.uint8)
        self.segment = here.open_segment(there.segment_name)
        self.remote = self.segment.buffer("target")

    def mock(self, name: str = "first") -> Controller:
        return tent_mock.controller(self.here, name)

    def right(self, length: int = 1 << 16) -> bool:
        return bool((self.target.array[:length] == self.local.array[:length]).all())


@pytest.fixture
def joined(pair: Pair) -> Joined:
    return Joined(*pair)


def offsets(n: int, block: int = 256) -> np.ndarray:
    return np.arange(n) * block


# -------------------------------------------------------------------- transfers


def test_what_is_written_arrives_and_what_is_read_comes_back(joined: Joined) -> None:
    joined.segment.write(joined.local[0:4096], joined.remote[4096:8192])
    assert (joined.target.array[4096:8192] == joined.local.array[:4096]).all()
    joined.target.array[:16] = 7
    joined.segment.read(joined.local[16:32], joined.remote[0:16])
    assert (joined.local.array[16:32] == 7).all()


def test_many_ranges_go_in_one_call(joined: Joined) -> None:
    rng = np.random.default_rng(5)
    here, there = rng.permutation(256), rng.permutation(256)
    batch = joined.segment.write_many(joined.local, here * 256, joined.remote, there * 256, 256)
    blocks = joined.local.array.reshape(256, 256)
    assert (joined.target.array.reshape(256, 256)[there] == blocks[here]).all()
    assert batch.transports() == {"first": 1 << 16}
    assert (batch.status == tent.Status.COMPLETED).all()
    assert batch.moved.sum() == 1 << 16


def test_a_batch_may_mix_directions_and_buffers(joined: Joined) -> None:
    other = joined.there.allocate(4096, name="other")
    other.array[:] = 9
    wait_until(lambda: joined.segment.buffer("other") is not None)
    remotes = [joined.remote, joined.segment.buffer("other")]
    batch = joined.segment.submit(
        [tent.Opcode.WRITE, tent.Opcode.READ],
        joined.local,
        [0, 8192],
        remotes,
        [128, 0],
        [64, 4096],
        remote_index=[0, 1],
    )
    batch.wait(5)
    assert (joined.target.array[128:192] == joined.local.array[:64]).all()
    assert (joined.local.array[8192 : 8192 + 4096] == 9).all()


def test_in_a_mixed_batch_each_direction_needs_its_own_permission_only(joined: Joined) -> None:
    joined.there.allocate(64, name="readable", permission=tent.Permission.GLOBAL_READ_ONLY)
    constant = joined.here.register(b"c" * 64, permission=tent.Permission.GLOBAL_READ_ONLY)
    locals_, remotes = [constant, joined.local], [joined.remote, joined.segment.buffer("readable")]

    def submit(*opcodes: tent.Opcode) -> tent.Batch:
        return joined.segment.submit(
            opcodes, locals_, [0, 0], remotes, [0, 0], 64, local_index=[0, 1], remote_index=[0, 1]
        )

    submit(tent.Opcode.WRITE, tent.Opcode.READ).wait(5)
    assert bytes(joined.target.array[:64]) == b"c" * 64
    for wrong in ((tent.Opcode.READ, tent.Opcode.READ), (tent.Opcode.WRITE, tent.Opcode.WRITE)):
        with pytest.raises(tent.PermissionDenied):
            submit(*wrong)


def test_a_prepared_transfer_is_posted_again_and_again(joined: Joined) -> None:
    prepared = joined.segment.prepare("write", joined.local[0:64], joined.remote[0:64])
    for value in (1, 2, 3):
        joined.local.array[:64] = value
        prepared.run()
        assert (joined.target.array[:64] == value).all()
    joined.local.array[:64] = 4
    prepared.post().wait(5)
    assert (joined.target.array[:64] == 4).all()


def test_a_prepared_batch_is_posted_again_and_again(joined: Joined) -> None:
    here, there = offsets(16, 4096), offsets(16, 4096)[::-1]
    prepared = joined.segment.prepare_many("write", joined.local, here, joined.remote, there, 4096)
    local, target = (array.reshape(16, 4096) for array in (joined.local.array, joined.target.array))
    for value in (1, 2, 3):
        local[:] = (np.arange(16) + value)[:, None]
        prepared.run()
        assert (target[::-1] == local).all()
    local[:] = 9
    prepared.post().wait(5)
    assert (target == 9).all()


def test_an_empty_batch_has_nothing_to_do(joined: Joined) -> None:
    assert len(joined.segment.write_many(joined.local, [], joined.remote, [], 64)) == 0


def test_a_buffer_registered_after_the_segment_was_opened_is_usable(joined: Joined) -> None:
    joined.there.register(bytearray(64), name="late")
    late = joined.segment.buffer("late")
    joined.segment.write(joined.local[0:64], late)


async def test_transfers_and_calls_work_in_asyncio_without_blocking_the_loop(pair: Pair) -> None:
    here, there = pair
    target = await there.aio.allocate(4096, name="target")
    local = await here.aio.register(np.full(4096, 5, np.uint8))
    segment = await here.aio.open_segment(there.segment_name)
    batch = segment.submit("write", local, [0], segment.buffer("target"), [0], 4096)
    assert await batch is batch
    assert (target.array == 5).all()
    await here.aio.notify(segment, "done", b"payload")
    note = await there.aio.next_notification(5)
    assert (note.name, note.payload, note.sender) == ("done", b"payload", here.key)


async def test_waiting_for_a_notification_in_asyncio_can_be_given_up(pair: Pair) -> None:
    here, there = pair
    with pytest.raises(tent.WaitTimeout):
        await there.aio.next_notification(0.01)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(there.aio.next_notification(), 0.01)
    with here.open_segment(there.segment_name) as segment:
        await here.aio.notify(segment, "later")
    assert (await there.aio.next_notification(5)).name == "later"


# -------------------------------------------------------------------- failover


@pytest.mark.parametrize("fault", ["refuse", "fail", "raise", "short"])
def test_what_one_transport_refuses_or_fails_the_next_one_carries(
    joined: Joined, fault: str
) -> None:
    joined.mock().plan(fault)
    batch = joined.segment.write_many(joined.local, offsets(256), joined.remote, offsets(256), 256)
    assert joined.right()
    assert batch.transports()["second"] == 1 << 16 if fault != "short" else batch.transports()
    assert joined.here.stats()["failovers"] == 256


def test_only_what_failed_moves_to_the_next_transport(joined: Joined) -> None:
    joined.mock().plan("fail", at=3)
    joined.mock().plan("refuse", at=5)
    rows = offsets(8)[[0, 2, 4, 6, 1, 3, 5, 7]]  # neighbours would travel together
    batch = joined.segment.write_many(joined.local, rows, joined.remote, rows, 256)
    assert joined.right(8 * 256)
    assert batch.transports() == {"first": 6 * 256, "second": 2 * 256}


def test_a_failure_that_nobody_waits_for_moves_by_itself(joined: Joined) -> None:
    joined.segment.write(joined.local, joined.remote)
    joined.target.array[:] = 0
    joined.mock().plan("hang", at=1)
    joined.mock().plan("fail", at=1)
    batch = joined.segment.submit("write", joined.local, [0], joined.remote, [0], 4096)
    joined.mock().wait_held(1)
    joined.mock().release()
    batch.wait(5)
    assert joined.right(4096)


def test_when_everything_fails_the_error_lists_every_attempt(joined: Joined) -> None:
    joined.mock("first").plan("fail")
    joined.mock("second").plan("refuse")
    with pytest.raises(tent.TransferFailed, match=r"(?s)first after .*; second after"):
        joined.segment.write(joined.local, joined.remote)


def test_failover_is_turned_off_by_zero_attempts(make: Make) -> None:
    joined = Joined(make({"failover": {"max_attempts": 0}}), make())
    joined.mock().plan("fail")
    with pytest.raises(tent.TransferFailed):
        joined.segment.write(joined.local, joined.remote)
    assert joined.mock("second").count("connect") == 0


def test_a_write_that_may_still_write_fails_as_unknown_and_does_not_move(joined: Joined) -> None:
    joined.mock().plan("fail", fenced=False, at=1)
    with pytest.raises(tent.TransferFailed, match="outcome unknown"):
        joined.segment.write(joined.local, joined.remote)
    assert joined.here.stats()["failovers"] == 0


def test_a_second_report_of_a_request_changes_nothing_and_is_counted(joined: Joined) -> None:
    joined.mock().plan("twice", at=1)
    joined.segment.write(joined.local, joined.remote)
    assert joined.right()
    assert joined.here.stats_.surplus_reports == 1


def test_a_transport_that_crashes_in_submit_fails_its_tasks_and_nothing_else(
    joined: Joined,
) -> None:
    joined.mock().plan("crash", at=1)
    with pytest.raises(tent.TransferFailed, match="RuntimeError"):
        joined.segment.write(joined.local, joined.remote)
    joined.segment.write(joined.local, joined.remote)
    assert joined.right()


def test_a_transport_that_cannot_reach_a_peer_is_passed_over_with_its_reason(
    joined: Joined,
) -> None:
    joined.mock().plan("unreachable", on="connect")
    batch = joined.segment.write_many(joined.local, [0], joined.remote, [0], 64)
    assert batch.transports() == {"second": 64}
    found = joined.here.explain(joined.segment)
    assert found.candidates == ("second",)
    assert [p.name for p in found.passed_over] == ["first"]


def test_a_hint_is_tried_first_and_failover_leaves_it(joined: Joined) -> None:
    batch = joined.segment.write_many(joined.local, [0], joined.remote, [0], 64, transport="second")
    assert batch.transports() == {"second": 64}
    joined.mock("second").plan("fail", at=1)
    batch = joined.segment.write_many(joined.local, [0], joined.remote, [0], 64, transport="second")
    assert batch.transports() == {"first": 64}


def test_an_entry_that_the_policy_does_not_have_is_a_mistake_that_holds_nothing(
    joined: Joined,
) -> None:
    for call in (
        lambda: joined.segment.write(joined.local, joined.remote, policy="boht"),
        lambda: joined.segment.write_many(joined.local, [0], joined.remote, [0], 64, policy="boht"),
        lambda: joined.here.explain(policy="boht"),
    ):
        with pytest.raises(tent.UsageError, match=r"'boht'.*did you mean 'both'"):
            call()
    joined.local.unregister(timeout=5)
    joined.target.unregister(timeout=5)


def test_no_candidate_at_all_says_for_each_transport_why(make: Make) -> None:
    joined = Joined(make(), make({"transports": {"second": {"enable": True}}, "policy": ONE}))
    joined.mock("second").plan("unreachable", on="connect")
    for _ in range(2):
        with pytest.raises(tent.TransferFailed, match="second"):
            joined.segment.write(joined.local, joined.remote)


# -------------------------------------------------------------------- mistakes of the caller


def test_mistakes_raise_before_anything_has_moved(joined: Joined) -> None:
    before = joined.target.array.copy()
    segment, local, remote = joined.segment, joined.local, joined.remote
    with pytest.raises(tent.RangeError, match="request 1"):
        segment.write_many(local, [0, 65500], remote, [0, 0], 64)
    with pytest.raises(tent.RangeError, match="request 0"):
        segment.write_many(local, [0], remote, np.array([2**64 - 1], np.uint64), 64)
    with pytest.raises(tent.RangeError, match="equal length"):
        segment.write(local[0:64], remote[0:65])
    with pytest.raises(tent.RangeError):
        remote[0:65537]
    with pytest.raises(tent.UsageError, match="register it first"):
        segment.write(bytearray(64), remote[0:64])  # type: ignore[arg-type]
    with pytest.raises(tent.UsageError, match="another engine"):
        segment.write(joined.there.allocate(64), remote[0:64])
    with pytest.raises(tent.UsageError):
        segment.write(local[0:64], remote[0:64], priority=9)  # type: ignore[arg-type]
    assert (joined.target.array == before).all()
    assert joined.here.stats()["transports"]["first"]["tasks"] == 0


def test_permissions_of_the_owner_are_kept(joined: Joined) -> None:
    joined.there.allocate(64, name="readable", permission=tent.Permission.GLOBAL_READ_ONLY)
    joined.there.allocate(64, name="private", permission=tent.Permission.LOCAL_READ_WRITE)
    readable, private = joined.segment.buffer("readable"), joined.segment.buffer("private")
    joined.segment.read(joined.local[0:64], readable)
    with pytest.raises(tent.PermissionDenied, match="GLOBAL_READ_ONLY"):
        joined.segment.write(joined.local[0:64], readable)
    with pytest.raises(tent.PermissionDenied, match="LOCAL_READ_WRITE"):
        joined.segment.read(joined.local[0:64], private)


def test_a_read_only_object_is_not_written_to(joined: Joined) -> None:
    with pytest.raises(tent.UsageError, match="GLOBAL_READ_ONLY"):
        joined.here.register(b"constant")
    constant = joined.here.register(b"constant", permission=tent.Permission.GLOBAL_READ_ONLY)
    joined.segment.write(constant, joined.remote[0:8])
    with pytest.raises(tent.PermissionDenied, match="read-only"):
        joined.segment.read(constant, joined.remote[0:8])


def test_an_unknown_segment_and_an_unknown_buffer_are_named(joined: Joined) -> None:
    with pytest.raises(tent.UnknownSegment, match=r"127\.0\.0\.1:1"):
        joined.here.open_segment("127.0.0.1:1", timeout=2)
    with pytest.raises(tent.RangeError, match="no buffer 'nothing'; it has 'target'"):
        joined.segment.buffer("nothing")


def test_a_closed_handle_and_a_closed_engine_say_so(joined: Joined) -> None:
    prepared = joined.segment.prepare("write", joined.local, joined.remote)
    joined.segment.close()
    joined.segment.close()
    for call in (prepared.run, prepared.post, joined.segment.buffers):
        with pytest.raises(tent.ClosedError, match="closed"):
            call()
    joined.here.close()
    for call in (lambda: joined.here.allocate(64), lambda: joined.here.open_segment("127.0.0.1:1")):
        with pytest.raises(tent.ClosedError, match="closed"):
            call()


def test_device_memory_that_no_transport_moves_is_refused_with_the_reason(make: Make) -> None:
    engine = make()
    with pytest.raises(tent.MemoryUnsupported, match=r"cuda:1.*running: first, second"):
        engine.register((4096, 4096), location="cuda:1")
    able = make({}, memory_pairs=DRAM_TO_DRAM | {MemoryPair(MemoryKind.GPU, MemoryKind.GPU)})
    assert able.register((4096, 4096), location="cuda:1").offers == {"first": FIRST}


def test_a_raw_address_is_found_in_its_buffer_or_the_nearest_one_is_named(joined: Joined) -> None:
    found = joined.here.locate(joined.local.address + 100, 50)
    assert (found.buffer, found.offset, found.length) == (joined.local, 100, 50)
    with pytest.raises(tent.RangeError, match="nearest is 'local'"):
        joined.here.locate(joined.local.address + joined.local.length, 1)


# -------------------------------------------------------------------- registration and revocation


@pytest.mark.parametrize("name", ["", "\ud800", "x" * 1025])
def test_a_name_that_cannot_travel_is_refused_and_nothing_is_registered(
    pair: Pair, name: str
) -> None:
    with pytest.raises(tent.UsageError, match="name"):
        pair[0].register_many([bytearray(8), bytearray(8)], names=["fine", name])
    assert pair[0].buffers() == []


def test_many_registrations_are_one_new_snapshot(pair: Pair) -> None:
    here, _ = pair
    version = here.descriptor.version
    made = here.register_many([bytearray(64) for _ in range(100)])
    assert here.descriptor.version == version + 1
    assert len({b.id for b in made}) == 100


def test_overlapping_registrations_are_buffers_of_their_own(joined: Joined) -> None:
    whole = np.zeros(4096, np.uint8)
    one, two = joined.there.register_many([whole, whole[1024:]], names=["one", "two"])
    first, second = joined.segment.buffer("one"), joined.segment.buffer("two")
    one.unregister()
    with pytest.raises(tent.StaleHandle):
        joined.segment.write(joined.local[0:64], first[0:64])
    joined.segment.write(joined.local[0:64], second[0:64])
    assert (whole[1024:1088] == joined.local.array[:64]).all()
    two.unregister()


def test_what_is_registered_stays_alive_until_it_is_unregistered(pair: Pair) -> None:
    import weakref

    class Array(np.ndarray):
        pass

    here, _ = pair
    array = np.zeros(4096, np.uint8).view(Array)
    alive = weakref.ref(array)
    buffer = here.register(array)
    del array
    assert alive() is not None
    buffer.unregister()
    assert alive() is None


def test_unregistering_waits_for_own_transfers_and_then_goes_on(joined: Joined) -> None:
    joined.segment.write(joined.local, joined.remote)
    joined.mock().plan("hang", at=1)
    batch = joined.segment.submit("write", joined.local, [0], joined.remote, [0], 64)
    joined.mock().wait_held(1)
    with pytest.raises(tent.RevocationTimeout, match="this engine"):
        joined.local.unregister(timeout=0.05)
    with pytest.raises(tent.BufferRevoked, match="being unregistered"):
        joined.segment.write(joined.local[0:64], joined.remote[0:64])
    joined.mock().release()
    batch.wait(5)
    joined.local.unregister(timeout=5)
    with pytest.raises(tent.StaleHandle, match="was unregistered"):
        joined.segment.write(joined.local[0:64], joined.remote[0:64])
    with pytest.raises(tent.ClosedError, match="not registered"):
        joined.local.unregister()


def test_a_watcher_that_does_not_let_go_is_named_and_can_be_waited_for_again(
    joined: Joined,
) -> None:
    joined.segment.write(joined.local, joined.remote)
    joined.mock().plan("hang", at=1)
    batch = joined.segment.submit("write", joined.local, [0], joined.remote, [0], 64)
    joined.mock().wait_held(1)
    with pytest.raises(tent.RevocationTimeout, match=joined.here.segment_name) as raised:
        joined.target.unregister(timeout=0.2)
    assert str(joined.here.key) in raised.value.holders[0]
    wait_until(lambda: isinstance(joined.remote.gone(), tent.BufferRevoked))
    with pytest.raises(tent.BufferRevoked):
        joined.segment.write(joined.local[0:64], joined.remote[0:64])
    joined.mock().release()
    batch.wait(5, check=False)
    joined.target.unregister(timeout=5)
    wait_until(lambda: type(joined.remote.gone()) is tent.StaleHandle)


def test_two_threads_that_unregister_one_buffer_take_turns(joined: Joined) -> None:
    outcomes: list[object] = []

    def unregister() -> None:
        try:
            joined.target.unregister(timeout=5)
            outcomes.append("done")
        except tent.ClosedError:
            outcomes.append("already")

    threads = [threading.Thread(target=unregister) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert "done" in outcomes
    assert len(outcomes) == 4


# -------------------------------------------------------------------- peers


def test_reopening_a_segment_reuses_the_peer(joined: Joined) -> None:
    joined.segment.write(joined.local, joined.remote)
    joined.segment.close()
    with joined.here.open_segment(joined.there.segment_name) as again:
        again.write(joined.local, again.buffer("target"))
    assert joined.mock().count("connect") == 1


def test_two_names_of_one_engine_are_one_peer(joined: Joined) -> None:
    port = joined.there.segment_name.rpartition(":")[2]
    with joined.here.open_segment(f"localhost:{port}") as again:
        again.write(joined.local, again.buffer("target"))
        assert again.name == joined.segment.name
    assert len(joined.here.peers()) == 1


def test_a_peer_that_closes_has_departed_and_everything_of_it_fails_clearly(joined: Joined) -> None:
    prepared = joined.segment.prepare("write", joined.local, joined.remote)
    prepared.run()
    joined.mock().plan("hang", at=1)
    batch = prepared.post()
    joined.mock().wait_held(1)
    joined.there.close()
    with pytest.raises(tent.TransferFailed):
        batch.wait(5)
    for call in (
        prepared.run,
        lambda: joined.segment.write(joined.local, joined.remote),
        lambda: joined.segment.notify("late"),
    ):
        with pytest.raises(tent.PeerDeparted, match=joined.there.segment_name):
            call()
    wait_until(lambda: joined.here.peers() == [])
    assert joined.mock().count("close") == 1


def test_a_transfer_that_ends_with_its_peer_says_so_whatever_its_transport_says(
    make: Make,
) -> None:
    joined = Joined(make({"policy": ONE}), make({"policy": ONE}))
    joined.mock("second").plan("hang", at=1)
    batch = joined.segment.submit("write", joined.local, [0], joined.remote, [0], 64)
    joined.mock("second").wait_held(1)
    joined.segment.peer.depart("its process 7 ended")
    with pytest.raises(tent.TransferFailed, match=r"departed \(its process 7 ended\): the conn"):
        batch.wait(5)


def test_closing_is_bounded_while_work_hangs(joined: Joined) -> None:
    joined.segment.write(joined.local, joined.remote)
    joined.mock().plan("hang")
    batch = joined.segment.submit("write", joined.local, [0], joined.remote, [0], 64)
    joined.mock().wait_held(1)
    joined.here.close(timeout=3)
    assert batch.done
    assert batch.failures


def test_closing_does_not_wait_for_a_notification_that_nobody_takes(make: Make) -> None:
    joined = Joined(make(), make({"notifications": {"queue": 1}}))
    joined.segment.notify("fills the queue")
    waiting = threading.Thread(target=_refused, args=(joined.segment,), daemon=True)
    waiting.start()
    wait_until(lambda: joined.here.peers()[0].idle_s is None)
    closing = threading.Thread(target=joined.here.close, args=(60.0,), daemon=True)
    closing.start()
    for thread in (waiting, closing):
        thread.join(20)
        assert not thread.is_alive()


def _refused(segment: tent.Segment) -> None:
    with pytest.raises(tent.PeerDeparted, match="the engine was closed"):
        segment.notify("finds no room", timeout=60.0)


def test_an_engine_can_open_its_own_segment(pair: Pair) -> None:
    here, _ = pair
    here.allocate(64, name="mine")
    local = here.register(np.full(64, 3, np.uint8))
    with here.open_segment(here.segment_name) as mine:
        mine.write(local, mine.buffer("mine"))


# -------------------------------------------------------------------- notifications


def test_notifications_arrive_in_order_and_only_once(joined: Joined) -> None:
    for i in range(50):
        joined.segment.notify("step", str(i).encode())
    got = [joined.there.next_notification(5) for _ in range(50)]
    assert [note.payload for note in got] == [str(i).encode() for i in range(50)]
    assert all(note.sender == joined.here.key for note in got)
    assert joined.there.poll_notifications() == []
    with pytest.raises(tent.WaitTimeout):
        joined.there.next_notification(0.01)


def test_a_notification_that_is_too_large_is_refused(joined: Joined) -> None:
    with pytest.raises(tent.UsageError, match="65"):
        joined.segment.notify("large", bytes(1 << 16))


def test_a_full_receiver_fails_the_notification_at_its_deadline(make: Make) -> None:
    here, there = make(), make({"notifications": {"queue": 1}})
    with here.open_segment(there.segment_name) as segment:
        segment.notify("one")
        with pytest.raises(tent.WaitTimeout, match="was full"):
            segment.notify("two", timeout=2)
        assert there.next_notification(5).name == "one"
        # A last try of "two" may have been under way, and fill the queue again: it has to be taken as well.
        names: list[str] = []
        taker = threading.Thread(
            target=lambda: names.extend(note.name for note in there.notifications())
        )
        taker.start()
        segment.notify("three", timeout=5)
        wait_until(lambda: names[-1:] == ["three"])
        there.close()
        taker.join(5)


def test_iterating_over_notifications_ends_with_the_engine(joined: Joined) -> None:
    names: list[str] = []
    reader = threading.Thread(
        target=lambda: names.extend(note.name for note in joined.there.notifications())
    )
    reader.start()
    joined.segment.notify("one")
    wait_until(lambda: names == ["one"])
    joined.there.close()
    reader.join(5)
    assert not reader.is_alive()


# -------------------------------------------------------------------- numbers and texts


def test_stats_count_by_transport_and_by_peer(joined: Joined) -> None:
    joined.segment.write_many(joined.local, offsets(4), joined.remote, offsets(4), 256)
    stats = joined.here.stats()
    assert stats["transports"]["first"]["bytes"] == 1024
    assert stats["transports"]["first"]["tasks"] == 4
    assert stats["peers"][str(joined.there.key)]["transports"]["first"]["bytes"] == 1024
    assert stats["buffers"] == {"count": 1, "bytes": 1 << 16, "allocated": 1}


def test_reprs_help(joined: Joined) -> None:
    prepared = joined.segment.prepare("write", joined.local, joined.remote)
    batch = joined.segment.write_many(joined.local, [0], joined.remote, [0], 64)
    for thing, words in (
        (joined.here, ["Engine", joined.here.segment_name, "first, second"]),
        (joined.local, ["local", "65536 bytes", "cpu:0"]),
        (joined.remote, ["target", "GLOBAL_READ_WRITE"]),
        (joined.segment, [joined.there.segment_name, "open"]),
        (prepared, ["1 requests"]),
        (batch, ["1 COMPLETED"]),
    ):
        assert all(word in repr(thing) for word in words), repr(thing)


@pytest.mark.parametrize(
    "call", ["write", "read", "prepare", "write_many", "submit", "prepare_many"]
)
def test_a_mistyped_option_of_a_transfer_is_an_error_that_names_the_right_one(
    joined: Joined, call: str
) -> None:
    one = (joined.local[:8], joined.remote[:8])
    many = (joined.local, [0], joined.remote, [0], 8)
    given = many if "many" in call or call == "submit" else one
    opcode = ("write",) if call.startswith("prepare") or call == "submit" else ()
    with pytest.raises(tent.UsageError, match=r"no option 'timout'; did you mean 'timeout'\?"):
        getattr(joined.segment, call)(*opcode, *given, timout=5)
