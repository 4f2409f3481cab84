"""Who waits for room, whom the engine asks to make it, and how newcomers and idle peers see that."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from control_harness import HANG_S, Listener, Peers, Side, behind_proxy, side, wait_until
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tent_core.control import tent_pb2 as pb
from tent_core.control.connection import Connection
from tent_core.control.options import grpc
from tent_core.control.pressure import (
    AGAIN_S,
    ANSWER_S,
    ASKED_AT_ONCE,
    HELD_MOST_S,
    HELD_SHARE,
    Place,
    Pressure,
)
from tent_core.control.use import SLACK_S, Use
from tent_core.descriptor import PeerKey
from tent_core.errors import ClosedError, PeerRefused, TentError, TransportError

# -------------------------------------------------------------------- the line


def test_those_who_wait_are_served_in_the_order_in_which_they_came() -> None:
    line = Pressure(10)
    assert line.is_next(None)
    first, second = line.arrive(0, 5), line.arrive(1, 5)
    assert first is not None
    assert second is not None
    assert [line.is_next(place) for place in (first, second, None)] == [True, False, False]
    line.leave(first)
    assert [line.is_next(place) for place in (second, None)] == [True, False]
    line.leave(second)
    assert line.is_next(None)


def test_nobody_waits_longer_than_their_own_time_allows() -> None:
    line = Pressure(10)
    assert line.arrive(100, 5) == Place(1, 100 + 5 * HELD_SHARE)
    assert line.arrive(100, 1e9) == Place(2, 100 + HELD_MOST_S)
    assert line.arrive(100, None) == Place(3, 100 + HELD_MOST_S)


def test_beyond_the_most_nobody_waits() -> None:
    line = Pressure(2)
    first, _ = line.arrive(0, 5), line.arrive(0, 5)
    assert line.arrive(0, 5) is None
    assert first is not None
    line.leave(first)
    assert line.arrive(0, 5) is not None


def test_nobody_is_asked_while_nobody_waits() -> None:
    assert Pressure(10).ask(0, {1: -100.0}) == []


def test_as_many_are_asked_as_wait_and_the_longest_idle_first() -> None:
    line = Pressure(10)
    line.arrive(0, 5)
    line.arrive(0, 5)
    idle = {1: -5.0, 2: -50.0, 3: -20.0, 4: -1.0}
    assert line.ask(0, idle) == [2, 3]
    assert line.ask(ANSWER_S / 2, idle) == []


def test_one_that_does_not_answer_is_passed_over_and_asked_again_later() -> None:
    line = Pressure(10)
    line.arrive(0, 60)
    idle = {1: -5.0, 2: -50.0}
    assert line.ask(0, idle) == [2]
    assert line.ask(ANSWER_S, idle) == [1]
    assert line.ask(2 * ANSWER_S, idle) == []
    assert line.ask(AGAIN_S, idle) == [2]


def test_one_that_found_a_use_may_be_asked_when_it_is_idle_again() -> None:
    line = Pressure(10)
    line.arrive(0, 60)
    assert line.ask(0, {1: -5.0}) == [1]
    assert line.ask(0.1, {}) == []
    assert line.ask(0.2, {1: 0.1}) == [1]


class Model(RuleBasedStateMachine):
    """Whatever happens: order, bounds, and never more asked than needed, nor anyone who is in use."""

    MOST = 12

    def __init__(self) -> None:
        super().__init__()
        self.it = Pressure(self.MOST)
        self.now = 0.0
        self.line: list[Place] = []
        self.idle: dict[int, float] = {}
        self.asked: dict[int, float] = {}
        self.next_session = 1

    @rule(within=st.one_of(st.none(), st.floats(0.01, 100)))
    def arrive(self, within: float | None) -> None:
        place = self.it.arrive(self.now, within)
        assert (place is None) == (len(self.line) == self.MOST)
        if place is not None:
            assert self.now < place.until <= self.now + min(HELD_MOST_S, within or HELD_MOST_S)
            self.line.append(place)

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.line))
        self.line.remove(place)
        self.it.leave(place)

    @rule(seconds=st.sampled_from([0.1, ANSWER_S, AGAIN_S]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(ago=st.floats(0, 100))
    def becomes_idle(self, ago: float) -> None:
        self.idle[self.next_session] = self.now - ago
        self.next_session += 1

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def goes_or_is_used(self, data: st.DataObject) -> None:
        del self.idle[data.draw(st.sampled_from(sorted(self.idle)))]

    @rule()
    def ask(self) -> None:
        chosen = self.it.ask(self.now, self.idle)
        self.asked = {s: at for s, at in self.asked.items() if s in self.idle}
        awaited = {s for s, at in self.asked.items() if self.now - at < ANSWER_S}
        free = {s for s in self.idle if self.now - self.asked.get(s, -1e9) >= AGAIN_S}
        wanted = max(0, min(len(self.line), ASKED_AT_ONCE) - len(awaited))
        assert len(chosen) == len(set(chosen)) == min(wanted, len(free))
        assert set(chosen) <= free
        assert not set(chosen) & awaited
        passed_over = [self.idle[s] for s in free - set(chosen)]
        assert max((self.idle[s] for s in chosen), default=-1e9) <= min(passed_over, default=1e9)
        self.asked.update(dict.fromkeys(chosen, self.now))

    @invariant()
    def only_the_first_in_line_is_next(self) -> None:
        assert [p for p in self.line if self.it.is_next(p)] == self.line[:1]
        assert self.it.is_next(None) == (not self.line)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# -------------------------------------------------------------------- what is told of use


def test_a_peer_is_told_when_it_becomes_idle_and_when_it_is_used_again_and_not_in_between() -> None:
    use = Use()
    reports = [None, 5.0, 5.0, 5.0 + SLACK_S / 2, None, None, 9.0, 30.0]
    assert [use.report(since) for since in reports] == [
        False, True, False, False, True, False, True, True,
    ]  # fmt: skip


def test_what_was_not_told_is_not_forgotten_bit_by_bit() -> None:
    """Many small changes make a large one, which is told."""
    use = Use()
    assert use.report(0.0)
    told = [use.report(i * SLACK_S / 4) for i in range(1, 9)]
    assert told == [False, False, False, True] * 2


# -------------------------------------------------------------------- over the wire


def idle_since(it: Side) -> list[float | None]:
    return [info.idle_since for info in it.plane.sessions()]


def test_a_peer_learns_that_this_side_is_idle_and_that_it_is_not_any_more() -> None:
    with side() as here, side() as there:
        connection = here.connect(there.name)
        assert idle_since(there) == [None]
        connection.report_idle(0.0)
        wait_until(lambda: idle_since(there) != [None])
        connection.report_idle(None)
        wait_until(lambda: idle_since(there) == [None])


def test_nobody_is_idle_for_longer_than_its_session_lasts() -> None:
    before = time.monotonic()
    with side() as here, side() as there:
        here.connect(there.name).report_idle(1e6)
        wait_until(lambda: idle_since(there) != [None])
        (since,) = idle_since(there)
        assert since is not None
        assert before <= since <= time.monotonic()


def test_what_changed_while_the_connection_was_broken_is_told_when_it_is_back() -> None:
    with behind_proxy() as (there, proxy), side() as here:
        connection = here.connect(there.name)
        connection.report_idle(0.0)
        wait_until(lambda: idle_since(there) != [None])
        proxy.cut()
        wait_until(lambda: connection.state.value == "broken")
        connection.report_idle(None)
        proxy.heal()
        wait_until(lambda: idle_since(there) == [None], HANG_S)


class Idler(Listener):
    """Retires when it is asked to, as an idle peer does."""

    connection: Connection

    def asked_to_retire(self) -> None:
        super().asked_to_retire()
        self.connection.close("idle", retired=True)


def retires_when_asked(here: Side, there: Side, idle_s: float | None = 0.0) -> Idler:
    listener = Idler()
    listener.connection = here.connect(there.name, listener)
    listener.connection.report_idle(idle_s)
    return listener


class Newcomer:
    """Connects in a thread of its own and stands in line; `connection` or `error` is what came of it."""

    def __init__(self, here: Side, there: Side, timeout: float = HANG_S) -> None:
        self.connection: Connection | None = None
        self.error: TentError | None = None
        self._here, self._there, self._timeout = here, there, timeout
        self._thread = threading.Thread(target=self._connect)
        waiting = len(there.plane._server._pressure)
        self._thread.start()
        wait_until(lambda: len(there.plane._server._pressure) == waiting + 1)

    def _connect(self) -> None:
        try:
            self.connection = self._here.connect(self._there.name, timeout=self._timeout)
        except TentError as error:
            self.error = error

    def join(self) -> Newcomer:
        self._thread.join(HANG_S)
        return self


@contextlib.contextmanager
def full(*, idle: bool) -> Iterator[tuple[Side, Side, Idler]]:
    """An engine for one peer, that peer, and how it is asked."""
    with side(peers=Peers(max=1)) as small, side() as peer:
        listener = retires_when_asked(peer, small, 0.0 if idle else None)
        if idle:
            wait_until(lambda: idle_since(small) != [None])
        yield small, peer, listener


def test_an_idle_peer_is_asked_to_make_room_and_a_newcomer_is_served() -> None:
    with full(idle=True) as (small, _, listener), side() as newcomer:
        newcomer.connect(small.name, timeout=HANG_S)
        assert listener.asked == 1
        assert [reason for _, reason in small.handler.departed] == ["it retired: idle"]
        assert [info.key for info in small.plane.sessions()] == [newcomer.key]
        assert listener.reasons == []


def test_a_peer_that_becomes_idle_while_others_wait_is_asked() -> None:
    with full(idle=False) as (small, _, listener), side() as newcomer:
        caller = Newcomer(newcomer, small)
        assert listener.asked == 0
        listener.connection.report_idle(0.0)
        assert caller.join().connection is not None


def test_a_peer_that_is_in_use_is_never_asked_and_the_newcomer_is_told_which_limit_it_met() -> None:
    with full(idle=False) as (small, _, listener), side() as newcomer:
        with pytest.raises(PeerRefused, match=r"keeps 1 sessions.*raise peers\.max there; nobody"):
            newcomer.connect(small.name, timeout=1.0)
        assert listener.asked == 0
        assert len(small.plane._server._pressure) == 0


def test_room_goes_to_those_who_wait_in_the_order_in_which_they_came() -> None:
    with full(idle=False) as (small, _, holder), contextlib.ExitStack() as stack:
        sides = [stack.enter_context(side()) for _ in range(4)]
        callers = [Newcomer(it, small) for it in sides]
        before = holder.connection
        for it, caller in zip(sides, callers, strict=True):
            before.close()
            wait_until(lambda it=it: [i.key for i in small.plane.sessions()] == [it.key])
            before = caller.join().connection
        assert [info.key for info in small.handler.opened][1:] == [it.key for it in sides]


def test_one_who_gives_up_leaves_the_line() -> None:
    with full(idle=False) as (small, _, _), side() as newcomer:
        caller = Newcomer(newcomer, small)
        newcomer.stop()
        assert isinstance(caller.join().error, ClosedError)
        wait_until(lambda: len(small.plane._server._pressure) == 0)


def test_who_waits_when_the_engine_closes_is_told_so() -> None:
    with full(idle=False) as (small, _, _), side() as newcomer:
        caller = Newcomer(newcomer, small)
        small.stop()
        assert isinstance(caller.join().error, PeerRefused)
        assert "closing" in str(caller.error)


def test_beyond_those_who_may_wait_newcomers_are_refused_at_once() -> None:
    with full(idle=False) as (small, _, _), side() as waiting, side() as surplus:
        small.plane._server._pressure._most = 1
        caller = Newcomer(waiting, small, 2.0)
        with pytest.raises(PeerRefused, match="1 others wait already"):
            surplus.connect(small.name, timeout=HANG_S)
        assert isinstance(caller.join().error, PeerRefused)


def test_a_peer_that_connects_anew_takes_its_own_place_and_does_not_wait() -> None:
    def introduce(incarnation: bytes) -> pb.ConnectResponse:
        request = pb.ConnectRequest(
            protocol=1, target=small.name, name="10.0.0.1:5", incarnation=incarnation
        )
        with grpc.insecure_channel(small.name) as channel:
            stub = channel.unary_unary("/tent.v1.Control/Connect")
            answer = stub(request.SerializeToString(), timeout=HANG_S)
        return pb.ConnectResponse.FromString(answer)

    with side(peers=Peers(max=1)) as small, side() as newcomer:
        assert introduce(b"a" * 16).accepted.session
        caller = Newcomer(newcomer, small, 2.0)
        assert introduce(b"b" * 16).accepted.session
        assert isinstance(caller.join().error, PeerRefused)


# -------------------------------------------------------------------- what transports lack


class Lacking(TransportError):
    """As a transport that has no room for another peer says it."""

    scarce = True


def test_a_transport_that_lacks_what_an_idle_peer_holds_is_asked_again_when_that_has_retired() -> (
    None
):
    with side() as idle, side() as busy, side() as here, side() as there:
        longest = retires_when_asked(idle, there, 50.0)
        other = retires_when_asked(busy, there, None)
        connection = here.connect(there.name)
        wait_until(lambda: len([s for s in idle_since(there) if s is not None]) == 1)
        handler = there.handler
        answers = handler.bootstrap

        def answer(peer: PeerKey, *message: Any) -> Future[bytes]:
            gone = {info.key for info, _ in handler.departed}
            handler.answer = None if idle.key in gone else Lacking("no room")
            return answers(peer, *message)

        handler.bootstrap = answer  # type: ignore[method-assign]
        assert connection.bootstrap("t", 1, b"abc", HANG_S) == b"cba"
        assert len(handler.bootstraps) == 2
        assert (longest.asked, other.asked) == (1, 0)


def test_without_an_idle_peer_a_lack_is_told_as_it_is() -> None:
    with side() as here, side() as there:
        connection = here.connect(there.name)
        connection.report_idle(50.0)  # who asks is not asked to go
        wait_until(lambda: idle_since(there) != [None])
        there.handler.answer = Lacking("no room")
        with pytest.raises(TransportError, match="no room"):
            connection.bootstrap("t", 1, b"abc", HANG_S)
        assert len(there.handler.bootstraps) == 1
