"""Bytes of one request: any size, any alignment, in either direction."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from tent_core.testing.conformance.base import BOTH_KINDS, KIB, MIB, Base, Ends
from tent_core.testing.conformance.verdicts import assert_arrived, assert_untouched
from tent_core.types import Opcode

SIZES = (1, 3, 64, 4095, 4096, 4097, 64 * KIB, 256 * KIB + 1, 3 * MIB + 5)
"""Around what implementations treat apart: a word, a page, a spun or kept GIL, a copy that is split."""


class Content(Base):
    """One request at a time."""

    largest: ClassVar[int] = 256 * MIB
    """Bytes of the largest request that is tried. Lower it where a machine cannot register that much."""

    @BOTH_KINDS
    def test_a_write_of_any_size_arrives_and_touches_nothing_else(
        self, ends: Ends, memory: str
    ) -> None:
        space = ends.bytes(max(SIZES) + 2 * KIB)
        target = ends.offer(ends.there, space, memory)
        remote = ends.remote(target)
        for size in SIZES:
            content = ends.bytes(size)
            source = ends.buffer(ends.here, content, memory)
            target.array[:] = space
            ends.segment.write(source, remote[KIB : KIB + size])
            expected = space.copy()
            expected[KIB : KIB + size] = content
            assert_arrived(target.array, space, expected, f"a WRITE of {size} bytes")
            assert_untouched(source.array, content, f"the source of a WRITE of {size} bytes")

    @BOTH_KINDS
    def test_a_read_of_any_size_arrives_and_touches_nothing_else(
        self, ends: Ends, memory: str
    ) -> None:
        space = ends.bytes(max(SIZES) + 2 * KIB)
        target = ends.buffer(ends.here, space, memory)
        for size in SIZES:
            content = ends.bytes(size)
            source = ends.offer(ends.there, content, memory)
            target.array[:] = space
            ends.segment.read(target[KIB : KIB + size], ends.remote(source))
            expected = space.copy()
            expected[KIB : KIB + size] = content
            assert_arrived(target.array, space, expected, f"a READ of {size} bytes")
            assert_untouched(source.array, content, f"the source of a READ of {size} bytes")

    @pytest.mark.slow
    def test_large_requests_arrive_whole_in_both_directions(self, ends: Ends) -> None:
        pattern = ends.bytes(MIB + 1)
        for size in (16 * MIB, self.largest):
            local = ends.here.allocate(size)
            there = ends.offer(ends.there, np.zeros(size + 2 * KIB, np.uint8))
            local.array[:] = np.resize(pattern, size)
            remote = ends.remote(there)
            ends.segment.write(local, remote[KIB : KIB + size])
            assert np.array_equal(there.array[KIB : KIB + size], local.array), f"{size} bytes"
            assert not there.array[:KIB].any(), f"{size} bytes"
            assert not there.array[KIB + size :].any(), f"{size} bytes"
            local.array[:] = 0
            ends.segment.read(local, remote[KIB : KIB + size])
            assert np.array_equal(there.array[KIB : KIB + size], local.array), f"{size} bytes"
            local.unregister()
            there.unregister()

    @pytest.mark.parametrize("opcode", [Opcode.WRITE, Opcode.READ], ids=["write", "read"])
    def test_no_alignment_of_either_side_matters(self, ends: Ends, opcode: Opcode) -> None:
        local = ends.buffer(ends.here, ends.bytes(64 * KIB))
        there = ends.offer(ends.there, ends.bytes(64 * KIB))
        remote = ends.remote(there)
        to, source = (there, local) if opcode is Opcode.WRITE else (local, there)
        for shift in (0, 1, 2, 3, 5, 7, 63, 4095):
            for other, length in ((0, 8), (1, 4097), (7, 61), (4095, 8193)):
                before = to.array.copy()
                expected = before.copy()
                at, origin = (other, shift) if opcode is Opcode.WRITE else (shift, other)
                expected[at : at + length] = source.array[origin : origin + length]
                ends.segment.prepare(
                    opcode, local[shift : shift + length], remote[other : other + length]
                ).run()
                what = f"{length} bytes from offset {origin} to offset {at}"
                assert_arrived(to.array, before, expected, what)
