"""The suite that any transport must pass, ours or a stranger's, through the public API and over real engines.

A package's own tests subclass it, and pytest runs the rest:

    from tent_core.testing.conformance import TransportConformance

    class TestConformance(TransportConformance):
        transport = "mine"

What a transport does not claim in its capabilities is skipped, with the reason. Nothing here knows any
transport by name.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

import tent_core as tent
from tent_core import plugins
from tent_core.control.contract import NOTIFICATION_LIMIT as LARGEST_NOTE
from tent_core.testing.churn import Churn
from tent_core.testing.leaks import nothing_stays_behind
from tent_core.testing.peers import PeerProcess
from tent_core.testing.waiting import wait_until
from tent_core.types import Capabilities, MemoryKind, Opcode, Permission, Reach, Status

KIB, MIB = 1 << 10, 1 << 20
ALLOCATED, REGISTERED = "allocated", "registered"

SIZES = (1, 3, 64, 4095, 4096, 4097, 64 * KIB, 256 * KIB + 1, 3 * MIB + 5)
"""Around what implementations treat apart: a word, a page, a spun or kept GIL, a copy that is split."""

MANY = 2500
"""Blocks of a batch; more than two vectored system calls take (IOV_MAX is 1024)."""

WARM_UP, PEERS = 3, 12
"""How many peers come and go before what is held is counted, and how many then."""

CARRIES_WITHIN_S = 10.0
"""How long a transport may take until it carries notifications."""

CHURN_SETTLES_S = 10.0
"""How long the last of them may take to be forgotten."""

WITHDRAWN = (tent.StaleHandle, tent.TransferFailed)
"""What a buffer that its owner took away gives: the first where the peer has heard of it, the second where
the owner's side refused the request before that."""

HAMMER = """
import threading

def hammer(segment_name, buffer_name):
    global hammering, outcome, rounds
    outcome, rounds = [], 0
    segment = engine.open_segment(segment_name)
    remote = segment.buffer(buffer_name)
    source = engine.allocate(remote.length)
    source.array[:] = 255
    offsets = np.arange(0, remote.length, 1024)

    def write():
        global rounds
        try:
            while True:
                segment.write_many(source, offsets, remote, offsets[::-1], 1024)
                rounds += 1
        except tent.TentError as error:
            outcome.append((type(error).__name__, str(error)))
            segment.close()
            source.unregister()

    hammering = threading.Thread(target=write, daemon=True)
    hammering.start()
"""
"""For another process: writes to a buffer of this one, again and again, until that fails."""


