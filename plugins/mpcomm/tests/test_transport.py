"""Two sides over the stand-in: publication, connections, keys, transfers, and how everything ends."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mpcomm_rig import KIB, Rig, at_once, declare, transfer, write

from tent_core.errors import (
    TransportError,
    TransportUnavailable,
    Unreachable,
)
from tent_core.testing.harness import Side, Submitted
from tent_core.testing.waiting import wait_until
from tent_core.topology import RdmaDevice, RdmaPort, Topology
from tent_core.types import Capabilities, MemoryKind, Opcode, Permission, Reach, Status
from tent_mock.mpcomm import StandIn
from tent_mpcomm import plugin
from tent_mpcomm.adapter import UnavailableAdapter
from tent_mpcomm.attribute import decode
from tent_mpcomm.environment import Environment
from tent_mpcomm.transport import MpcommTransport


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


def published(side: Side) -> Any:
    return decode(side.segment.snapshot.attributes["mpcomm"].payload)


# ---------------------------------------------------------------- what it is


def test_what_it_cannot_do_is_visible_and_what_it_can_is_claimed() -> None:
    able = plugin.capabilities(Topology())
    assert able == Capabilities(
        memory_pairs=able.memory_pairs,
        reach=Reach.NETWORK,
        self_scheduling=True,
        retained_per_peer=plugin.RETAINED,
    )
    assert able.moves(MemoryKind.DRAM, MemoryKind.DRAM)
    assert plugin.RETAINED.pinned_bytes > 0


@pytest.mark.parametrize(
    ("modules", "moves"), [({"nvidia_peermem"}, True), ({"nvidia"}, False), (set(), False)]
)
def test_gpu_memory_is_claimed_only_where_its_module_is_loaded(
    modules: set[str], moves: bool
) -> None:
    able = plugin.capabilities(Topology(modules=frozenset(modules)))
    pairs = [(a, b) for a in ("dram", "gpu") for b in ("dram", "gpu") if "gpu" in (a, b)]
    for local, remote in pairs:
        assert able.moves(MemoryKind(local), MemoryKind(remote)) is moves


@pytest.mark.parametrize("gpu", [True, False])
def test_gpu_memory_is_kept_away_by_a_setting(gpu: bool) -> None:
    declared = plugin.capabilities(Topology(modules=frozenset({"nvidia_peermem"})))
    with Side(declare(StandIn()), gpu=gpu) as side:
        able = side.transport.capabilities(declared)
    assert able.moves(MemoryKind.GPU, MemoryKind.DRAM) is gpu
    assert able.moves(MemoryKind.DRAM, MemoryKind.DRAM)
    assert able.self_scheduling


# ---------------------------------------------------------------- start


def test_each_side_finds_a_free_port_and_publishes_it(rig: Rig) -> None:
    here, there = published(rig.here), published(rig.there)
    assert here.port != there.port
    for address in (here, there):
        assert address.host == "127.0.0.1"
        socket.create_connection(address, 5).close()
    assert rig.here.segment.snapshot.attributes["mpcomm"].number == 12


def test_what_is_advertised_may_differ_from_what_is_listened_at() -> None:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    settings = {"listen_port": port, "advertise_host": "10.9.8.7", "advertise_port": 443}
    library = StandIn()
    with Side(declare(library), **settings) as side:
        assert published(side) == ("10.9.8.7", 443)
        assert library.instances[0].get_tcp_port() == port


def test_a_port_that_is_taken_fails_the_start_and_says_so() -> None:
    with socket.create_server(("", 0)) as taken:
        side = Side(declare(StandIn()), listen_port=taken.getsockname()[1])
        with pytest.raises(TransportUnavailable, match=r"is taken.*listen_port"):
            side.start()
        side.transport.stop()


def test_a_start_that_fails_leaves_no_claim_on_the_environment() -> None:
    library = StandIn()
    library.plan("init", -1)
    side = Side(declare(library), gid_index=7)
    with pytest.raises(TransportUnavailable, match=r"-1 \(device\)"):
        side.start()
    side.transport.stop()
    with Side(declare(library), gid_index=8):
        assert library.instances[-1].environment["MPCOMM_GID_INDEX"] == "8"


def test_an_unavailable_library_is_the_reason_why_it_cannot_start() -> None:
    side = Side(declare(UnavailableAdapter("it is not installed: install it")))
    with pytest.raises(TransportUnavailable, match="not installed"):
        side.start()
    side.transport.stop()


def test_an_ipv6_engine_is_asked_for_an_ipv4_address() -> None:
    side = Side(declare(StandIn()))
    side.context.advertise_host = "2001:db8::7"  # type: ignore[misc]
    with pytest.raises(TransportUnavailable, match=r"IPv6.*advertise_host"):
        side.start()
    side.transport.stop()


@pytest.mark.parametrize(
    ("settings", "expected"), [({}, ["mlx5_0", "mlx5_2"]), ({"nic_filter": ["mlx5_1"]}, [])]
)
def test_the_devices_are_those_of_the_machine_unless_they_are_filtered(
    settings: dict[str, Any], expected: list[str]
) -> None:
    library = StandIn()
    side = Side(declare(library), **settings)
    up, down = RdmaPort(1, "ACTIVE"), RdmaPort(1, "DOWN")
    devices = (RdmaDevice(f"mlx5_{n}", ports=(port,)) for n, port in enumerate((up, down, up)))
    side.context.topology = Topology(rdma_devices=tuple(devices))  # type: ignore[misc]
    with side:
        assert library.instances[0].get_active_devices() == expected


def test_two_engines_of_a_process_have_to_agree_on_the_environment() -> None:
    environment = Environment({})
    library = StandIn()
    declaration = declare(library)
    sides = [Side(declaration, gid_index=index) for index in (3, 3, 4)]
    for side in sides:
        side.transport = MpcommTransport(side.transport._adapter, environment)  # type: ignore[attr-defined]
    with sides[0], sides[1]:
        with pytest.raises(TransportUnavailable, match="MPCOMM_GID_INDEX"):
            sides[2].start()
        sides[2].transport.stop()


# ---------------------------------------------------------------- reaching a peer


@pytest.mark.parametrize("payload", [b"v2:10.0.0.1:80", b"[::1]:80", b"\xff", b"v1:a:0"])
def test_an_address_that_makes_no_sense_is_no_candidate_and_the_reason_says_why(
    rig: Rig, payload: bytes
) -> None:
    rig.there.publish(payload)
    with pytest.raises(Unreachable, match="handshake address"):
        rig.open()


def test_a_peer_without_an_address_is_no_candidate(rig: Rig) -> None:
    rig.there.publish(None)
    with pytest.raises(Unreachable, match="remote_port"):
        rig.open()


def test_a_peer_without_an_address_is_tried_at_the_configured_port_of_its_host() -> None:
    library = StandIn()
    declaration = declare(library)
    with Side(declaration) as there:
        port = published(there).port
        there.publish(None)
        snapshot = there.segment.snapshot
        with Side(declaration, remote_port=port) as here:
            there.segment._snapshot = _renamed(snapshot)  # type: ignore[attr-defined]
            source = here.register(np.full(64, 7, np.uint8))
            target = there.register(np.zeros(64, np.uint8))
            endpoint = here.connect(there)
            assert write(endpoint, source, target).wait().status.tolist() == [Status.COMPLETED]
            endpoint.close("done")


def _renamed(snapshot: Any) -> Any:
    return replace(snapshot, name="127.0.0.1:1")


def test_loopback_of_another_machine_is_no_candidate(rig: Rig) -> None:
    snapshot = rig.there.segment.snapshot
    elsewhere = replace(snapshot, host=replace(snapshot.host, boot_id="another"))
    rig.there.segment._snapshot = elsewhere  # type: ignore[attr-defined]
    with pytest.raises(Unreachable, match=r"loopback.*advertise_host"):
        rig.open()


def test_a_peer_that_never_answers_fails_in_time_and_is_not_connected_to() -> None:
    with Rig(connect_timeout=0.2) as rig:
        source, target = rig.pair()
        endpoint = rig.open()

        class Silent:
            """A peer whose engine does not answer, as that of a stopped process."""

            key = rig.there.segment.snapshot.key
            segment = rig.there.segment.snapshot

            def bootstrap(self, payload: bytes, timeout: float) -> bytes:
                threading.Event().wait(timeout)
                raise TransportError(f"no answer within {timeout} s")

            def suspect(self, cause: Exception) -> None: ...

        endpoint._peer = Silent()  # type: ignore[attr-defined]
        work = write(endpoint, source, target).wait()
        assert work.status.tolist() == [Status.INITIAL]  # nothing was started: another may carry it
        assert "no answer" in str(work.cause_of(0))
        assert rig.calls("connect") == 0


def test_a_port_at_which_nobody_accepts_is_found_before_the_library_blocks_on_it(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    rig.there.publish(b"v1:127.0.0.1:%d" % port)
    source, target = rig.pair()
    work = write(rig.open(), source, target).wait()
    assert f"nobody answers at 127.0.0.1:{port}" in str(work.cause_of(0))
    assert rig.calls("connect") == 0


# ---------------------------------------------------------------- connections and keys


def test_the_first_transfer_connects_and_asks_for_keys_and_the_next_do_neither(rig: Rig) -> None:
    source, target = rig.pair()
    endpoint = rig.open()
    for _ in range(3):
        assert write(endpoint, source, target).wait().status.tolist() == [Status.COMPLETED]
    assert np.array_equal(rig.content(rig.there, target), rig.content(rig.here, source))
    assert (rig.calls("connect"), rig.calls("query_remote_buffers")) == (1, 1)


def test_32_threads_that_come_first_make_one_connection_and_one_query(rig: Rig) -> None:
    source, target = rig.pair()
    endpoint = rig.open()

    def transfer_once() -> None:
        assert write(endpoint, source, target).wait(20).status.tolist() == [Status.COMPLETED]

    assert at_once(32, transfer_once) == []
    assert (rig.calls("connect"), rig.calls("query_remote_buffers")) == (1, 1)


def test_a_query_that_failed_is_made_again_over_the_connection_that_there_is(rig: Rig) -> None:
    source, target = rig.pair()
    endpoint = rig.open()
    rig.library.plan("query_remote_buffers", -4)
    refused = write(endpoint, source, target).wait()
    assert refused.status.tolist() == [Status.INITIAL]
    assert "query the memory of" in str(refused.cause_of(0))
    assert write(endpoint, source, target).wait().status.tolist() == [Status.COMPLETED]
    assert (rig.calls("connect"), rig.calls("query_remote_buffers")) == (1, 2)


def test_a_connect_that_failed_is_made_again(rig: Rig) -> None:
    source, target = rig.pair()
    endpoint = rig.open()
    rig.library.plan("connect", -4)
    refused = write(endpoint, source, target).wait()
    assert "-4 (connection)" in str(refused.cause_of(0))
    assert write(endpoint, source, target).wait().status.tolist() == [Status.COMPLETED]


def test_keys_are_fetched_anew_when_the_peer_registers_memory(rig: Rig) -> None:
    source, target = rig.pair()
    endpoint = rig.open()
    write(endpoint, source, target).wait()
    more = rig.there.register(np.zeros(4 * KIB, np.uint8))
    assert write(endpoint, source, more).wait().status.tolist() == [Status.COMPLETED]
    assert write(endpoint, source, target).wait().status.tolist() == [Status.COMPLETED]
    assert (rig.calls("connect"), rig.calls("query_remote_buffers")) == (1, 2)


def test_keys_are_asked_for_where_the_connection_was_made_to_whatever_is_advertised_since(
    rig: Rig,
) -> None:
    source, target = rig.pair()
    endpoint = rig.open()
    write(endpoint, source, target).wait()
    rig.there.publish(b"v1:127.0.0.1:1")
    more = rig.there.register(np.zeros(4 * KIB, np.uint8))
    assert write(endpoint, source, more).wait().status.tolist() == [Status.COMPLETED]
    assert (rig.calls("connect"), rig.calls("query_remote_buffers")) == (1, 2)


def test_keys_are_not_fetched_anew_when_the_peer_unregisters_memory(rig: Rig) -> None:
    source, target = rig.pair()
    other = rig.there.register(np.zeros(4 * KIB, np.uint8))
    endpoint = rig.open()
    write(endpoint, source, target).wait()
    rig.there.unregister(other)
    assert write(endpoint, source, target).wait().status.tolist() == [Status.COMPLETED]
    assert rig.calls("query_remote_buffers") == 1


def test_keys_are_fetched_anew_when_the_same_address_is_registered_again(rig: Rig) -> None:
    source, target = rig.pair()
    endpoint = rig.open()
    write(endpoint, source, target).wait()
    array = rig.content(rig.there, target)
    rig.there.unregister(target)
    array[:] = 0
    again = rig.there.register(array)
    assert (again.id, again.address) == (target.id, target.address)
    assert write(endpoint, source, again).wait().status.tolist() == [Status.COMPLETED]
    assert np.array_equal(array, rig.content(rig.here, source))
    assert rig.calls("query_remote_buffers") == 2


def test_a_range_that_the_peer_does_not_show_is_refused(rig: Rig) -> None:
    source, target = rig.pair()
    endpoint = rig.open()
    rig.library.plan("publish_buffer", -3)
    hidden = rig.there.register(np.zeros(4 * KIB, np.uint8))
    work = write(endpoint, source, hidden).wait()
    assert work.status.tolist() == [Status.INITIAL]
    assert "does not show buffer" in str(work.cause_of(0))
    assert write(endpoint, source, target).wait().status.tolist() == [Status.COMPLETED]


def test_closing_and_opening_again_uses_the_connection_and_its_keys(rig: Rig) -> None:
    source, target = rig.pair()
    for _ in range(3):
        endpoint = rig.open()
        assert write(endpoint, source, target).wait().status.tolist() == [Status.COMPLETED]
        endpoint.close("closed")
        rig.there.transport.release(rig.here.segment.snapshot.key, "it went")
    assert (rig.calls("connect"), rig.calls("query_remote_buffers")) == (1, 1)
    assert rig.library.leaked == 0


def test_a_connection_whose_transfers_keep_failing_is_given_up_for_a_new_host_id(rig: Rig) -> None:
    source, target = rig.pair()
    endpoint = rig.open()
    write(endpoint, source, target).wait()
    rig.library.plan("transfer", -5, -5, -5)
    for _ in range(3):
        assert write(endpoint, source, target).wait().status.tolist() == [Status.FAILED]
    assert write(endpoint, source, target).wait().status.tolist() == [Status.COMPLETED]
    assert rig.calls("connect") == 2
    assert rig.library.leaked == 0  # a new host id, so that no record was replaced
    assert rig.here.transport.holdings()["retained_connections"] == 1
    assert rig.there.transport.holdings()["retained_connections"] == 1


def test_a_failure_between_successes_gives_nothing_up(rig: Rig) -> None:
    source, target = rig.pair()
    endpoint = rig.open()
    for _ in range(4):
        rig.library.plan("transfer", -5, 0)
        assert write(endpoint, source, target).wait().status.tolist() == [Status.FAILED]
        assert write(endpoint, source, target).wait().status.tolist() == [Status.COMPLETED]
    assert rig.calls("connect") == 1


# ---------------------------------------------------------------- transfers


@pytest.mark.parametrize("opcode", [Opcode.WRITE, Opcode.READ])
def test_a_write_is_a_put_and_a_read_is_a_get(rig: Rig, opcode: Opcode) -> None:
    ours, theirs = rig.pair()
    rig.content(rig.there, theirs)[:] = 9
    transfer(rig.open(), opcode, ours, theirs).wait()
    calls = {"put_async": 1, "get_async": 0} if opcode is Opcode.WRITE else {"get_async": 1}
    for name, count in calls.items():
        assert rig.calls(name) == count
    assert np.array_equal(rig.content(rig.here, ours), rig.content(rig.there, theirs))


def test_short_and_failed_transfers_fail_with_what_the_library_said(rig: Rig) -> None:
    source, target = rig.pair()
    endpoint = rig.open()
    write(endpoint, source, target).wait()
    rig.library.plan("transfer", -5, 100)
    failed = write(endpoint, source, target)
    assert "-5 (transfer)" in str(failed.wait().cause_of(0))
    short = write(endpoint, source, target)
    assert "100 of 4096 bytes" in str(short.wait().cause_of(0))
    assert failed.work.status.tolist() == short.work.status.tolist() == [Status.FAILED]
    assert failed.finished == short.finished == 1


def test_permissions_reach_the_library_as_far_as_it_has_any(rig: Rig) -> None:
    rig.there.register(np.zeros(64, np.uint8), permission=Permission.LOCAL_READ_WRITE)
    assert (rig.calls("register_memory"), rig.calls("publish_buffer")) == (1, 0)


def released(library: StandIn) -> Counter[int]:
    """How often each handle that was ever given out was released."""
    total = library.calls["put_async"] + library.calls["get_async"]
    return Counter({handle: library.released[handle] for handle in range(1, total + 1)})


def test_a_peer_that_departs_ends_what_is_under_way_and_memory_stays_until_it_is_let_go_of() -> (
    None
):
    with Rig() as rig:
        source, target = rig.pair()
        endpoint = rig.open()
        write(endpoint, source, target).wait()
        rig.library.hold()
        under_way = write(endpoint, source, target)
        wait_until(lambda: rig.calls("put_async") == 2)
        endpoint.close("the peer departed")
        work = under_way.wait()
        assert work.status.tolist() == [Status.FAILED]
        assert work.unfenced
        assert "the peer departed" in str(work.cause_of(0))
        with pytest.raises(TransportError, match="under way that use buffer"):
            rig.here.transport.remove_buffer(source, 0.05)
        assert released(rig.library)[2] == 0
        rig.library.let_go()
        rig.here.unregister(source)
        assert under_way.finished == 1
        assert set(released(rig.library).values()) == {1}
        assert rig.here.transport.holdings()["under_way"] == 0


def test_stopping_with_transfers_in_flight_ends_them_and_releases_each_handle_once() -> None:
    with Rig() as rig:
        source, target = rig.pair()
        endpoint = rig.open()
        write(endpoint, source, target).wait()
        rig.library.hold()
        under_way = [write(endpoint, source, target) for _ in range(5)]
        wait_until(lambda: rig.calls("put_async") == 6)
        rig.here.transport.stop()
        for each in under_way:
            assert each.wait().status.tolist() == [Status.FAILED]
            assert each.finished == 1
        assert set(released(rig.library).values()) == {1}
        assert rig.library.instances[0].transfers == 0


def test_past_its_deadline_a_transfer_is_a_timeout_and_is_still_held() -> None:
    with Rig() as rig:
        source, target = rig.pair()
        endpoint = rig.open()
        write(endpoint, source, target).wait()
        rig.library.hold()
        late = Submitted(endpoint, Opcode.WRITE, [(source, 0, target, 0, 64)], timeout=0.1)
        assert late.wait().status.tolist() == [Status.TIMEOUT]
        assert late.work.unfenced
        assert rig.here.transport.holdings()["under_way"] == 1


def test_nothing_can_be_submitted_after_the_end(rig: Rig) -> None:
    source, target = rig.pair()
    endpoint = rig.open()
    write(endpoint, source, target).wait()
    endpoint.close("closed")
    work = write(endpoint, source, target).wait()
    assert work.status.tolist() == [Status.INITIAL]
    assert "was closed" in str(work.cause_of(0))


# ---------------------------------------------------------------- what cannot be freed


def gone(rig: Rig, endpoint: Any) -> None:
    endpoint.close("it went")
    rig.there.transport.release(rig.here.segment.snapshot.key, "it went")


def nothing_retained(side: Side) -> None:
    wait_until(lambda: side.transport.holdings()["retained_connections"] == 0)


def test_what_departed_peers_leave_is_counted_at_both_sides(rig: Rig) -> None:
    source, target = rig.pair()
    endpoint = rig.open()
    write(endpoint, source, target).wait()
    held = [side.transport.holdings() for side in (rig.here, rig.there)]
    assert held[0]["outgoing_connections"] == held[1]["incoming_connections"] == 1
    assert held[0]["retained_connections"] == held[1]["retained_connections"] == 0
    gone(rig, endpoint)
    for side in (rig.here, rig.there):
        assert side.transport.holdings()["retained_connections"] == 1


def test_past_the_cap_the_library_is_made_anew_and_everything_goes_on() -> None:
    with Rig(max_retained=0) as rig:
        source, target = rig.pair()
        for lives in (1, 2, 3):
            endpoint = rig.open()
            assert write(endpoint, source, target).wait().status.tolist() == [Status.COMPLETED]
            gone(rig, endpoint)
            for side in (rig.here, rig.there):
                nothing_retained(side)
            assert len(rig.library.instances) == 2 * (lives + 1)
        assert rig.library.leaked == 0


def test_it_is_not_made_anew_while_a_transfer_is_under_way_or_a_peer_is_there() -> None:
    with Rig(max_retained=0) as rig:
        source, target = rig.pair()
        endpoint = rig.open()
        write(endpoint, source, target).wait()
        rig.library.hold()
        write(endpoint, source, target)
        wait_until(lambda: rig.calls("put_async") == 2)
        endpoint.close("it went")
        assert rig.here.transport.holdings()["retained_connections"] == 1
        assert rig.there.transport.holdings()["incoming_connections"] == 1
        assert len(rig.library.instances) == 2
        rig.library.let_go()
        wait_until(lambda: rig.here.transport.holdings()["retained_connections"] == 0)
        assert len(rig.library.instances) == 3


def test_when_it_cannot_be_made_anew_work_is_refused_at_once_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tent_mpcomm.transport._REPLACE_PAUSE_S", 0.0)
    with Rig() as rig:
        rig.here.transport._usage._most = 0  # type: ignore[attr-defined]
        source, target = rig.pair()
        endpoint = rig.open()
        write(endpoint, source, target).wait()
        rig.library.plan("init", -1, -1, -1)
        gone(rig, endpoint)
        wait_until(lambda: rig.here.transport.obstacle != "")  # type: ignore[attr-defined]
        assert "mpcomm" not in rig.here.segment.snapshot.attributes
        work = write(rig.open(), source, target).wait()
        assert work.status.tolist() == [Status.INITIAL]
        assert "could not be made anew here" in str(work.cause_of(0))
        with pytest.raises(TransportError, match=r"-1 \(device\)"):
            rig.here.transport.bootstrap(rig.there.segment.snapshot.key, b"0" * 16 + b".0")
        rig.here.unregister(source)
        assert rig.here.transport.add_buffers([source]) == [None]


def test_a_peer_whose_library_was_made_anew_is_connected_under_a_new_host_id(rig: Rig) -> None:
    source, target = rig.pair()
    endpoint = rig.open()
    write(endpoint, source, target).wait()
    endpoint.close("idle")
    rig.there.transport.instance.life = "0" * 16  # type: ignore[attr-defined]
    assert write(rig.open(), source, target).wait().status.tolist() == [Status.COMPLETED]
    assert rig.calls("connect") == 2
    assert rig.library.leaked == 0


def test_a_greeting_from_outside_is_checked(rig: Rig) -> None:
    for payload in (b"", b"hello", b"0" * 16, b"0" * 16 + b".x", b"\xff" * 80):
        with pytest.raises(TransportError, match="no greeting"):
            rig.there.transport.bootstrap(rig.here.segment.snapshot.key, payload)


def test_who_does_not_wait_is_carried_by_the_instance_that_is_just_being_made() -> None:
    with Rig(max_retained=0) as rig:
        source, target = rig.pair()
        endpoint = rig.open()
        write(endpoint, source, target).wait()
        with rig.here.transport._turn:  # type: ignore[attr-defined]  # which replacing it takes
            gone(rig, endpoint)
            work = write(rig.open(), source, target)
            assert not work.work.finished
        assert work.wait().status.tolist() == [Status.COMPLETED], work.work.cause_of(0)
