"""Two engines' control planes in one process: opening, following, acknowledging, asking, closing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from control_harness import HANG_S, Control, Listener, Peers, Side, buffer, side, wait_until

from tent_core.control import tent_pb2 as pb
from tent_core.control import wire
from tent_core.control.contract import (
    BOOTSTRAP_LIMIT,
    NOTIFICATION_LIMIT,
    Checksum,
    SessionState,
)
from tent_core.control.options import grpc
from tent_core.descriptor import (
    Attribute,
    BufferDescriptor,
    Device,
    HostIdentity,
    SegmentDescriptor,
)
from tent_core.errors import (
    ClosedError,
    PeerDeparted,
    PeerRefused,
    TransportError,
    UnknownSegment,
    UsageError,
    WaitTimeout,
)
from tent_core.types import BufferState, Permission


@pytest.fixture
def here() -> Iterator[Side]:
    with side() as it:
        yield it


@pytest.fixture
def there() -> Iterator[Side]:
    with side() as it:
        yield it


# -------------------------------------------------------------------- opening


def test_a_connection_comes_with_the_snapshot_of_that_moment(here: Side, there: Side) -> None:
    there.local.update(
        lambda old: replace(
            old,
            transports=MappingProxyType({"tcp": 7, "mine": 1500}),
            attributes=MappingProxyType({"tcp": Attribute(7, "tcp", b"\x00\xff")}),
            devices=(Device("eth0", -1), Device("mlx5_0", 1, "rdma")),
            buffers=MappingProxyType({3: buffer(3)}),
        )
    )
    connection = here.connect(there.name)
    assert connection.descriptor == there.local.snapshot
    assert connection.key == there.key
    info = there.handler.opened[0]
    assert (info.key, info.session, info.same_host) == (here.key, connection.session, True)


def test_the_opened_engine_learns_the_openers_transports(here: Side, there: Side) -> None:
    here.local.update(lambda old: replace(old, transports=MappingProxyType({"shm": 3, "new": 99})))
    here.connect(there.name)
    assert there.handler.opened[0].transports == {"shm": 3, "new": 99}


def test_opening_twice_answers_the_same_connection(here: Side, there: Side) -> None:
    listener = Listener()
    first = here.connect(there.name, listener)
    assert here.connect(there.name) is first
    assert first.listener is listener
    assert len(there.handler.opened) == 1


def test_many_threads_that_open_at_once_make_one_connection(here: Side, there: Side) -> None:
    alias = there.name.replace("127.0.0.1", "localhost")
    with ThreadPoolExecutor(16) as pool:
        found = set(pool.map(lambda i: here.connect(alias if i % 2 else there.name), range(32)))
    assert len(found) == 1
    assert len(there.plane.sessions()) == 1
    assert there.handler.departed == []


def test_another_name_of_an_engine_finds_the_same_connection(here: Side, there: Side) -> None:
    by_alias = here.connect(there.name.replace("127.0.0.1", "localhost"))
    assert by_alias.key.name == there.name
    assert here.connect(there.name) is by_alias


def test_a_proxy_of_the_environment_is_not_asked(
    here: Side, there: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    here.connect(there.name).notify("n", b"", 5)


def test_an_idle_connection_is_pinged_and_stays_the_same_stream(there: Side) -> None:
    eager = Control(keepalive_time_s=0.02, keepalive_timeout_s=5)
    with side(eager) as it:
        connection = it.connect(there.name)
        stream = there.plane._server._streams[connection.session]
        time.sleep(1.0)  # some fifty pings
        assert there.plane._server._streams[connection.session] is stream
        assert connection.state.value == "up"


def test_an_engine_can_open_itself(here: Side) -> None:
    connection = here.connect(here.name)
    connection.notify("self", b"", 5)
    assert here.handler.notes[0].sender == here.key
    connection.close()


def test_two_engines_can_open_each_other(here: Side, there: Side) -> None:
    one, other = here.connect(there.name), there.connect(here.name)
    one.notify("n", b"1", 5)
    other.notify("n", b"2", 5)
    assert (there.handler.notes[0].payload, here.handler.notes[0].payload) == (b"1", b"2")


def test_a_name_where_nobody_answers_fails_at_once_with_the_cause(here: Side) -> None:
    started = time.monotonic()
    with pytest.raises(UnknownSegment, match=r"no engine answers at 127\.0\.0\.1:1: .*refused"):
        here.connect("127.0.0.1:1", timeout=HANG_S)
    assert time.monotonic() - started < HANG_S / 2


def test_a_listener_that_says_nothing_is_given_up_at_the_deadline(here: Side) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        name = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UnknownSegment, match=f"no engine answers at {name}"):
            here.connect(name, timeout=0.3)


def test_another_grpc_server_is_no_engine(here: Side) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(UnknownSegment, match="no engine of this version"):
            here.connect(f"127.0.0.1:{port}")
    finally:
        server.stop(None).wait(5)


@pytest.mark.parametrize("name", ["nonsense", "::1:5", "127.0.0.1:x"])
def test_a_malformed_name_is_a_usage_error(here: Side, name: str) -> None:
    with pytest.raises(UsageError):
        here.connect(name)


def test_a_full_engine_refuses_and_serves_again_when_there_is_room(here: Side) -> None:
    with side(peers=Peers(max=1)) as small, side() as other:
        first = other.connect(small.name)
        with pytest.raises(
            PeerRefused, match=r"keeps 1 sessions already.*raise peers\.max there; nobody"
        ):
            here.connect(small.name)
        first.close()
        here.connect(small.name)


# -------------------------------------------------------------------- what a raw caller is told


def call(name: str, method: str, request: object, response: type, timeout: float = 5) -> object:
    with grpc.insecure_channel(name) as channel:
        stub = channel.unary_unary(
            f"/tent.v1.Control/{method}", lambda m: m.SerializeToString(), response.FromString
        )
        return stub(request, timeout=timeout)


def introduction(to: str, **more: object) -> pb.ConnectRequest:
    fields: dict[str, object] = {
        "protocol": 1,
        "target": to,
        "name": "10.0.0.1:5",
        "incarnation": b"x" * 16,
        **more,
    }
    return pb.ConnectRequest(**fields)  # type: ignore[arg-type]


ELSEWHERE = pb.Host(boot_id="another machine", pid=1)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"protocol": 2}, "speaks version 1 of the protocol, the caller version 2"),
        (
            {"name": "127.0.0.1:5", "host": ELSEWHERE},
            "the caller advertises 127.0.0.1:5, which no other machine",
        ),
        ({"host": ELSEWHERE}, "the engine called advertises 127.0.0.1:"),
    ],
)
def test_a_caller_that_cannot_be_served_is_told_why(
    there: Side, more: dict[str, object], reason: str
) -> None:
    response = call(there.name, "Connect", introduction(there.name, **more), pb.ConnectResponse)
    assert reason in response.refused.reason
    assert there.plane.sessions() == []


def test_a_caller_that_advertises_the_address_of_the_engine_it_calls_is_told_so(
    there: Side,
) -> None:
    response = call(
        there.name, "Connect", introduction(there.name, name=there.name), pb.ConnectResponse
    )
    assert "the address that it called" in response.refused.reason


def test_a_caller_on_another_machine_is_served_when_both_advertise_real_addresses() -> None:
    with side(Control(advertise="10.0.0.2")) as it:
        bound = f"127.0.0.1:{it.plane._bound.port}"
        response = call(bound, "Connect", introduction(it.name, host=ELSEWHERE), pb.ConnectResponse)
        assert response.accepted.session
        assert not it.plane.sessions()[0].same_host


@pytest.mark.parametrize(
    ("method", "request_", "response"),
    [
        ("Bootstrap", pb.BootstrapRequest(session=5), pb.BootstrapResponse),
        ("Notify", pb.NotifyRequest(session=5), pb.NotifyResponse),
    ],
)
def test_an_unknown_session_is_answered_with_the_incarnation_that_does_not_know_it(
    there: Side, method: str, request_: object, response: type
) -> None:
    answer = call(there.name, method, request_, response)
    assert answer.forgotten.incarnation == there.key.incarnation
    assert "no such session" in answer.forgotten.reason


def test_a_goodbye_of_an_unknown_session_is_answered(there: Side) -> None:
    assert not call(there.name, "Goodbye", pb.GoodbyeRequest(session=5), pb.GoodbyeResponse).known


# -------------------------------------------------------------------- following


def test_a_buffer_published_later_arrives_without_asking(here: Side, there: Side) -> None:
    listener = Listener()
    connection = here.connect(there.name, listener)
    for count in range(1, 4):
        there.publish(*(buffer(i) for i in range(count)))
        wait_until(lambda: connection.descriptor.version == there.local.snapshot.version)
    assert connection.descriptor == there.local.snapshot
    assert [old.version + 1 for old, _ in listener.updates] == [
        new.version for _, new in listener.updates
    ]
    there.publish(buffer(2, generation=9, state=BufferState.REVOKING))
    wait_until(lambda: connection.descriptor == there.local.snapshot)


def test_updates_from_many_threads_end_with_the_newest_and_never_go_back(
    here: Side, there: Side
) -> None:
    listener = Listener()
    connection = here.connect(there.name, listener)

    def add(number: int, generation: int) -> None:
        more = {number: buffer(number, generation)}
        there.local.update(
            lambda old: replace(old, buffers=MappingProxyType({**old.buffers, **more}))
        )

    def change(number: int) -> None:
        for generation in range(20):
            add(number, generation)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(change, range(8)))
    wait_until(lambda: connection.descriptor == there.local.snapshot)
    versions = [new.version for _, new in listener.updates]
    assert versions == sorted(set(versions))


def test_a_refresh_answers_the_newest_snapshot_at_once(here: Side, there: Side) -> None:
    listener = Listener()
    connection = here.connect(there.name, listener)
    for count in range(20):
        version = there.publish(*(buffer(i) for i in range(count)))
        assert connection.refresh(5).version == version
        assert listener.updates[-1][1].version >= version
    versions = [new.version for _, new in listener.updates]
    assert versions == sorted(set(versions))
    assert connection.refresh(5) is connection.descriptor


def test_a_descriptor_of_100_000_buffers_crosses_and_so_does_its_change(
    here: Side, there: Side
) -> None:
    offers = MappingProxyType({n: Attribute(i, n, b"k" * 12) for n, i in (("tcp", 7), ("shm", 3))})
    table = {
        i: BufferDescriptor(
            i,
            i + 1,
            f"layer-{i}",
            i << 21,
            1 << 21,
            "cpu:0",
            Permission.GLOBAL_READ_WRITE,
            attributes=offers,
        )
        for i in range(100_000)
    }
    there.local.update(lambda old: replace(old, buffers=MappingProxyType(table)))
    connection = here.connect(there.name, timeout=50)
    assert connection.descriptor == there.local.snapshot
    there.local.update(
        lambda old: replace(old, buffers=MappingProxyType({**old.buffers, 7: buffer(7, 2)}))
    )
    wait_until(lambda: connection.descriptor.version == there.local.snapshot.version, HANG_S)
    assert connection.descriptor.buffers[7] == buffer(7, 2)
    there.local.update(lambda old: replace(old, buffers=MappingProxyType({})))
    wait_until(lambda: not connection.descriptor.buffers, HANG_S)


def test_other_peers_are_served_while_a_large_descriptor_crosses(here: Side, there: Side) -> None:
    with side() as third:
        good = third.connect(there.name)
        there.local.update(
            lambda old: replace(
                old, buffers=MappingProxyType({i: buffer(i) for i in range(60_000)})
            )
        )
        opening = threading.Thread(target=here.connect, args=(there.name,), kwargs={"timeout": 50})
        opening.start()
        served = 0
        while opening.is_alive():
            good.notify("n", b"", 5)
            served += 1
        opening.join()
        assert served > 3


# -------------------------------------------------------------------- acknowledging


def test_a_version_is_waited_for_until_every_watcher_has_let_go(here: Side, there: Side) -> None:
    with side() as third:
        connections = [here.connect(there.name), third.connect(there.name)]
        version = there.publish(buffer(1))
        assert len(there.behind(version)) == 2
        connections[0].acknowledge(version)
        assert [i.key for i in there.plane.wait_acknowledged(version, lambda _: True, 0.3)] == [
            third.key
        ]
        threading.Timer(0.1, connections[1].acknowledge, (version,)).start()
        assert there.plane.wait_acknowledged(version, lambda _: True, HANG_S) == []


def test_only_those_whom_it_concerns_are_waited_for(here: Side, there: Side) -> None:
    here.connect(there.name)
    version = there.publish(buffer(1))
    seen = []

    def concerned(info: object) -> bool:
        seen.append((info, threading.current_thread()))
        return False

    assert there.plane.wait_acknowledged(version, concerned, HANG_S) == []
    assert seen[0][1] is threading.current_thread()


def test_a_watcher_that_opened_after_a_change_has_nothing_to_let_go_of(
    here: Side, there: Side
) -> None:
    version = there.publish(buffer(1))
    here.connect(there.name)
    assert there.behind(version) == []
    assert len(there.behind(version + 1)) == 1


def test_an_older_acknowledgement_changes_nothing(here: Side, there: Side) -> None:
    connection = here.connect(there.name)
    first, second = there.publish(buffer(1)), there.publish()
    connection.acknowledge(second)
    connection.acknowledge(first)
    assert there.plane.wait_acknowledged(second, lambda _: True, HANG_S) == []


def test_an_acknowledgement_from_the_future_ends_the_session(here: Side, there: Side) -> None:
    listener = Listener()
    connection = here.connect(there.name, listener)
    connection.acknowledge(1000)
    wait_until(lambda: listener.reasons)
    assert "malformed: an acknowledgement of version 1000" in listener.reasons[0]
    connection.close()
    wait_until(lambda: there.plane.sessions() == [])


# -------------------------------------------------------------------- asking


def test_a_bootstrap_is_answered_by_the_peers_transport(here: Side, there: Side) -> None:
    connection = here.connect(there.name)
    assert connection.bootstrap("mine", 1500, b"abc", 5) == b"cba"
    assert there.handler.bootstraps == [(here.key, "mine", 1500, b"abc")]


def test_a_bootstrap_that_is_refused_says_what_the_peer_said(here: Side, there: Side) -> None:
    there.handler.answer = TransportError("no queue pair left")
    connection = here.connect(there.name)
    with pytest.raises(TransportError, match="failed there: TransportError: no queue pair left"):
        connection.bootstrap("rdma", 1, b"", 5)
    there.handler.answer = NotImplementedError("this transport needs no bootstrap")
    with pytest.raises(TransportError, match="needs no bootstrap"):
        connection.bootstrap("rdma", 1, b"", 5)


def test_a_bootstrap_that_is_not_answered_ends_at_its_deadline(here: Side, there: Side) -> None:
    there.handler.answer = "never"
    with pytest.raises(TransportError):
        here.connect(there.name).bootstrap("rdma", 1, b"", 0.2)


@pytest.mark.parametrize("size", [0, BOOTSTRAP_LIMIT])
def test_a_bootstrap_may_be_this_large(here: Side, there: Side, size: int) -> None:
    assert len(here.connect(there.name).bootstrap("rdma", 1, bytes(size), 5)) == size


def test_a_bootstrap_beyond_its_limit_is_refused_on_either_side(here: Side, there: Side) -> None:
    connection = here.connect(there.name)
    with pytest.raises(UsageError, match="beyond"):
        connection.bootstrap("rdma", 1, bytes(BOOTSTRAP_LIMIT + 1), 5)
    there.handler.answer = bytes(BOOTSTRAP_LIMIT + 1)
    with pytest.raises(TransportError, match="beyond"):
        connection.bootstrap("rdma", 1, b"", 5)


def test_notifications_arrive_in_the_order_of_their_calls(here: Side, there: Side) -> None:
    connection = here.connect(there.name)
    for i in range(100):
        connection.notify(f"n{i}", bytes([i]), 5)
    assert [(n.name, n.payload) for n in there.handler.notes] == [
        (f"n{i}", bytes([i])) for i in range(100)
    ]
    assert [n.sequence for n in there.handler.notes] == list(range(1, 101))
    assert {n.sender for n in there.handler.notes} == {here.key}


def test_notifications_of_many_threads_keep_the_order_of_each(here: Side, there: Side) -> None:
    connection = here.connect(there.name)

    def send(thread: int) -> None:
        for i in range(50):
            connection.notify(str(thread), bytes([i]), HANG_S)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(8)))
    for thread in range(8):
        assert [n.payload[0] for n in there.handler.notes if n.name == str(thread)] == list(
            range(50)
        )


@pytest.mark.parametrize("name", ["", "x" * 100, "\u00fc" * 50])
def test_a_notification_may_be_64_kib_less_its_header(here: Side, there: Side, name: str) -> None:
    room = NOTIFICATION_LIMIT - len(name.encode())
    connection = here.connect(there.name)
    connection.notify(name, bytes(room), 5)
    assert (there.handler.notes[0].name, len(there.handler.notes[0].payload)) == (name, room)
    with pytest.raises(UsageError, match="write the data to a buffer"):
        connection.notify(name, bytes(room + 1), 5)
    with pytest.raises(UsageError, match="has to be text"):
        connection.notify("\ud800", b"", 5)


def test_a_full_queue_holds_the_sender_until_there_is_room_or_its_deadline(
    here: Side, there: Side
) -> None:
    there.handler.room = 1
    connection = here.connect(there.name)
    connection.notify("first", b"", 5)
    with pytest.raises(
        WaitTimeout, match=r"'second' was not taken .* queue of notifications was full"
    ):
        connection.notify("second", b"", 1.0)
    threading.Timer(0.1, setattr, (there.handler, "room", 2)).start()
    connection.notify("third", b"", HANG_S)
    assert [n.name for n in there.handler.notes] == ["first", "third"]


# -------------------------------------------------------------------- closing


def test_a_goodbye_is_a_departure_at_once_and_no_event_on_this_side(
    here: Side, there: Side
) -> None:
    listener = Listener()
    connection = here.connect(there.name, listener)
    connection.close("enough")
    connection.close("again")
    assert [reason for _, reason in there.handler.departed] == ["it said goodbye: enough"]
    assert there.plane.sessions() == []
    assert listener.reasons == []
    for use in (lambda: connection.notify("n", b"", 1), lambda: connection.refresh(1)):
        with pytest.raises(ClosedError):
            use()


def test_a_closed_connection_is_made_anew_when_it_is_opened_again(here: Side, there: Side) -> None:
    first = here.connect(there.name)
    first.close()
    second = here.connect(there.name)
    assert second is not first
    second.notify("n", b"", 5)


def test_the_end_of_an_engine_is_told_to_those_who_watch_it(here: Side) -> None:
    listener = Listener()
    with side() as leaving:
        connection = here.connect(leaving.name, listener)
    wait_until(lambda: listener.reasons)
    assert listener.reasons == ["it said goodbye: its engine was closed"]
    with pytest.raises(PeerDeparted, match="said goodbye"):
        connection.notify("n", b"", 1)
    connection.close()


def test_the_end_of_an_engine_is_told_to_those_whom_it_watches(there: Side) -> None:
    with side() as leaving:
        leaving.connect(there.name)
    assert [reason for _, reason in there.handler.departed] == [
        "it said goodbye: its engine was closed"
    ]


def test_who_waits_when_the_peer_goes_is_told_so(here: Side) -> None:
    with side() as leaving:
        leaving.handler.room = 0
        leaving.handler.answer = "never"
        connection = here.connect(leaving.name)
        with ThreadPoolExecutor(2) as pool:
            waiting = [
                pool.submit(connection.notify, "n", b"", HANG_S),
                pool.submit(connection.bootstrap, "tcp", 7, b"", HANG_S),
            ]
            wait_until(lambda: leaving.handler.bootstraps)
            leaving.stop()
            for future in waiting:
                with pytest.raises((PeerDeparted, TransportError)):
                    future.result(HANG_S)


def test_a_listener_or_a_handler_that_raises_harms_nothing(here: Side, there: Side) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug of the engine")

    listener = Listener()
    listener.updated = fail
    there.handler.session_opened = fail
    connection = here.connect(there.name, listener)
    there.publish(buffer(1))
    wait_until(lambda: connection.descriptor.version == there.local.snapshot.version)
    connection.notify("n", b"", 5)


def test_closing_from_a_listener_is_possible(here: Side) -> None:
    closed = threading.Event()

    class Closing(Listener):
        def departed(self, reason: str) -> None:
            connection.close(reason)
            closed.set()

    with side() as leaving:
        connection = here.connect(leaving.name, Closing())
    assert closed.wait(HANG_S)


def test_sessions_show_their_state(here: Side, there: Side) -> None:
    connection = here.connect(there.name)
    info = there.plane.sessions()[0]
    assert (info.session, info.state, info.acknowledged) == (
        connection.session,
        SessionState.OPEN,
        1,
    )
    assert connection.departed is None
    assert connection.state.value == "up"
    assert here.key.name not in repr(connection)


def test_an_engine_that_sends_no_descriptor_is_given_up(here: Side, there: Side) -> None:
    # A segment whose snapshot cannot be made into a message: a bug of that engine, not of this one.
    broken = HostIdentity("boot", 1, -1, 1)
    there.local._snapshot = SegmentDescriptor(there.name, there.key.incarnation, 2, broken)
    with pytest.raises(UnknownSegment, match=r"did not send its descriptor|no engine answers"):
        here.connect(there.name, timeout=0.5)


def test_hosts_keep_their_identity_over_the_wire() -> None:
    identity = HostIdentity("boot", 2**40, 77, 2**50)
    assert (
        wire.host_from(pb.Host.FromString(wire.host_to(identity).SerializeToString())) == identity
    )


CHECKSUM = Checksum(3, 7, np.array([0, 64], np.uint64), np.array([8, 2**63], np.uint64), 0xE3069283)


def test_an_announcement_arrives_with_what_it_says(here: Side, there: Side) -> None:
    connection = here.connect(there.name)
    connection.announce("failed", b"1", 5, failure="x" * 5000).result(HANG_S)
    there.handler.verdict.set_result(None)
    connection.announce("right", b"2", 5, checksums=[CHECKSUM]).result(HANG_S)
    there.handler.verdict = Future()
    there.handler.verdict.set_result("it is wrong")
    connection.announce("wrong", b"3", 5, checksums=[CHECKSUM]).result(HANG_S)
    failed, right, wrong = there.handler.notes
    assert (failed.error or "").startswith("the sender could not move it: xxx")
    assert len(failed.error or "") < 1100
    assert (right.ok, right.verified) == (True, True)
    assert (wrong.ok, wrong.verified, wrong.error) == (False, False, "it is wrong")
    told = there.handler.verified[0][0]
    assert (told.buffer, told.generation, told.value) == (3, 7, 0xE3069283)
    assert told.offsets.tolist() == [0, 64]
    assert told.lengths.tolist() == [8, 2**63]


def test_data_is_compared_once_and_others_wait_in_line(here: Side, there: Side) -> None:
    """The receiver takes longer to compare than one delivery lasts."""
    connection = here.connect(there.name)
    slow = connection.announce("slow", b"", HANG_S, checksums=[CHECKSUM])
    after = connection.announce("after", b"", HANG_S)
    wait_until(lambda: there.handler.verified)
    again = pb.NotifyRequest(session=connection.session)
    again.notifications.add(sequence=1, name="slow").checksums.add(
        buffer=3, generation=7, offsets=[0], lengths=[8]
    )
    for _ in range(2):  # it is sent again and again, and nobody waits for the answer for long
        with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
            call(there.name, "Notify", again, pb.NotifyResponse, 0.1)
    assert there.handler.notes == []
    there.handler.verdict.set_result(None)
    slow.result(HANG_S)
    after.result(HANG_S)
    assert [note.name for note in there.handler.notes] == ["slow", "after"]
    assert len(there.handler.verified) == 1
