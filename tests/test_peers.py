"""A live peer lets go of what its owner takes away before it acknowledges, and closes all when it departs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
from pydantic import BaseModel

from tent_core.admission import Rules
from tent_core.alarm import Alarm
from tent_core.descriptor import Attribute, BufferDescriptor, HostIdentity, SegmentDescriptor
from tent_core.errors import (
    BufferRevoked,
    PeerDeparted,
    StaleHandle,
    TransportError,
    UnknownSegment,
    Unreachable,
)
from tent_core.health import HealthRules
from tent_core.life import PeerState
from tent_core.log import Logger
from tent_core.peers import Listener, LivePeer, Owner
from tent_core.runner import Running, Transports
from tent_core.serial import SerialQueue
from tent_core.traffic import Traffic
from tent_core.transport import Endpoint, Peer, Transport, TransportContext, TransportDeclaration
from tent_core.types import BufferState, Capabilities, Permission
from tent_core.work import Work

HOST = HostIdentity("boot", 1, 2, 3)


def buffer(
    number: int, generation: int = 1, state: BufferState = BufferState.LIVE
) -> BufferDescriptor:
    attributes = MappingProxyType({"fake": Attribute(1001, "fake", b"")})
    return BufferDescriptor(
        number, generation, f"b{number}", 4096 * (number + 1), 4096, "cpu:0",
        Permission.GLOBAL_READ_WRITE, state, attributes,
    )  # fmt: skip


def snapshot(version: int, *buffers: BufferDescriptor) -> SegmentDescriptor:
    table = MappingProxyType({b.id: b for b in buffers})
    return SegmentDescriptor("127.0.0.1:1", b"i" * 16, version, HOST, buffers=table)


class FakeConnection:
    """The control plane's side of a peer."""

    def __init__(self, descriptor: SegmentDescriptor, listener: Listener) -> None:
        self.descriptor = descriptor
        self.listener = listener
        self.key = descriptor.key
        self.acknowledged: list[int] = []
        self.changed = threading.Condition()
        self.closed: list[str] = []
        self.reports: list[float | None] = []

    def acknowledge(self, version: int) -> None:
        with self.changed:
            self.acknowledged.append(version)
            self.changed.notify_all()

    def close(self, reason: str = "", *, retired: bool = False) -> None:
        self.closed.append(f"retired: {reason}" if retired else reason)

    def report_idle(self, seconds: float | None) -> None:
        self.reports.append(seconds)

    def give_up(self, reason: str) -> None: ...

    def notify(self, name: str, payload: bytes, timeout: float) -> None: ...

    def wait_for(self, *versions: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.acknowledged == list(versions), 5), (
                self.acknowledged
            )


