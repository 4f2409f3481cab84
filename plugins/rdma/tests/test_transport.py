"""The transport as its engine calls it: started, half started, asked by strangers, stopped in the midst."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import KIB, completed, connected, ended, fabric, link, live, side, transport

from tent_core.errors import TransportError, TransportUnavailable
from tent_core.testing.harness import Submitted
from tent_core.testing.waiting import wait_until
from tent_core.types import Opcode
from tent_mock.verbs import Operation
from tent_rdma.wire import Close, Malformed, NicAddress, Open, Ready, asked, decode

READ, WRITE = Opcode.READ, Opcode.WRITE

# -------------------------------------------------------------------- start


@pytest.mark.parametrize("operation", ["open", "port", "channel", "completion_queue"])
@pytest.mark.parametrize("step", [0, 1])
def test_a_start_that_fails_says_why_and_leaves_nothing(operation: Operation, step: int) -> None:
    verbs = fabric()
    verbs.faults.fail_next(operation, errno.ENOMEM, after=step)
    made = side(verbs)
    with pytest.raises(TransportUnavailable, match=f"fake{step}.*Cannot allocate memory"):
        made.start()
    made.transport.stop()
    made.transport.stop()
    assert not live(verbs)
    assert made.transport.holdings() == {}


def test_stopping_what_never_started_is_nothing() -> None:
    side(fabric()).transport.stop()


def test_a_port_that_is_down_at_the_start_is_used_when_it_comes_up() -> None:
    verbs = fabric()
    fake0, fake1 = verbs.nics.values()
    fake0.set_port(False)
    with connected(verbs) as rig:
        here, ours = rig.buffer(rig.a, 64 * KIB)
        there, theirs = rig.buffer(rig.b, 64 * KIB)
        completed(rig.submit(WRITE, (here, 0, there, 0, 64 * KIB)))
        assert (ours == theirs).all()
        assert fake0.counts.posted == 0
        fake0.set_port(True)
        wait_until(lambda: all(transport(s)._nics[0].usable for s in (rig.a, rig.b)))
        fake1.set_port(False)
        wait_until(lambda: not transport(rig.a)._nics[1].usable)
        completed(rig.submit(READ, (here, 0, there, 0, 64 * KIB)))
        assert fake0.counts.posted > 0


def test_the_segment_says_which_nics_there_are_and_nothing_after_the_stop() -> None:
    verbs = fabric(nics=3)
    with side(verbs) as made:
        said = json.loads(made.segment.snapshot.attributes["rdma"].payload)
        assert [nic["name"] for nic in said["nics"]] == ["fake0", "fake1", "fake2"]
    assert "rdma" not in made.segment.snapshot.attributes


# -------------------------------------------------------------------- bootstrap messages from outside

ADDRESS = NicAddress(
    name="there",
    gid="0000:0000:0000:0000:0000:ffff:0a00:0001",
    link_layer="Ethernet",
    mtu=1024,
    reads=16,
)
OPEN = Open(connection=7, nic=0, sender=ADDRESS, queue_pairs=[Ready(number=1, psn=2)] * 2)


def alone(check: Callable[[Any, Any], None]) -> None:
    """Call with a started side and its fabric; afterwards nothing may be left but what a start makes."""
    verbs = fabric()
    with side(verbs) as made:
        before = live(verbs)
        check(made, verbs)
        made.transport.release(made.segment.snapshot.key, "it is done")
        assert live(verbs) == before
        assert made.transport.holdings()["connections"] == 0
    assert not live(verbs)


@settings(max_examples=60)
@given(st.lists(st.one_of(st.binary(max_size=200), st.text().map(str.encode)), max_size=5))
def test_bytes_that_are_no_message_are_refused(payloads: list[bytes]) -> None:
    def check(made: Any, verbs: Any) -> None:
        before = live(verbs)
        for payload in payloads:
            with pytest.raises(TransportError):
                made.transport.bootstrap(made.segment.snapshot.key, payload)
        assert live(verbs) == before

    alone(check)


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(["open", "close", "InfiniBand", "", "::1", "\ud800", "0000:" * 8]),
)


@settings(max_examples=150)
@given(st.data())
def test_messages_with_anything_in_any_field_are_carried_out_or_refused(
    data: st.DataObject,
) -> None:
    message = json.loads(OPEN.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = message
        path = data.draw(st.sampled_from(["", "sender", "queue_pairs"]))
        if path and isinstance(place.get(path), (dict, list)):
            place = place[path]
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            continue
        key = data.draw(st.sampled_from(keys))
        if data.draw(st.booleans()):
            place[key] = data.draw(values)
        else:
            del place[key]
    payload = json.dumps(message).encode()

    def check(made: Any, verbs: Any) -> None:
        try:
            made.transport.bootstrap(made.segment.snapshot.key, payload)
        except TransportError:
            assert verbs.counts.alive("queue_pair") == 0

    alone(check)


@settings(max_examples=100)
@given(st.integers(0, 400), st.integers(0, 255), st.booleans())
def test_a_message_with_one_byte_changed_or_cut_short_harms_nothing(
    place: int, byte: int, cut: bool
) -> None:
    payload = bytearray(OPEN.encode())
    place %= len(payload)
    if cut:
        del payload[place:]
    else:
        payload[place] = byte

    def check(made: Any, verbs: Any) -> None:
        try:
            made.transport.bootstrap(made.segment.snapshot.key, bytes(payload))
        except TransportError:
            assert verbs.counts.alive("queue_pair") == 0

    alone(check)


def test_what_is_asked_of_a_nic_that_is_not_there_or_of_another_kind_is_refused() -> None:
    def check(made: Any, verbs: Any) -> None:
        key = made.segment.snapshot.key
        with pytest.raises(Malformed, match="NIC 5: there are 2 here"):
            made.transport.bootstrap(key, OPEN.model_copy(update={"nic": 5}).encode())
        other = ADDRESS.model_copy(update={"link_layer": "InfiniBand"})
        with pytest.raises(TransportError, match=r"Ethernet.*InfiniBand"):
            made.transport.bootstrap(key, OPEN.model_copy(update={"sender": other}).encode())

    alone(check)


def test_a_connection_is_opened_once_and_closed_as_often_as_anybody_likes() -> None:
    def check(made: Any, verbs: Any) -> None:
        key = made.segment.snapshot.key
        made.transport.bootstrap(key, OPEN.encode())
        with pytest.raises(Malformed, match="open already"):
            made.transport.bootstrap(key, OPEN.encode())
        assert verbs.counts.alive("queue_pair") == 2
        for _ in range(2):
            made.transport.bootstrap(key, Close(connections=[7, 8]).encode())
            assert verbs.counts.alive("queue_pair") == 0
        made.transport.bootstrap(key, OPEN.encode())

    alone(check)


def test_a_peer_cannot_close_what_another_has_opened() -> None:
    verbs = fabric()
    with side(verbs) as made, side(verbs) as stranger:
        made.transport.bootstrap(made.segment.snapshot.key, OPEN.encode())
        made.transport.bootstrap(stranger.segment.snapshot.key, Close(connections=[7]).encode())
        made.transport.release(stranger.segment.snapshot.key, "it departed")
        assert verbs.counts.alive("queue_pair") == 2


@pytest.mark.parametrize("message", [OPEN, Close(connections=[1, 2])])
def test_what_is_encoded_is_decoded(message: Open | Close) -> None:
    assert asked(message.encode()) == message


def test_a_field_that_a_newer_peer_has_added_is_ignored() -> None:
    message = {**json.loads(OPEN.encode()), "colour": "red"}
    assert asked(json.dumps(message).encode()) == OPEN
    assert decode(Ready, b'{"number": 1, "psn": 2, "more": []}') == Ready(number=1, psn=2)


# -------------------------------------------------------------------- release and stop


def test_an_end_that_cannot_be_destroyed_is_destroyed_at_the_next_release_or_stop() -> None:
    verbs = fabric()
    with side(verbs) as made:
        key = made.segment.snapshot.key
        made.transport.bootstrap(key, OPEN.encode())
        verbs.faults.fail_next("close_queue_pair", errno.EBUSY, times=2)
        for _ in range(2):
            with pytest.raises(TransportError, match="close queue pair"):
                made.transport.release(key, "it departed")
        assert made.transport.holdings()["passive_connections"] == 1
        made.transport.release(key, "it departed")
        assert made.transport.holdings()["passive_connections"] == 0
        assert made.transport.holdings()["connections"] == 0
        made.transport.bootstrap(key, OPEN.encode())
        verbs.faults.fail_next("close_queue_pair", errno.EBUSY)
        with pytest.raises(TransportError):
            made.transport.release(key, "it departed")
    assert not live(verbs)


def test_a_release_that_a_verb_holds_up_says_so_and_goes_on() -> None:
    verbs = fabric()
    with side(verbs) as made:
        key = made.segment.snapshot.key
        made.transport.bootstrap(key, OPEN.encode())
        gate = verbs.faults.gate("close_queue_pair")
        with pytest.raises(TransportError, match="a verb hangs"):
            made.transport.release(key, "it departed")
        gate.open()
        wait_until(lambda: made.transport.holdings()["passive_connections"] == 0)


def test_a_stop_gives_everything_back_with_work_under_way_and_many_peers() -> None:
    verbs = fabric()
    with side(verbs) as b, side(verbs, send_depth=16, group=16) as a:
        linked = [link(a, b) for _ in range(150)]  # two rails each: 300 connections
        here = a.register(fresh())
        there = b.register(fresh())
        row = (here, 0, there, 0, 256 * KIB)
        for endpoint, _ in linked:
            completed(Submitted(endpoint, WRITE, [row]))
        wait_until(lambda: a.transport.holdings()["connections"] == 300)
        verbs.hold()
        submitted = [Submitted(endpoint, READ, [row]) for endpoint, _ in linked]
        a.transport.stop()
        for one in submitted:
            assert one.work.finished
            ended(one)
        assert a.transport.holdings() == {}
        verbs.release()
        wait_until(lambda: verbs.counts.alive("device") == 2)  # those of b
    assert not live(verbs)
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("tent-rdma")])


def fresh() -> Any:
    return np.zeros(256 * KIB, np.uint8)


@pytest.mark.parametrize("operation", ["close_queue_pair", "close_registration", "close_device"])
def test_a_stop_that_a_verb_holds_up_returns_and_is_finished_later(operation: Operation) -> None:
    verbs = fabric()
    with side(verbs) as b, side(verbs) as a:
        linked = [link(a, b) for _ in range(3)]
        here, there = a.register(fresh()), b.register(fresh())
        row = (here, 0, there, 0, 256 * KIB)
        for endpoint, _ in linked:
            completed(Submitted(endpoint, WRITE, [row]))
        verbs.hold()
        submitted = [Submitted(endpoint, WRITE, [row]) for endpoint, _ in linked]
        gate = verbs.faults.gate(operation)
        a.transport.stop()  # the time limit of the test would end one that waits
        for one in submitted:
            assert one.work.finished
            assert ended(one).unfenced
        gate.open()
        wait_until(lambda: verbs.counts.alive("device") == 2)
        verbs.release()


def test_a_stop_while_connections_are_made_leaves_nothing() -> None:
    verbs = fabric()
    with side(verbs) as b:
        a = side(verbs).start()
        endpoint, wire = link(a, b)
        here, there = a.register(fresh()), b.register(fresh())
        asking, gate = threading.Event(), threading.Event()

        def intercept(message: object, ask: Callable[[], bytes]) -> bytes:
            asking.set()
            assert gate.wait(30)
            return ask()

        wire.intercept = intercept
        submitted = Submitted(endpoint, WRITE, [(here, 0, there, 0, KIB)])
        assert asking.wait(30)
        a.transport.stop()
        ended(submitted)
        assert verbs.counts.alive("device") == 2
        gate.set()
        wait_until(lambda: not [t for t in threading.enumerate() if "connect" in t.name])
    assert not live(verbs)


def test_a_peer_that_asks_while_this_side_stops_is_refused() -> None:
    verbs = fabric()
    made = side(verbs).start()
    made.transport.stop()
    with pytest.raises(TransportError, match="being stopped"):
        made.transport.bootstrap(made.segment.snapshot.key, OPEN.encode())
    assert not live(verbs)


def test_events_of_a_device_that_cannot_be_read_cost_the_device_and_not_the_poller() -> None:
    with connected() as rig:
        here, ours = rig.buffer(rig.a, 64 * KIB)
        there, theirs = rig.buffer(rig.b, 64 * KIB)
        rig.work_through()
        rig.verbs.faults.fail_next("next_event", errno.EIO, nic="fake0", times=2)  # both sides
        rig.verbs.nics["fake0"].emit("OTHER")
        wait_until(lambda: not any(transport(s)._nics[0].usable for s in (rig.a, rig.b)))
        completed(rig.submit(WRITE, (here, 0, there, 0, 64 * KIB)))
        assert (ours == theirs).all()


def test_whatever_goes_wrong_in_who_is_told_the_poller_goes_on() -> None:
    with connected() as rig:
        here, _ = rig.buffer(rig.a, KIB)
        there, _ = rig.buffer(rig.b, KIB)
        rig.work_through()

        def fail() -> None:
            raise RuntimeError("a mistake")

        rig.endpoint.ports_changed = fail  # type: ignore[method-assign]
        rig.verbs.nics["fake0"].emit("PORT_ACTIVE")
        transport(rig.a)._at(None, time.monotonic(), fail)
        completed(rig.submit(WRITE, (here, 0, there, 0, KIB)))
        assert transport(rig.a)._pollers[0]._thread.is_alive()
