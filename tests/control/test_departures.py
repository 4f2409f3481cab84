"""How peers go, and who still counts as holding memory: killed, stopped, cut off, replaced."""

from __future__ import annotations

import gc
import signal
import socket
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
from control_harness import (
    HANG_S,
    Control,
    Listener,
    Peers,
    Process,
    Side,
    behind_proxy,
    buffer,
    side,
    wait_until,
)

from tent_core.control.contract import SessionState
from tent_core.control.link import LinkState
from tent_core.errors import PeerDeparted, TransportError, UnknownSegment
from tent_core.testing.leaks import nothing_stays_behind

SHORT = Peers(grace_s=0.5)
OPENER = """
me = Side(peers=Peers(grace_s=0.5))
listener = Listener()
connection = me.connect({name!r}, listener)
"""


def reasons(it: Side) -> list[str]:
    return [reason for _, reason in it.handler.departed]


# -------------------------------------------------------------------- the end of processes


def test_a_killed_opener_departs_at_once_and_holds_nothing() -> None:
    # The grace is long: only its process can tell.
    with side(peers=Peers(grace_s=60)) as it, Process(OPENER.format(name=it.name)) as opener:
        version = it.publish(buffer(1))
        assert len(it.behind(version)) == 1
        opener.kill()
        assert it.plane.wait_acknowledged(version, lambda _: True, HANG_S) == []
        wait_until(lambda: reasons(it))
        assert reasons(it) == [f"its process {opener.pid} ended"]


def test_a_killed_peer_departs_at_once_from_those_who_opened_it() -> None:
    listener = Listener()
    with side(peers=Peers(grace_s=60)) as it, Process() as peer:
        connection = it.connect(peer.ask("me.name"), listener)
        peer.kill()
        wait_until(lambda: listener.reasons)
        assert listener.reasons == [f"its process {peer.pid} ended"]
        with pytest.raises(PeerDeparted, match="process"):
            connection.notify("n", b"", 5)
        started = time.monotonic()
        connection.close()  # owes nobody a goodbye
        assert time.monotonic() - started < HANG_S / 2


def test_an_engine_that_ends_unheard_in_a_process_that_lives_on_departs_soon() -> None:
    listener = Listener()
    with side(peers=Peers(grace_s=60)) as it, Process() as peer:
        it.connect(peer.ask("me.name"), listener)
        peer.run("me.plane._server._farewell = lambda session: None; me.stop()")
        wait_until(lambda: listener.reasons, HANG_S)
        assert "nobody listens at its address any more" in listener.reasons[0]


def test_a_process_that_ends_orderly_without_closing_departs_too() -> None:
    listener = Listener()
    with side() as it, Process() as peer:
        it.connect(peer.ask("me.name"), listener)
        with pytest.raises(EOFError):
            peer.run("os._exit(0)")
        wait_until(lambda: listener.reasons)


# -------------------------------------------------------------------- stopped processes


def test_a_stopped_opener_departs_after_its_grace_holds_on_and_lets_go_after_it_goes_on() -> None:
    with side(peers=SHORT) as it, Process(OPENER.format(name=it.name)) as opener:
        version = it.publish(buffer(1))
        wait_until(lambda: opener.ask("len(listener.updates)") == 1)
        opener.signal(signal.SIGSTOP)
        wait_until(lambda: reasons(it))
        assert "did not come back within 0.5 s" in reasons(it)[0]
        (holder,) = it.plane.unacknowledged(version, lambda _: True)
        assert holder.state is SessionState.DEPARTED
        assert it.plane.wait_acknowledged(version, lambda _: True, 0.5) != []

        opener.signal(signal.SIGCONT)
        wait_until(lambda: opener.ask("listener.reasons"))
        (told,) = opener.ask("listener.reasons")
        assert "forgotten" in told
        assert "did not come back" in told
        assert len(it.behind(version)) == 1  # its engine has not let go yet
        opener.run("connection.close('let go')")
        assert it.plane.wait_acknowledged(version, lambda _: True, HANG_S) == []
        assert it.plane.sessions() == []
        assert len(reasons(it)) == 1