@dataclass
class Ends:
    """Two engines of this process, and the segment of `there` opened by `here`."""

    here: tent.Engine
    there: tent.Engine
    segment: tent.Segment
    random: np.random.Generator

    def bytes(self, size: int) -> NDArray[np.uint8]:
        """Random content."""
        return self.random.integers(0, 256, size, np.uint8)

    def buffer(
        self,
        engine: tent.Engine,
        content: NDArray[np.uint8],
        memory: str = ALLOCATED,
        permission: Permission = Permission.GLOBAL_READ_WRITE,
    ) -> tent.Buffer:
        """A buffer with this content, in memory made by the engine or by the application."""
        if memory == REGISTERED:
            return engine.register(content.copy(), permission=permission)
        buffer = engine.allocate(len(content), permission=permission)
        buffer.array[:] = content
        return buffer

    def remote(self, buffer: tent.Buffer) -> tent.RemoteBuffer:
        """A buffer of `there` as `here` sees it."""
        return self.segment.buffer(buffer.name)

    def rows(
        self, count: int, local: int, remote: int, longest: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Offsets in two buffers of these sizes and lengths, at random, disjoint at either side."""
        spans = [
            np.sort(self.random.permutation(size // longest)[:count]) for size in (local, remote)
        ]
        here, there = (self.random.permutation(span) * longest for span in spans)
        return here, there, self.random.integers(1, longest + 1, count)


def apply(
    target: NDArray[np.uint8],
    at: NDArray[np.int64],
    source: NDArray[np.uint8],
    origin: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> NDArray[np.uint8]:
    """What `target` must hold after the ranges of `source` were copied into it."""
    expected = target.copy()
    for a, o, n in zip(at.tolist(), origin.tolist(), lengths.tolist(), strict=True):
        expected[a : a + n] = source[o : o + n]
    return expected


class TransportConformance:
    """Subclass it as `Test...`, name the `transport`, and give its `settings` as YAML would."""

    transport: ClassVar[str]
    settings: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def registry(cls) -> plugins.Registry:
        """Where the transport is found: what is installed, unless a subclass knows better."""
        return plugins.discover()

    @classmethod
    def config(cls) -> dict[str, Any]:
        """A configuration in which this transport is the only one."""
        return {
            "transports": {cls.transport: {"enable": True, **cls.settings}},
            "policy": [{"name": "conformance", "transports": [cls.transport]}],
            "log": {"level": "error"},
        }

    @classmethod
    def engine(cls, **changes: Any) -> tent.Engine:
        """An engine with this transport alone, and other top-level sections as given."""
        return tent.Engine({**cls.config(), **changes}, plugins=cls.registry())

    @classmethod
    def capabilities(cls) -> Capabilities:
        """What the transport claims."""
        return cls.registry().load(cls.transport).declaration.capabilities

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _moves_host_memory(cls) -> None:
        if not cls.capabilities().moves(MemoryKind.DRAM, MemoryKind.DRAM):
            pytest.skip(f"{cls.transport} does not claim to move host memory to host memory")

    @pytest.fixture(scope="class")
    @classmethod
    def ends(cls) -> Iterator[Ends]:
        """Two engines, and a segment opened before anything is registered. Tests share them and make buffers
        of their own: starting an engine may cost a process."""
        with ExitStack() as stack:
            here, there = stack.enter_context(cls.engine()), stack.enter_context(cls.engine())
            segment = stack.enter_context(here.open_segment(there.segment_name))
            yield Ends(here, there, segment, np.random.default_rng(20240607))

    @pytest.fixture
    def elsewhere(self) -> Iterator[PeerProcess]:
        """An engine in a process of its own, with a megabyte `pool` that this process may use."""
        if self.capabilities().reach < Reach.HOST:
            pytest.skip(f"{self.transport} does not claim to reach other processes")
        with PeerProcess(self.config()) as peer:
            peer.run(f"pool = engine.allocate({MIB}, name='pool')")
            yield peer

    # Bytes

    @pytest.mark.parametrize("memory", [ALLOCATED, REGISTERED])
    def test_a_write_of_any_size_arrives_and_touches_nothing_else(
        self, ends: Ends, memory: str
    ) -> None:
        space = ends.bytes(max(SIZES) + 2 * KIB)
        target = ends.buffer(ends.there, space, memory)
        remote = ends.remote(target)
        for size in SIZES:
            content = ends.bytes(size)
            source = ends.buffer(ends.here, content, memory)
            target.array[:] = space
            ends.segment.write(source, remote[KIB : KIB + size])
            expected = space.copy()
            expected[KIB : KIB + size] = content
            assert np.array_equal(target.array, expected), f"{size} bytes"
            assert np.array_equal(source.array, content), f"{size} bytes"

    @pytest.mark.parametrize("memory", [ALLOCATED, REGISTERED])
    def test_a_read_of_any_size_arrives_and_touches_nothing_else(
        self, ends: Ends, memory: str
    ) -> None:
        space = ends.bytes(max(SIZES) + 2 * KIB)
        target = ends.buffer(ends.here, space, memory)
        for size in SIZES:
            content = ends.bytes(size)
            source = ends.buffer(ends.there, content, memory)
            target.array[:] = space
            ends.segment.read(target[KIB : KIB + size], ends.remote(source))
            expected = space.copy()
            expected[KIB : KIB + size] = content
            assert np.array_equal(target.array, expected), f"{size} bytes"
            assert np.array_equal(source.array, content), f"{size} bytes"

    @pytest.mark.parametrize("memory", [ALLOCATED, REGISTERED])
    @pytest.mark.parametrize("longest", [61, 4 * KIB])
    def test_many_blocks_at_random_places_go_both_ways_in_one_call(
        self, ends: Ends, memory: str, longest: int
    ) -> None:
        size = MANY * longest
        local = ends.buffer(ends.here, ends.bytes(size), memory)
        target = ends.buffer(ends.there, ends.bytes(2 * size), memory)
        remote = ends.remote(target)
        here, there, lengths = ends.rows(MANY, size, 2 * size, longest)

        expected = apply(target.array, there, local.array, here, lengths)
        batch = ends.segment.write_many(local, here, remote, there, lengths)
        assert np.array_equal(target.array, expected)
        assert batch.moved.tolist() == lengths.tolist()
        assert set(batch.status.tolist()) == {Status.COMPLETED}
        assert batch.transports() == {self.transport: int(lengths.sum())}

        expected = apply(local.array, here, target.array, there[::-1], lengths)
        ends.segment.read_many(local, here, remote, there[::-1], lengths)
        assert np.array_equal(local.array, expected)

    def test_one_batch_spans_many_buffers_of_either_side(self, ends: Ends) -> None:
        kinds = [ALLOCATED, REGISTERED] * 3
        local = [ends.buffer(ends.here, ends.bytes(KIB), kind) for kind in kinds]
        targets = [ends.buffer(ends.there, ends.bytes(KIB), kind) for kind in reversed(kinds)]
        remote = [ends.remote(target) for target in targets]
        order = ends.random.permutation(6)
        ends.segment.write_many(
            local, [0] * 6, remote, [0] * 6, KIB, local_index=order, remote_index=range(6)
        )
        for index, target in zip(order, targets, strict=True):
            assert np.array_equal(target.array, local[index].array)

    def test_a_prepared_transfer_moves_the_bytes_of_the_moment_each_time(self, ends: Ends) -> None:
        source = ends.buffer(ends.here, ends.bytes(8 * KIB))
        target = ends.buffer(ends.there, ends.bytes(8 * KIB))
        prepared = ends.segment.prepare(Opcode.WRITE, source, ends.remote(target))
        for _ in range(50):
            source.array[:] = ends.bytes(8 * KIB)
            prepared.run()
            assert np.array_equal(target.array, source.array)
        prepared.post().wait(10)

    def test_several_threads_write_at_once_and_nothing_is_mixed_up(self, ends: Ends) -> None:
        source = ends.buffer(ends.here, ends.bytes(8 * 64 * KIB))
        target = ends.buffer(ends.there, ends.bytes(8 * 64 * KIB), REGISTERED)
        remote = ends.remote(target)
        errors: list[BaseException] = []

        def write(part: int) -> None:
            start = part * 64 * KIB
            try:
                for block in range(16):
                    a = start + block * 4 * KIB
                    ends.segment.write(source[a : a + 4 * KIB], remote[a : a + 4 * KIB])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=write, args=[part], daemon=True) for part in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not errors
        assert np.array_equal(target.array, source.array)

    def test_batches_under_way_together_all_end_and_can_be_awaited(self, ends: Ends) -> None:
        source = ends.buffer(ends.here, ends.bytes(MIB))
        target = ends.buffer(ends.there, ends.bytes(MIB), REGISTERED)
        remote = ends.remote(target)
        offsets = np.arange(0, MIB, 4 * KIB)

        async def submit() -> None:
            parts = np.array_split(offsets, 16)
            batches = [
                ends.segment.submit(Opcode.WRITE, source, part, remote, part, 4 * KIB)
                for part in parts
            ]
            for batch in batches:
                await asyncio.wait_for(_ended(batch), 30)

        async def _ended(batch: tent.Batch) -> None:
            await batch

        asyncio.run(submit())
        assert np.array_equal(target.array, source.array)

    def test_both_sides_use_each_other_at_once(self, ends: Ends) -> None:
        ours = ends.buffer(ends.here, ends.bytes(MIB))
        theirs = ends.buffer(ends.there, ends.bytes(MIB))
        half = MIB // 2
        with ends.there.open_segment(ends.here.segment_name) as back:
            there = ends.segment.prepare(Opcode.WRITE, ours[:half], ends.remote(theirs)[:half])
            here = back.prepare(Opcode.WRITE, theirs[half:], back.buffer(ours.name)[half:])
            for batch in [there.post(), here.post(), there.post(), here.post()]:
                batch.wait(30)
        assert np.array_equal(ours.array, theirs.array)

    def test_two_initiators_share_one_owner(self, ends: Ends) -> None:
        target = ends.buffer(ends.there, ends.bytes(2 * KIB))
        with self.engine() as other, other.open_segment(ends.there.segment_name) as segment:
            first = ends.buffer(ends.here, ends.bytes(KIB))
            second = ends.buffer(other, ends.bytes(KIB))
            ends.segment.write(first, ends.remote(target)[:KIB])
            segment.write(second, segment.buffer(target.name)[KIB:])
            assert np.array_equal(target.array[:KIB], first.array)
            assert np.array_equal(target.array[KIB:], second.array)

    # Notifications

    def test_notifications_that_it_carries_arrive_once_in_order_and_whole(self, ends: Ends) -> None:
        if not self.capabilities().notifications:
            pytest.skip(f"{self.transport} does not claim to carry notifications")
        source, target = (ends.buffer(e, ends.bytes(KIB)) for e in (ends.here, ends.there))
        ends.segment.write(source, ends.remote(target))

        def carried() -> int:
            counts: dict[str, int] = ends.here.stats()["notifications"]["carried"]
            return counts.get(self.transport, 0)

        def carries() -> bool:  # a channel may take a moment, in which others carry them
            ends.segment.notify("first")
            return carried() > 0

        wait_until(carries, CARRIES_WITHIN_S, f"{self.transport} carries a notification")
        ends.there.poll_notifications()
        before = carried()
        sent = [(str(n), ends.bytes(n).tobytes()) for n in (0, 1, KIB, LARGEST_NOTE - 5)]
        for name, payload in sent:
            ends.segment.notify(name, payload)
        got = [ends.there.next_notification(10) for _ in sent]
        assert [(note.name, note.payload) for note in got] == sent
        assert ends.there.poll_notifications() == []
        assert carried() - before == len(sent)
        with ends.there.open_segment(ends.here.segment_name) as back:
            back.notify("back", b"payload")
            assert ends.here.next_notification(10).payload == b"payload"

    # What is not allowed

    @pytest.mark.parametrize("memory", [ALLOCATED, REGISTERED])
    def test_permissions_of_the_owner_hold(self, ends: Ends, memory: str) -> None:
        content = ends.bytes(4 * KIB)
        local = ends.buffer(ends.here, ends.bytes(4 * KIB))
        readable = ends.buffer(ends.there, content, memory, Permission.GLOBAL_READ_ONLY)
        private = ends.buffer(ends.there, content, memory, Permission.LOCAL_READ_WRITE)
        ends.segment.read(local, ends.remote(readable))
        assert np.array_equal(local.array, content)
        for refused in (readable, private):
            with pytest.raises(tent.PermissionDenied, match=refused.name):
                ends.segment.write(local, ends.remote(refused))
        local.array[:] = 0
        with pytest.raises(tent.PermissionDenied, match=private.name):
            ends.segment.read(local, ends.remote(private))
        assert not local.array.any()
        assert np.array_equal(readable.array, content)
        assert np.array_equal(private.array, content)

    @pytest.mark.parametrize(
        ("offset", "length"),
        [(0, 4097), (4096, 1), (1, 4096), (-1, 8), (2**53 + 1, 1), (2**64 - 8, 16), (0, 0)],
    )
    def test_a_range_outside_its_buffer_is_refused_and_nothing_of_the_batch_moves(
        self, ends: Ends, offset: int, length: int
    ) -> None:
        source = ends.buffer(ends.here, ends.bytes(16 * KIB))
        target = ends.buffer(ends.there, ends.bytes(4 * KIB))
        before = target.array.copy()
        offsets = np.array([0, offset], np.int64 if offset < 0 else np.uint64)
        with pytest.raises(tent.RangeError):
            ends.segment.write_many(source, [0, 0], ends.remote(target), offsets, [16, length])
        assert np.array_equal(target.array, before)

    # Buffers come and go

    @pytest.mark.parametrize("memory", [ALLOCATED, REGISTERED])
    def test_an_unregistered_buffer_is_out_of_reach_at_once(self, ends: Ends, memory: str) -> None:
        source = ends.buffer(ends.here, ends.bytes(4 * KIB))
        target = ends.buffer(ends.there, ends.bytes(4 * KIB), memory)
        array = target.array
        remote = ends.remote(target)
        prepared = ends.segment.prepare(Opcode.WRITE, source, remote)
        prepared.run()
        target.unregister()
        array[:] = 7
        with pytest.raises(WITHDRAWN):
            prepared.run()
        with pytest.raises(WITHDRAWN):
            ends.segment.write(source, remote)
        wait_until(lambda: target.name not in {b.name for b in ends.segment.buffers()})
        with pytest.raises(tent.StaleHandle, match=target.name):
            prepared.run()
        assert set(array.tolist()) == {7}

    @pytest.mark.parametrize("memory", [ALLOCATED, REGISTERED])
    def test_no_byte_changes_once_unregister_has_returned_although_a_peer_goes_on_writing(
        self, ends: Ends, memory: str
    ) -> None:
        source = ends.buffer(ends.here, ends.bytes(64 * KIB))
        offsets = np.arange(0, 64 * KIB, KIB)
        outcomes: list[BaseException] = []

        def hammer(remote: tent.RemoteBuffer, started: threading.Event) -> None:
            try:
                while True:
                    ends.segment.write_many(source, offsets, remote, offsets[::-1], KIB)
                    started.set()
            except BaseException as error:
                outcomes.append(error)
                started.set()

        for round_ in range(20):
            target = ends.buffer(ends.there, np.zeros(64 * KIB, np.uint8), memory)
            array = target.array
            started = threading.Event()
            thread = threading.Thread(
                target=hammer, args=[ends.remote(target), started], daemon=True
            )
            thread.start()
            assert started.wait(10)
            target.unregister()
            array[:] = round_
            thread.join(10)
            assert not thread.is_alive()
            assert set(array.tolist()) == {round_}
        assert len(outcomes) == 20
        assert [error for error in outcomes if not isinstance(error, WITHDRAWN)] == []

    def test_ids_that_are_used_again_do_not_revive_old_handles(self, ends: Ends) -> None:
        source = ends.buffer(ends.here, ends.bytes(KIB))
        old = ends.buffer(ends.there, ends.bytes(KIB))
        remote = ends.remote(old)
        ends.segment.write(source, remote)
        old.unregister()
        new = ends.buffer(ends.there, ends.bytes(KIB))
        before = new.array.copy()
        assert ends.remote(new).id == remote.id
        with pytest.raises(WITHDRAWN):
            ends.segment.write(source, remote)
        assert np.array_equal(new.array, before)
        ends.segment.write(source, ends.remote(new))
        assert np.array_equal(new.array, source.array)

    # Peers come and go

    def test_transfers_to_an_engine_that_closed_fail_with_a_cause(self, ends: Ends) -> None:
        with self.engine() as short_lived:
            target = ends.buffer(short_lived, ends.bytes(KIB))
            source = ends.buffer(ends.here, ends.bytes(KIB))
            segment = ends.here.open_segment(short_lived.segment_name)
            remote = segment.buffer(target.name)
            segment.write(source, remote)
        with pytest.raises((tent.TransferFailed, tent.TransportError, tent.UsageError)):
            segment.write(source, remote, timeout=5.0)
        ends.segment.write(source, ends.remote(ends.buffer(ends.there, ends.bytes(KIB))))

    def test_closing_leaves_no_descriptor_thread_process_or_mapping(self) -> None:
        def life() -> None:
            with (
                self.engine() as here,
                self.engine() as there,
                here.open_segment(there.segment_name) as segment,
            ):
                ends = Ends(here, there, segment, np.random.default_rng(1))
                for memory in (ALLOCATED, REGISTERED):
                    source = ends.buffer(here, ends.bytes(MIB), memory)
                    target = ends.buffer(there, ends.bytes(MIB), memory)
                    segment.write(source, ends.remote(target))
                    segment.read(source, ends.remote(target))

        life()
        with nothing_stays_behind():
            life()

    @pytest.mark.slow
    @pytest.mark.timeout(240)
    def test_peers_that_come_and_go_leave_nothing_of_themselves(self) -> None:
        with self.engine(peers={"grace_s": 3.0}) as lasting:
            churn = Churn(lasting, self.transport)

            def come_and_go(peers: int) -> None:
                if self.capabilities().reach is Reach.PROCESS:
                    churn.engines(peers, self.engine)
                else:
                    churn.processes(peers, self.config())

            come_and_go(WARM_UP)
            with churn.leaves_nothing(CHURN_SETTLES_S):
                come_and_go(PEERS)

    # Other processes

    def test_bytes_reach_another_process_and_come_back(self, elsewhere: PeerProcess) -> None:
        random = np.random.default_rng(3)
        with self.engine() as here, here.open_segment(elsewhere.segment_name) as segment:
            source, back = here.allocate(MIB), here.register(np.zeros(MIB, np.uint8))
            source.array[:] = random.integers(0, 256, MIB, np.uint8)
            segment.write(source, segment.buffer("pool"))
            assert elsewhere.run("bytes(pool.array)") == source.array.tobytes()
            segment.read(back, segment.buffer("pool"))
            assert np.array_equal(back.array, source.array)

    def test_a_notification_is_seen_after_the_data_that_was_written_before_it(
        self, elsewhere: PeerProcess
    ) -> None:
        with self.engine() as here, here.open_segment(elsewhere.segment_name) as segment:
            source = here.allocate(MIB)
            source.array[:] = 5
            segment.write(source, segment.buffer("pool"))
            segment.notify("written", b"5")
            look = "(lambda n: (n.name, n.payload, set(pool.array.tolist())))(engine.next_notification(10))"
            assert elsewhere.run(look) == ("written", b"5", {5})

    @pytest.mark.parametrize("memory", [ALLOCATED, REGISTERED])
    def test_no_byte_changes_after_unregister_although_another_process_goes_on_writing(
        self, elsewhere: PeerProcess, memory: str
    ) -> None:
        elsewhere.run(HAMMER)
        with self.engine() as here:
            for round_ in range(10):
                target, array = _target_of_hammer(here, elsewhere, memory)
                target.unregister()
                array[:] = round_
                _stays(array, round_)
                elsewhere.run("hammering.join(10)")
                ((kind, text),) = elsewhere.run("outcome")
                assert kind in ("StaleHandle", "BufferRevoked", "TransferFailed"), text

    @pytest.mark.parametrize("memory", [ALLOCATED, REGISTERED])
    @pytest.mark.parametrize("end", ["resume", "kill"])
    def test_a_stopped_process_holds_up_unregister_until_it_can_write_no_more(
        self, elsewhere: PeerProcess, memory: str, end: str
    ) -> None:
        elsewhere.run(HAMMER)
        with self.engine() as here:
            target, array = _target_of_hammer(here, elsewhere, memory)
            elsewhere.stop()
            if self.capabilities().owner_checked:
                target.unregister(timeout=10.0)
                array[:] = 1
            else:
                with pytest.raises(tent.RevocationTimeout) as raised:
                    target.unregister(timeout=0.5)
                assert elsewhere.segment_name in "".join(raised.value.holders)
            getattr(elsewhere, end)()
            if not self.capabilities().owner_checked:
                target.unregister(timeout=10.0)
                array[:] = 1
            _stays(array, 1)

    def test_a_peer_killed_in_the_middle_fails_the_transfer_with_a_cause(
        self, elsewhere: PeerProcess
    ) -> None:
        with self.engine() as here, here.open_segment(elsewhere.segment_name) as segment:
            source = here.allocate(MIB)
            prepared = segment.prepare(Opcode.WRITE, source, segment.buffer("pool"))
            prepared.run()
            failure: list[BaseException] = []

            def write_until_it_fails() -> None:
                try:
                    while True:
                        prepared.run(timeout=20.0)
                except BaseException as error:
                    failure.append(error)

            writer = threading.Thread(target=write_until_it_fails, daemon=True)
            writer.start()
            wait_until(lambda: here.stats()["transports"][self.transport]["bytes"] > 4 * MIB)
            elsewhere.kill()
            writer.join(10)
            assert not writer.is_alive()
            assert isinstance(failure[0], tent.TentError)
            assert elsewhere.segment_name in str(failure[0])


def _target_of_hammer(
    engine: tent.Engine, elsewhere: PeerProcess, memory: str
) -> tuple[tent.Buffer, NDArray[np.uint8]]:
    """A buffer that the other process is writing to, and its memory."""
    array = np.zeros(256 * KIB, np.uint8)
    target = engine.register(array) if memory == REGISTERED else engine.allocate(len(array))
    array = target.array
    elsewhere.run("hammer(segment_name, name)", segment_name=engine.segment_name, name=target.name)
    assert wait_until(lambda: elsewhere.run("outcome or rounds > 2")) is True
    return target, array


def _stays(array: NDArray[np.uint8], value: int, seconds: float = 0.05) -> None:
    """Every byte is `value`, and stays so for a while."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert np.all(array == value)
