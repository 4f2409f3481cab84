"""Notifications: carried by the transport if it claims so, by the control plane if not."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from tent_core.control.contract import NOTIFICATION_LIMIT as LARGEST_NOTE
from tent_core.testing.conformance.base import KIB, Base, Ends, Refuses
from tent_core.testing.waiting import wait_until


class Notifications(Base):
    """Notifications that it carries, or does not."""

    carries_within_s: ClassVar[float] = 10.0
    """How long it may take until it carries notifications."""

    def test_notifications_that_it_carries_arrive_once_in_order_and_whole(self, ends: Ends) -> None:
        if not self.capabilities().notifications:
            pytest.skip(f"{self.transport} does not claim to carry notifications")
        source, target = (ends.buffer(e, ends.bytes(KIB)) for e in (ends.here, ends.there))
        ends.segment.write(source, ends.remote(target))

        def carried() -> int:
            counts: dict[str, int] = ends.here.stats()["notifications"]["carried"]
            return counts.get(self.transport, 0)

        sent = [(str(n), ends.bytes(n).tobytes()) for n in (0, 1, KIB, LARGEST_NOTE - 5)]

        def carries() -> bool:  # a channel may take a moment, in which they go another way
            before = carried()
            for name, payload in sent:
                ends.segment.notify(name, payload)
            got = [ends.there.next_notification(10) for _ in sent]
            assert [(note.name, note.payload) for note in got] == sent
            assert ends.there.poll_notifications() == []
            return carried() >= before + len(sent)

        wait_until(carries, self.carries_within_s, f"{self.transport} carries all notifications")
        with ends.there.open_segment(ends.here.segment_name) as back:
            back.notify("back", b"payload")
            assert ends.here.next_notification(10).payload == b"payload"

    def test_batches_in_either_direction_notify_once_each_when_their_data_has_arrived(
        self, ends: Ends
    ) -> None:
        source, target = (ends.buffer(e, ends.bytes(64 * KIB)) for e in (ends.here, ends.there))
        remote = ends.remote(target)
        ends.there.poll_notifications()
        offsets = np.arange(0, 64 * KIB, 4 * KIB)
        for opcode in ("write", "read", "write"):
            source.array[:] = ends.bytes(64 * KIB)
            batch = ends.segment.submit(
                opcode, source, offsets, remote, offsets, 2 * KIB, notify=(opcode, b"all")
            )
            note = ends.there.next_notification(10)
            assert (note.name, note.payload, note.error) == (opcode, b"all", None)
            batch.wait(10)
            for offset in offsets:
                here, there = (b.array[offset : offset + 2 * KIB] for b in (source, target))
                assert np.array_equal(here, there)
        assert ends.there.poll_notifications() == []

    def test_notifications_that_it_does_not_claim_go_another_way(
        self, ends: Ends, refuses: Refuses
    ) -> None:
        if self.capabilities().notifications:
            pytest.skip(f"{self.transport} claims to carry notifications")
        source, target = (ends.buffer(e, ends.bytes(KIB)) for e in (ends.here, ends.there))
        ends.segment.write(source, ends.remote(target))
        ends.segment.notify("another way", b"payload")
        assert ends.there.next_notification(10).payload == b"payload"
        carried = ends.here.stats()["notifications"]["carried"].get(self.transport, 0)
        assert not carried, f"{self.transport} carries notifications and does not claim it"
        refuses("notifications: the control plane carries them")