class FakeEndpoint(Endpoint):
    def __init__(self) -> None:
        self.events: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.closed = threading.Event()

    def submit(self, work: Work) -> None:
        work.complete()

    def refresh(self, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        assert self.gate.wait(5)
        self.events.append(f"refresh {old.version}->{new.version}")

    def close(self, reason: str) -> None:
        self.events.append(f"close {reason}")
        self.closed.set()


class FakeTransport(Transport):
    def __init__(self) -> None:
        self.endpoints: list[FakeEndpoint] = []
        self.fail: Exception | None = None
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def start(self, context: TransportContext) -> None: ...

    def connect(self, peer: Peer) -> Endpoint:
        self.entered.set()
        assert self.gate.wait(5)
        if self.fail is not None:
            raise self.fail
        self.endpoints.append(FakeEndpoint())
        return self.endpoints[-1]

    def stop(self) -> None: ...


class Harness:
    def __init__(self, *buffers: BufferDescriptor) -> None:
        self.transport = FakeTransport()
        declaration = TransportDeclaration("fake", 1001, FakeTransport, BaseModel, Capabilities())
        self.log = Logger(lambda *_: None)
        self.transports = Transports(self.log)
        self.running = Running(declaration, self.transport, self.log)
        self.transports._running["fake"] = self.running
        self.gone: list[LivePeer] = []
        self.retired: list[LivePeer] = []
        self.dialled: list[FakeConnection] = []
        self.answer: Any = snapshot(1, *buffers)
        self.later = SerialQueue("later")
        self.owner = Owner(
            HOST,
            self.transports,
            self.log,
            self.dial,
            lambda *_: None,
            self.retired.append,
            self.gone.append,
            self.later.submit,
            lambda: Traffic(Rules({}), HealthRules(), Alarm("test-alarm")),
        )
        listener = Listener()
        self.peer = LivePeer(self.owner, listener, self.dial("127.0.0.1:1", 1.0, listener))

    @property
    def connection(self) -> FakeConnection:
        return self.dialled[-1]

    def dial(self, name: str, timeout: float, listener: Listener) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        self.dialled.append(FakeConnection(self.answer, listener))
        return self.dialled[-1]

    def publish(self, *buffers: BufferDescriptor) -> None:
        old = self.connection.descriptor
        self.connection.descriptor = snapshot(old.version + 1, *buffers)
        self.connection.listener.updated(old, self.connection.descriptor)

    def settle(self) -> None:
        """Let everything that was queued have been done."""
        for _ in range(3):
            self.running.calls.submit(lambda: None).result(5)
            self.later.submit(lambda: None).result(5)

    def stop(self) -> None:
        self.running.calls.close(5)
        self.later.close(5)


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness(buffer(0), buffer(1))
    yield made
    made.stop()


def test_a_revocation_is_acknowledged_only_after_the_transfers_on_it_ended(
    harness: Harness,
) -> None:
    endpoint = harness.peer.endpoint("fake")
    victim = harness.peer.buffers()[0]
    assert victim.inflight.begin()
    harness.publish(buffer(0, state=BufferState.REVOKING), buffer(1))
    assert not victim.inflight.begin()
    assert isinstance(victim.gone(), BufferRevoked)
    harness.connection.wait_for(1)
    victim.inflight.end()
    harness.connection.wait_for(1, 2)
    assert isinstance(endpoint, FakeEndpoint)
    assert endpoint.events == ["refresh 1->2"]


def test_a_revocation_is_acknowledged_only_after_every_endpoint_let_go(harness: Harness) -> None:
    endpoint = harness.peer.endpoint("fake")
    assert isinstance(endpoint, FakeEndpoint)
    endpoint.gate.clear()
    harness.publish(buffer(1))
    harness.connection.wait_for(1)
    endpoint.gate.set()
    harness.connection.wait_for(1, 2)


def test_an_endpoint_that_fails_to_let_go_is_never_acknowledged(harness: Harness) -> None:
    endpoint = harness.peer.endpoint("fake")
    endpoint.refresh = lambda old, new: 1 // 0  # type: ignore[method-assign]
    harness.publish(buffer(1))
    harness.running.calls.submit(lambda: None).result(5)
    harness.connection.wait_for(1)


def test_acknowledgements_and_refreshes_keep_the_order_of_versions(harness: Harness) -> None:
    endpoint = harness.peer.endpoint("fake")
    first = harness.peer.buffers()[0]
    first.inflight.begin()
    harness.publish(buffer(1))
    harness.publish()
    harness.connection.wait_for(1)
    first.inflight.end()
    harness.connection.wait_for(1, 2, 3)
    assert isinstance(endpoint, FakeEndpoint)
    assert endpoint.events == ["refresh 1->2", "refresh 2->3"]


def test_a_buffer_id_that_is_used_again_is_another_buffer(harness: Harness) -> None:
    before = harness.peer.buffers()[0]
    harness.publish(buffer(0, generation=7), buffer(1))
    assert isinstance(before.gone(), StaleHandle)
    assert not before.inflight.begin()
    after = harness.peer.find("b0")
    assert after is not None
    assert after.generation == 7
    assert after.inflight.begin()


def test_a_new_buffer_is_usable_and_the_plans_are_made_anew(harness: Harness) -> None:
    epoch = harness.peer.epoch
    harness.peer.plans["old"] = object()
    harness.publish(buffer(0), buffer(1), buffer(2))
    assert harness.peer.find("b2") is not None
    assert harness.peer.epoch > epoch
    assert harness.peer.plans == {}


def test_concurrent_callers_share_one_connect(harness: Harness) -> None:
    harness.transport.gate.clear()
    got: list[Endpoint] = []
    callers = [
        threading.Thread(target=lambda: got.append(harness.peer.endpoint("fake"))) for _ in range(8)
    ]
    for caller in callers:
        caller.start()
    assert harness.transport.entered.wait(5)
    harness.transport.gate.set()
    for caller in callers:
        caller.join(5)
    assert len(got) == 8
    assert len(set(map(id, got))) == 1
    assert len(harness.transport.endpoints) == 1


def test_a_transport_that_cannot_reach_the_peer_is_remembered_with_its_reason(
    harness: Harness,
) -> None:
    harness.transport.fail = Unreachable("another user")
    with pytest.raises(Unreachable, match="another user"):
        harness.peer.endpoint("fake")
    assert harness.peer.unreachable == {"fake": "another user"}
    harness.transport.entered.clear()
    with pytest.raises(Unreachable, match="another user"):
        harness.peer.endpoint("fake")
    assert not harness.transport.entered.is_set()


def test_a_connect_that_failed_may_be_tried_again(harness: Harness) -> None:
    harness.transport.fail = TransportError("busy")
    with pytest.raises(TransportError, match="busy"):
        harness.peer.endpoint("fake")
    harness.transport.fail = None
    assert harness.peer.endpoint("fake") is harness.transport.endpoints[0]


def test_a_departed_peer_closes_its_endpoints_and_is_gone_when_nothing_uses_it(
    harness: Harness,
) -> None:
    endpoint = harness.peer.endpoint("fake")
    used = harness.peer.buffers()[0]
    harness.peer.begin(1)
    harness.connection.listener.departed("process ended")
    harness.peer.depart("again")
    assert isinstance(endpoint, FakeEndpoint)
    assert endpoint.closed.wait(5)
    harness.settle()
    assert harness.gone == []
    harness.peer.end()
    assert harness.gone == [harness.peer]
    assert endpoint.events == ["close process ended"]
    with pytest.raises(PeerDeparted, match="process ended"):
        harness.peer.endpoint("fake")
    with pytest.raises(PeerDeparted, match="process ended"):
        harness.peer.begin(1)
    assert not used.inflight.begin()
    assert isinstance(used.gone(), PeerDeparted)


def test_an_endpoint_made_while_the_peer_departs_is_closed(harness: Harness) -> None:
    harness.transport.gate.clear()
    failed: list[Exception] = []

    def connect() -> None:
        try:
            harness.peer.endpoint("fake")
        except PeerDeparted as error:
            failed.append(error)

    caller = threading.Thread(target=connect)
    caller.start()
    assert harness.transport.entered.wait(5)
    harness.peer.depart("goodbye")
    harness.transport.gate.set()
    caller.join(5)
    assert len(failed) == 1
    harness.settle()
    assert harness.transport.endpoints[0].closed.is_set()
    assert harness.gone == [harness.peer]


def test_what_happened_before_the_connection_was_adopted_is_not_lost() -> None:
    made = Harness(buffer(0))
    listener = Listener()
    old, new = snapshot(1, buffer(0)), snapshot(2, buffer(0))
    listener.updated(old, new)
    connection: Any = FakeConnection(new, listener)
    LivePeer(made.owner, listener, connection)
    connection.wait_for(2)
    late = Listener()
    late.departed("its process ended")
    gone = LivePeer(made.owner, late, FakeConnection(new, late))  # type: ignore[arg-type]
    made.settle()
    assert made.gone == [gone]
    with pytest.raises(PeerDeparted, match="its process ended"):
        gone.check_alive()
    made.stop()


# -------------------------------------------------------------------- idle


def test_an_idle_peer_releases_everything_the_control_connection_last(harness: Harness) -> None:
    endpoint = harness.peer.endpoint("fake")
    assert isinstance(endpoint, FakeEndpoint)
    endpoint.close = lambda reason: endpoint.events.append(  # type: ignore[method-assign]
        f"closed before the connection: {not harness.connection.closed}"
    )
    assert not harness.peer.retire(3600, "not idle for so long")
    assert harness.peer.retire(0, "idle")
    harness.settle()
    assert endpoint.events == ["closed before the connection: True"]
    assert harness.connection.closed == ["retired: idle"]
    assert harness.peer.state is PeerState.DORMANT
    assert harness.retired == [harness.peer]
    assert harness.peer.holdings() == {}


def test_a_peer_that_is_in_use_is_not_retired(harness: Harness) -> None:
    harness.peer.begin(1)
    assert not harness.peer.retire(0, "idle")
    harness.peer.end()
    assert harness.peer.retire(0, "idle")


def test_the_next_use_brings_a_retired_peer_back_with_the_same_buffers(harness: Harness) -> None:
    kept, taken = harness.peer.buffers()
    harness.peer.retire(0, "idle")
    harness.answer = snapshot(9, buffer(0), buffer(1, generation=8))
    harness.peer.begin(5)
    assert harness.peer.state is PeerState.LIVE
    assert len(harness.dialled) == 2
    harness.connection.wait_for(9)
    assert kept.inflight.begin()
    assert not taken.inflight.begin()
    assert isinstance(taken.gone(), StaleHandle)
    harness.peer.endpoint("fake")
    harness.peer.end()


def test_many_users_of_a_retired_peer_connect_it_once(harness: Harness) -> None:
    harness.peer.retire(0, "idle")
    users = [threading.Thread(target=harness.peer.begin, args=(5,)) for _ in range(8)]
    for user in users:
        user.start()
    for user in users:
        user.join(5)
    assert len(harness.dialled) == 2
    assert harness.peer.idle_for() is None


def test_a_retired_peer_that_is_another_incarnation_now_has_departed(harness: Harness) -> None:
    from dataclasses import replace

    harness.peer.retire(0, "idle")
    harness.answer = replace(snapshot(1), incarnation=b"j" * 16)
    with pytest.raises(PeerDeparted, match="another incarnation"):
        harness.peer.begin(5)
    harness.settle()
    assert harness.gone == [harness.peer]
    assert len(harness.connection.closed) == 1


def test_a_retired_peer_that_cannot_be_reached_now_is_tried_again_by_the_next_use(
    harness: Harness,
) -> None:
    harness.peer.retire(0, "idle")
    harness.settle()
    answer, harness.answer = harness.answer, UnknownSegment("nobody answers")
    with pytest.raises(UnknownSegment):
        harness.peer.begin(5)
    harness.answer = answer
    harness.peer.begin(5)
    assert harness.peer.state is PeerState.LIVE


def test_events_of_a_connection_that_was_given_up_are_not_heeded(harness: Harness) -> None:
    first = harness.connection.listener
    harness.peer.retire(0, "idle")
    harness.peer.begin(5)
    first.departed("late")
    first.updated(snapshot(1), snapshot(50))
    assert harness.peer.departed is None
    assert harness.peer.segment.version == 1


def test_a_peer_that_departs_while_it_retires_is_gone_once(harness: Harness) -> None:
    endpoint = harness.peer.endpoint("fake")
    entered, gate = threading.Event(), threading.Event()

    def close(reason: str) -> None:
        entered.set()
        assert gate.wait(5)

    endpoint.close = close  # type: ignore[method-assign]
    harness.peer.retire(0, "idle")
    assert entered.wait(5)
    harness.connection.listener.departed("process ended")
    gate.set()
    harness.settle()
    assert harness.gone == [harness.peer]
    assert harness.retired == []
