"""What is not allowed is refused, before a byte has moved."""

from __future__ import annotations

import numpy as np
import pytest

import tent_core as tent
from tent_core.testing.conformance.base import BOTH_KINDS, KIB, Base, Ends
from tent_core.testing.conformance.verdicts import assert_untouched, must_fail
from tent_core.types import Permission


class Permissions(Base):
    """Permissions and ranges, at the initiator and at the owner."""

    @BOTH_KINDS
    def test_permissions_of_the_owner_hold(self, ends: Ends, memory: str) -> None:
        content = ends.bytes(4 * KIB)
        local = ends.buffer(ends.here, ends.bytes(4 * KIB))
        readable = ends.offer(ends.there, content, memory, Permission.GLOBAL_READ_ONLY)
        private = ends.offer(ends.there, content, memory, Permission.LOCAL_READ_WRITE)
        ends.segment.read(local, ends.remote(readable))
        assert np.array_equal(local.array, content)
        for refused in (readable, private):
            with must_fail(
                tent.PermissionDenied, "a WRITE that the owner does not permit", match=refused.name
            ):
                ends.segment.write(local, ends.remote(refused))
        local.array[:] = 0
        with must_fail(
            tent.PermissionDenied, "a READ that the owner does not permit", match=private.name
        ):
            ends.segment.read(local, ends.remote(private))
        assert not local.array.any()
        assert_untouched(readable.array, content, "a buffer that peers may only read")
        assert_untouched(private.array, content, "a buffer that peers may not use")

    @pytest.mark.parametrize(
        ("offset", "length"),
        [(0, 4097), (4096, 1), (1, 4096), (-1, 8), (2**53 + 1, 1), (2**64 - 8, 16), (0, 0)],
    )
    def test_a_range_outside_its_buffer_is_refused_and_nothing_of_the_batch_moves(
        self, ends: Ends, offset: int, length: int
    ) -> None:
        source = ends.buffer(ends.here, ends.bytes(16 * KIB))
        target = ends.offer(ends.there, ends.bytes(4 * KIB))
        before = target.array.copy()
        offsets = np.array([0, offset], np.int64 if offset < 0 else np.uint64)
        with pytest.raises(tent.RangeError):
            ends.segment.write_many(source, [0, 0], ends.remote(target), offsets, [16, length])
        assert_untouched(target.array, before, "a batch that was refused")