def test_a_stopped_opener_that_is_killed_holds_no_longer() -> None:
    with side(peers=SHORT) as it, Process(OPENER.format(name=it.name)) as opener:
        version = it.publish(buffer(1))
        opener.signal(signal.SIGSTOP)
        wait_until(lambda: reasons(it))
        assert len(it.behind(version)) == 1
        opener.kill()
        assert it.plane.wait_acknowledged(version, lambda _: True, HANG_S) == []


def test_an_opener_stopped_for_less_than_the_grace_is_kept() -> None:
    with side() as it, Process(OPENER.format(name=it.name)) as opener:
        opener.signal(signal.SIGSTOP)
        wait_until(lambda: it.plane.sessions()[0].state is SessionState.BROKEN)
        opener.signal(signal.SIGCONT)
        wait_until(lambda: it.plane.sessions()[0].state is SessionState.OPEN)
        opener.run("connection.notify('back', b'', 10)")
        assert it.handler.notes[0].name == "back"
        assert reasons(it) == []
        assert opener.ask("listener.reasons") == []


def test_a_stopped_peer_departs_and_can_be_opened_again_when_it_goes_on() -> None:
    listener = Listener()
    with side(peers=SHORT) as it, Process("me = Side(peers=Peers(grace_s=0.5))") as peer:
        name = peer.ask("me.name")
        connection = it.connect(name, listener)
        peer.signal(signal.SIGSTOP)
        wait_until(lambda: listener.reasons)
        assert "did not come back within 0.5 s" in listener.reasons[0]
        connection.close("let go")  # cannot be delivered yet
        with pytest.raises(UnknownSegment):
            it.connect(name, timeout=0.5)
        peer.signal(signal.SIGCONT)
        wait_until(lambda: peer.ask("len(me.plane.sessions())") == 0)  # the goodbye has arrived
        it.connect(name).notify("again", b"", 5)
        assert peer.ask("[n.name for n in me.handler.notes]") == ["again"]


# -------------------------------------------------------------------- a bad network


def test_a_cut_shorter_than_the_grace_is_no_departure_and_costs_no_notification() -> None:
    listener = Listener()
    with behind_proxy() as (it, proxy), side() as other:
        connection = other.connect(it.name, listener)
        session = connection.session
        for round_ in range(3):
            proxy.cut()
            wait_until(lambda: connection.state is LinkState.BROKEN)
            version = it.publish(buffer(round_))
            proxy.heal()
            connection.notify(f"n{round_}", b"", HANG_S)
            wait_until(lambda v=version: connection.descriptor.version == v)
            connection.acknowledge(version)
            assert it.plane.wait_acknowledged(version, lambda _: True, HANG_S) == []
        assert [n.name for n in it.handler.notes] == ["n0", "n1", "n2"]
        assert connection.session == session
        assert len(it.handler.opened) == 1
        assert (reasons(it), listener.reasons) == ([], [])


def test_an_acknowledgement_given_during_a_cut_arrives_after_it() -> None:
    with behind_proxy() as (it, proxy), side() as other:
        connection = other.connect(it.name)
        version = it.publish(buffer(1))
        wait_until(lambda: connection.descriptor.version == version)
        proxy.cut()
        wait_until(lambda: connection.state is LinkState.BROKEN)
        connection.acknowledge(version)
        assert it.plane.wait_acknowledged(version, lambda _: True, 0.2) != []
        proxy.heal()
        assert it.plane.wait_acknowledged(version, lambda _: True, HANG_S) == []


def test_each_engine_of_a_process_has_a_connection_of_its_own() -> None:
    with behind_proxy() as (it, proxy), side() as one, side() as other:
        one.connect(it.name)
        other.connect(it.name)
        assert len(proxy._pairs) == 2


