"""Buffers come and go while peers use them."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import tent_core as tent
from tent_core.testing.conformance.base import BOTH_KINDS, KIB, WITHDRAWN, Base, Ends
from tent_core.testing.conformance.verdicts import assert_arrived, assert_untouched, must_fail
from tent_core.testing.waiting import wait_until
from tent_core.types import Opcode

SWALLOWED = (
    "an error was swallowed: a request for a buffer that its owner took away was reported as done"
)
AFTER = "after `unregister` had returned"
KINDS = ("allocated", "registered")


class Buffers(Base):
    """Registration, refresh, removal, and ids that are used again."""

    @BOTH_KINDS
    def test_an_unregistered_buffer_is_out_of_reach_at_once(self, ends: Ends, memory: str) -> None:
        source = ends.buffer(ends.here, ends.bytes(4 * KIB))
        target = ends.offer(ends.there, ends.bytes(4 * KIB), memory)
        array = target.array
        remote = ends.remote(target)
        prepared = ends.segment.prepare(Opcode.WRITE, source, remote)
        for _ in range(3):  # from the second time on it may be bound
            prepared.run()
        target.unregister()
        array[:] = 7
        with must_fail(WITHDRAWN, SWALLOWED):
            prepared.run()
        with must_fail(WITHDRAWN, SWALLOWED):
            ends.segment.write(source, remote)
        wait_until(lambda: target.name not in {b.name for b in ends.segment.buffers()})
        with pytest.raises(tent.StaleHandle, match=target.name):
            prepared.run()
        assert_untouched(array, np.full_like(array, 7), AFTER)

    @BOTH_KINDS
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
            target = ends.offer(ends.there, np.zeros(64 * KIB, np.uint8), memory)
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
            assert_untouched(array, np.full_like(array, round_), AFTER)
        assert len(outcomes) == 20
        assert [error for error in outcomes if not isinstance(error, WITHDRAWN)] == []

    def test_ids_that_are_used_again_do_not_revive_old_handles(self, ends: Ends) -> None:
        source = ends.buffer(ends.here, ends.bytes(KIB))
        old = ends.offer(ends.there, ends.bytes(KIB))
        remote = ends.remote(old)
        ends.segment.write(source, remote)
        old.unregister()
        new = ends.offer(ends.there, ends.bytes(KIB))
        before = new.array.copy()
        assert ends.remote(new).id == remote.id
        with must_fail(WITHDRAWN, SWALLOWED):
            ends.segment.write(source, remote)
        assert_untouched(new.array, before, "an old handle reached the buffer that has its id now")
        ends.segment.write(source, ends.remote(new))
        assert np.array_equal(new.array, source.array)

    def test_transfers_go_on_while_the_owner_registers_and_unregisters_others(
        self, ends: Ends
    ) -> None:
        source = ends.buffer(ends.here, ends.bytes(4 * KIB))
        lasting = ends.offer(ends.there, ends.bytes(4 * KIB))
        prepared = ends.segment.prepare(Opcode.WRITE, source, ends.remote(lasting))
        for _ in range(20):
            others = [ends.offer(ends.there, ends.bytes(KIB), kind) for kind in KINDS]
            batch = prepared.post()
            ends.segment.write(source[:KIB], ends.remote(others[0]))
            assert np.array_equal(others[0].array, source.array[:KIB])
            batch.wait(10)
            for other in others:
                other.unregister()
            before = lasting.array.copy()
            source.array[:] = ends.bytes(4 * KIB)
            prepared.run()
            assert_arrived(lasting.array, before, source.array, "a WRITE after a refresh")

    def test_a_segment_that_is_closed_and_opened_again_works_as_before(self, ends: Ends) -> None:
        source = ends.buffer(ends.here, ends.bytes(KIB))
        target = ends.offer(ends.there, ends.bytes(KIB))
        with self.engine() as other:
            ours = ends.buffer(other, source.array)
            for _ in range(3):
                with other.open_segment(ends.there.segment_name) as segment:
                    target.array[:] = 0
                    segment.write(ours, segment.buffer(target.name))
                    assert np.array_equal(target.array, source.array)
                with pytest.raises(tent.UsageError):
                    segment.buffer(target.name)
