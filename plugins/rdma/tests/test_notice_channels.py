"""Notification channels between two transports: made for the first message, used by both, then gone."""

from __future__ import annotations

from rig import KIB, Rig, connected, fabric

from tent_core.types import Opcode
from tent_rdma import plugin

WAIT_S = 10.0


def exchange(rig: Rig, message: bytes) -> bytes:
    """From a to b, over verbs."""
    answer = rig.a.transport.exchange(rig.b.segment.snapshot.key, message)
    assert answer is not None
    return answer.result(WAIT_S)


def registrations(rig: Rig) -> int:
    return rig.verbs.counts.live["registration"]


def test_the_first_message_makes_a_channel_and_both_sides_send_by_it() -> None:
    with connected() as rig:
        rig.b.answer = lambda peer, message: b"taken " + message
        rig.a.answer = lambda peer, message: b"back " + message
        assert exchange(rig, b"one") == b"taken one"
        made = rig.verbs.counts.made["queue_pair"]
        assert exchange(rig, b"two") == b"taken two"
        back = rig.b.transport.exchange(rig.a.segment.snapshot.key, b"three")
        assert back is not None
        assert back.result(WAIT_S) == b"back three"
        assert rig.verbs.counts.made["queue_pair"] == made == 2


def test_who_never_notifies_pins_nothing_for_it_and_who_does_two_registrations_a_side() -> None:
    with connected() as rig:
        local, _ = rig.buffer(rig.a, 64 * KIB)
        remote, _ = rig.buffer(rig.b, 64 * KIB)
        rig.submit(Opcode.WRITE, (local, 0, remote, 0, 64 * KIB)).wait()
        nics = len(rig.verbs.nics)
        assert registrations(rig) == 2 * nics
        exchange(rig, b"one")
        assert registrations(rig) == 2 * nics + 2 * 2


def test_a_channel_goes_with_its_endpoint_and_with_its_peer() -> None:
    with connected() as rig:
        before = rig.verbs.counts.live
        exchange(rig, b"one")
        rig.endpoint.close("retired")
        rig.b.transport.release(rig.a.segment.snapshot.key, "retired")
        assert rig.a.transport.exchange(rig.b.segment.snapshot.key, b"two") is None
        assert rig.b.transport.exchange(rig.a.segment.snapshot.key, b"two") is None
        assert registrations(rig) == 0
        assert rig.verbs.counts.live["queue_pair"] == before["queue_pair"]


def test_settings_may_leave_notifications_to_the_control_plane() -> None:
    with connected(notifications=False) as rig:
        declared = plugin.tent_transport().capabilities
        assert declared.notifications
        assert not rig.a.transport.capabilities(declared).notifications
        assert rig.a.transport.exchange(rig.b.segment.snapshot.key, b"one") is None
        assert registrations(rig) == 0


def test_a_lack_of_memory_leaves_the_message_to_the_control_plane_and_nothing_behind() -> None:
    verbs = fabric()
    with connected(verbs) as rig:
        verbs.faults.max_registrations = 1
        answer = rig.a.transport.exchange(rig.b.segment.snapshot.key, b"one")
        assert answer is not None
        assert answer.exception(WAIT_S) is not None
        assert registrations(rig) == 0
        assert verbs.counts.live["queue_pair"] == 0
        verbs.faults.max_registrations = None