def test_a_cut_longer_than_the_grace_is_a_departure_on_both_sides_once() -> None:
    listener = Listener()
    with behind_proxy(SHORT) as (it, proxy), side(peers=SHORT) as other:
        connection = other.connect(it.name, listener)
        proxy.cut()
        wait_until(lambda: reasons(it) and listener.reasons)
        assert "did not come back within 0.5 s" in reasons(it)[0]
        assert "did not come back within 0.5 s" in listener.reasons[0]
        connection.close()
        proxy.heal()
        wait_until(
            lambda: it.plane.sessions() == []
        )  # the goodbye came through when the network did
        other.connect(it.name).notify("again", b"", 5)
        assert (len(reasons(it)), len(listener.reasons)) == (1, 1)


def test_a_connection_over_which_nothing_comes_is_found_by_keepalive() -> None:
    listener = Listener()
    with behind_proxy(SHORT) as (it, proxy), side(peers=SHORT) as other:
        connection = other.connect(it.name, listener)
        proxy.stall()
        wait_until(lambda: connection.state is not LinkState.UP)
        wait_until(lambda: reasons(it) and listener.reasons)
        connection.close()
        proxy.heal()


def test_a_stall_in_mid_notification_delivers_it_once() -> None:
    with behind_proxy() as (it, proxy), side(Control(call_timeout_s=0.5)) as other:
        connection = other.connect(it.name)
        proxy.stall()
        wait_until(lambda: connection.state is LinkState.BROKEN)
        proxy.heal()
        connection.notify("once", b"", HANG_S)
        connection.notify("after", b"", HANG_S)
        assert [n.name for n in it.handler.notes] == ["once", "after"]


def test_a_suspected_peer_that_is_there_stays_and_one_that_is_not_breaks_now() -> None:
    patient = Control(keepalive_time_s=60, keepalive_timeout_s=0.3)
    with behind_proxy() as (it, proxy), side(patient) as other:
        connection = other.connect(it.name)
        connection.suspect(RuntimeError("a stream broke"))
        connection.notify("there", b"", 5)
        assert connection.state is LinkState.UP
        proxy.stall()
        connection.suspect(RuntimeError("a stream broke"))
        wait_until(lambda: connection.state is LinkState.BROKEN)
        proxy.cut()
        proxy.heal()
        wait_until(lambda: connection.state is LinkState.UP)


# -------------------------------------------------------------------- other incarnations


def restarted(first: Side, listener: Listener) -> Side:
    """An engine on the port of `first`, which has gone without a word."""
    assert listener.reasons == []
    name = first.name
    first.plane._server._streams.clear()  # it says no farewell
    first.stop()
    return Side(Control(listen=name))


def test_another_incarnation_under_a_name_is_a_departure_of_the_old_one() -> None:
    listener = Listener()
    with side() as it:
        first = Side()
        old = it.connect(first.name, listener)
        second = restarted(first, listener)
        try:
            wait_until(lambda: listener.reasons)
            assert listener.reasons == ["another incarnation answers under its name"]
            with pytest.raises(PeerDeparted, match="another incarnation"):
                old.notify("n", b"", 5)
            new = it.connect(second.name)
            assert new.key == second.key
            assert new.key.name == old.key.name
            old.close()
            new.notify("n", b"", 5)
            assert second.handler.notes[0].name == "n"
        finally:
            second.stop()


def test_an_incarnation_that_opens_us_departs_the_one_that_we_had_opened() -> None:
    listener = Listener()
    with behind_proxy(Peers(grace_s=60)) as (first, proxy), side(peers=Peers(grace_s=60)) as it:
        it.connect(first.name, listener)
        proxy.stall()
        with side(Control(advertise=first.name)) as second:
            second.connect(it.name)
            wait_until(lambda: listener.reasons)
            assert "another incarnation appeared under its name" in listener.reasons[0]


