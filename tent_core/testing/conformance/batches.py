"""Many requests: in one batch, from many threads, in both directions at once."""

from __future__ import annotations

import asyncio
import hashlib
import threading

import numpy as np
import pytest

import tent_core as tent
from tent_core.testing.conformance.base import (
    ALLOCATED,
    BOTH_KINDS,
    KIB,
    MIB,
    REGISTERED,
    Base,
    Ends,
    apply,
)
from tent_core.testing.conformance.verdicts import assert_arrived
from tent_core.types import MemoryKind, Opcode, Status

MANY = 2500
"""Blocks of a batch; more than two vectored system calls take (IOV_MAX is 1024)."""

LEFT = "b5cc40f8566b7e712925e86c9c4277fc50269515fd3b3914360703b93b2e76fb"
"""SHA-256 of the memory of both sides after the random batches of a fixed seed."""


class Batches(Base):
    """Many requests at once."""

    @BOTH_KINDS
    @pytest.mark.parametrize("longest", [61, 4 * KIB])
    def test_many_blocks_at_random_places_go_both_ways_in_one_call(
        self, ends: Ends, memory: str, longest: int
    ) -> None:
        size = MANY * longest
        local = ends.buffer(ends.here, ends.bytes(size), memory)
        target = ends.offer(ends.there, ends.bytes(2 * size), memory)
        remote = ends.remote(target)
        here, there, lengths = ends.rows(MANY, size, 2 * size, longest)

        before = target.array.copy()
        expected = apply(before, there, local.array, here, lengths)
        batch = ends.segment.write_many(local, here, remote, there, lengths)
        assert_arrived(target.array, before, expected, f"a batch of {MANY} WRITEs")
        assert batch.moved.tolist() == lengths.tolist()
        assert set(batch.status.tolist()) == {Status.COMPLETED}
        assert batch.transports() == {self.transport: int(lengths.sum())}

        before = local.array.copy()
        expected = apply(before, here, target.array, there[::-1], lengths)
        ends.segment.read_many(local, here, remote, there[::-1], lengths)
        assert_arrived(local.array, before, expected, f"a batch of {MANY} READs")

    def test_one_batch_spans_many_buffers_of_either_side(self, ends: Ends) -> None:
        kinds = [ALLOCATED, REGISTERED] * 3
        local = [ends.buffer(ends.here, ends.bytes(KIB), kind) for kind in kinds]
        targets = [ends.offer(ends.there, ends.bytes(KIB), kind) for kind in reversed(kinds)]
        remote = [ends.remote(target) for target in targets]
        before = {target.name: target.array.copy() for target in targets}
        order = ends.random.permutation(6)
        ends.segment.write_many(
            local, [0] * 6, remote, [0] * 6, KIB, local_index=order, remote_index=range(6)
        )
        for index, target in zip(order, targets, strict=True):
            what = "a batch over many buffers"
            assert_arrived(target.array, before[target.name], local[index].array, what)

    def test_a_prepared_transfer_moves_the_bytes_of_the_moment_each_time(self, ends: Ends) -> None:
        source = ends.buffer(ends.here, ends.bytes(8 * KIB))
        target = ends.offer(ends.there, ends.bytes(8 * KIB))
        prepared = ends.segment.prepare(Opcode.WRITE, source, ends.remote(target))
        for _ in range(50):
            source.array[:] = ends.bytes(8 * KIB)
            prepared.run()
            assert np.array_equal(target.array, source.array)
        prepared.post().wait(10)

    def test_several_threads_write_at_once_and_nothing_is_mixed_up(self, ends: Ends) -> None:
        source = ends.buffer(ends.here, ends.bytes(8 * 64 * KIB))
        target = ends.offer(ends.there, ends.bytes(8 * 64 * KIB), REGISTERED)
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
        target = ends.offer(ends.there, ends.bytes(MIB), REGISTERED)
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

        before = target.array.copy()
        asyncio.run(submit())
        what = "batches that were under way together"
        assert_arrived(target.array, before, source.array, what)

    def test_both_sides_use_each_other_at_once(self, ends: Ends) -> None:
        if self.remote_kind is not MemoryKind.DRAM:
            pytest.skip(f"one side has {self.remote_kind} memory, from which nothing is submitted")
        ours = ends.buffer(ends.here, ends.bytes(MIB))
        theirs = ends.offer(ends.there, ends.bytes(MIB))
        half = MIB // 2
        with ends.there.open_segment(ends.here.segment_name) as back:
            there = ends.segment.prepare(Opcode.WRITE, ours[:half], ends.remote(theirs)[:half])
            here = back.prepare(Opcode.WRITE, theirs[half:], back.buffer(ours.name)[half:])
            for batch in [there.post(), here.post(), there.post(), here.post()]:
                batch.wait(30)
        assert np.array_equal(ours.array, theirs.array)

    def test_two_initiators_share_one_owner(self, ends: Ends) -> None:
        target = ends.offer(ends.there, ends.bytes(2 * KIB))
        with self.engine() as other, other.open_segment(ends.there.segment_name) as segment:
            first = ends.buffer(ends.here, ends.bytes(KIB))
            second = ends.buffer(other, ends.bytes(KIB))
            ends.segment.write(first, ends.remote(target)[:KIB])
            segment.write(second, segment.buffer(target.name)[KIB:])
            assert np.array_equal(target.array[:KIB], first.array)
            assert np.array_equal(target.array[KIB:], second.array)

    def test_a_random_batch_leaves_the_memory_that_it_leaves_over_every_transport(
        self, ends: Ends
    ) -> None:
        random = np.random.Generator(np.random.PCG64(8))
        content = random.integers(0, 256, (2, 512 * KIB), np.uint8)
        ours, theirs = ends.buffer(ends.here, content[0]), ends.offer(ends.there, content[1])
        remote = ends.remote(theirs)
        for opcode in (Opcode.WRITE, Opcode.READ, Opcode.WRITE):
            at, origin = (random.permutation(512)[:400] * KIB for _ in range(2))
            lengths = random.integers(1, KIB + 1, 400)
            ends.segment.submit(opcode, ours, at, remote, origin, lengths).wait(30)
        left = hashlib.sha256(ours.array.tobytes() + theirs.array.tobytes()).hexdigest()
        assert left == LEFT, (
            "the batch has left other memory than it leaves over every other transport"
        )