def test_an_incarnation_that_we_open_departs_the_one_that_had_opened_us() -> None:
    port = free_port()
    with side() as it, side(Control(advertise=f"127.0.0.1:{port}")) as first:
        first.connect(it.name)
        with side(Control(listen=f"127.0.0.1:{port}")) as second:
            it.connect(second.name)
            wait_until(lambda: reasons(it))
            assert "another incarnation answers under its name" in reasons(it)[0]


def test_an_opener_that_comes_again_under_its_name_departs_its_old_self() -> None:
    port = free_port()
    advertised = Control(advertise=f"127.0.0.1:{port}")
    with side() as it, side(advertised) as first, side(advertised) as second:
        listener = Listener()
        first.connect(it.name, listener)
        second.connect(it.name)
        wait_until(lambda: listener.reasons)
        assert "another incarnation of it" in reasons(it)[0]
        assert "another incarnation of it" in listener.reasons[0]
        assert [i.key for i in it.plane.sessions() if i.state is SessionState.OPEN] == [second.key]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


# -------------------------------------------------------------------- what stays


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage collector, which would hide what only it lets go of."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_a_closed_connection_is_gone_at_once_with_its_snapshots() -> None:
    with side() as it, side() as other:
        other.connect(it.name).close()
        connection = other.connect(it.name)
        it.handler.answer = "never"
        with pytest.raises(TransportError):
            connection.bootstrap("tcp", 7, b"", 0.05)
        traces = [
            weakref.ref(connection),
            weakref.ref(connection._follower),
            weakref.ref(connection._channel),
        ]
        connection.close()
        del connection
        wait_until(lambda: [t() for t in traces] == [None] * 3)


@pytest.mark.usefixtures("uncollected")
def test_a_connection_to_a_killed_peer_is_gone_when_it_is_closed() -> None:
    listener = Listener()
    with side() as it, Process() as peer:
        connection = it.connect(peer.ask("me.name"), listener)
        traces = [
            weakref.ref(connection),
            weakref.ref(connection._follower),
            weakref.ref(connection._channel),
        ]
        peer.kill()
        wait_until(lambda: listener.reasons)
        connection.close()
        del connection
        wait_until(lambda: [t() for t in traces] == [None] * 3)


def test_peers_that_come_and_go_leave_no_descriptor_and_no_session() -> None:
    with side() as it, Process("pass") as peer:
        visit = f"me = Side(); me.connect({it.name!r}).notify('n', b'', 5); me.stop()"
        peer.run(visit)
        it.connect(peer.run("me = Side()", "me.name")).close()
        with nothing_stays_behind():
            for _ in range(20):
                peer.run(visit)
                connection = it.connect(peer.run("me = Side()", "me.name"))
                peer.run("me.stop()")
                connection.close()
        assert it.plane.sessions() == []
        server = it.plane._server
        assert (server._sent, server._streams, server._processes) == ({}, {}, {})


# -------------------------------------------------------------------- the end


def bounded(what: Callable[[], object]) -> None:
    started = time.monotonic()
    what()
    assert time.monotonic() - started < HANG_S


def test_an_engine_ends_in_bounded_time_though_its_peers_are_stopped() -> None:
    with Process("me = Side()") as peer:
        it = Side()
        it.connect(peer.ask("me.name"))
        peer.run(f"connection = me.connect({it.name!r})")
        peer.signal(signal.SIGSTOP)
        bounded(lambda: it.plane.stop(1.0))


def test_an_engine_ends_in_bounded_time_though_goodbyes_are_owed() -> None:
    with Process("me = Side()") as peer:
        it = Side(peers=SHORT)
        listener = Listener()
        connection = it.connect(peer.ask("me.name"), listener)
        peer.signal(signal.SIGSTOP)
        wait_until(lambda: listener.reasons)
        connection.close()
        bounded(lambda: it.plane.stop(1.0))
