"""The state machine of sessions, stepped with a clock of its own."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from tent_core.control.contract import SessionState
from tent_core.control.sessions import NOTHING_SENT, Departed, Full, Gone, Opened, Sessions
from tent_core.descriptor import HostIdentity, PeerKey

HERE = HostIdentity("this-boot", 1, 10, 100)
NEIGHBOUR = HostIdentity("this-boot", 1, 20, 200)
ELSEWHERE = HostIdentity("other-boot", 1, 30, 300)
GRACE_S = 10.0


def key(name: str = "a:1", incarnation: int = 1) -> PeerKey:
    return PeerKey(name, bytes([incarnation]) * 16)


def sessions(most: int = 100) -> Sessions:
    return Sessions(HERE, GRACE_S, most, "peers.max", itertools.count(1).__next__)


def watched(it: Sessions, host: HostIdentity = NEIGHBOUR, name: str = "a:1", nonce: int = 1) -> int:
    number, _ = it.connect(0, key(name), nonce, host, {"shm": 3})
    it.watching(number)
    it.sent(number, 1)
    return number


def reasons(events: list[object]) -> list[str]:
    return [e.reason for e in events if isinstance(e, Departed)]


def test_a_peer_that_is_asked_for_again_with_the_same_nonce_has_the_same_session() -> None:
    it = sessions()
    first, events = it.connect(0, key(), 7, NEIGHBOUR, {})
    assert [type(e) for e in events] == [Opened]
    assert it.connect(1, key(), 7, NEIGHBOUR, {}) == (first, [])


def test_a_new_nonce_of_the_same_peer_departs_its_old_session() -> None:
    it = sessions()
    old = watched(it)
    new, events = it.connect(1, key(), 2, NEIGHBOUR, {})
    assert new != old
    assert reasons(events) == ["it connected anew"]
    assert it.get(old) is None


def test_a_new_incarnation_departs_the_old_one_at_once() -> None:
    it = sessions()
    old = watched(it)
    _, events = it.connect(1, key(incarnation=2), 1, NEIGHBOUR, {})
    assert [type(e) for e in events] == [Departed, Opened]
    assert "another incarnation" in reasons(events)[0]
    assert it.get(old) is None


def test_an_incarnation_that_was_met_elsewhere_departs_another_of_its_name() -> None:
    it = sessions()
    watched(it)
    assert it.other_incarnation(key()) == []
    assert it.other_incarnation(key("b:1", 2)) == []
    assert len(reasons(it.other_incarnation(key(incarnation=2)))) == 1


def test_a_lost_stream_that_comes_back_within_the_grace_is_no_departure() -> None:
    it = sessions()
    number = watched(it)
    it.lost(5, number)
    assert it.next_tick() == 15
    assert it.tick(14.9) == []
    it.watching(number)
    assert it.next_tick() is None
    assert it.tick(1000) == []
    assert it.get(number).state is SessionState.OPEN


def test_a_stream_that_does_not_come_back_is_a_departure_once() -> None:
    it = sessions()
    number = watched(it, ELSEWHERE)
    it.lost(5, number)
    assert len(reasons(it.tick(15))) == 1
    assert it.tick(16) == []
    assert "did not come back within 10 s" in it.why_departed(number)


def test_a_session_that_never_watches_departs_as_well() -> None:
    it = sessions()
    it.connect(0, key(), 1, NEIGHBOUR, {})
    assert [type(e) for e in it.tick(10)] == [Departed, Gone]


def test_a_neighbour_that_departed_holds_until_its_goodbye() -> None:
    it = sessions()
    number = watched(it)
    it.lost(0, number)
    assert [type(e) for e in it.tick(10)] == [Departed]
    assert [i.state for i in it.unacknowledged(2)] == [SessionState.DEPARTED]
    assert it.goodbye(number, "") == (True, [Gone(number)])
    assert it.unacknowledged(2) == []
    assert it.goodbye(number, "") == (False, [])


def test_a_neighbour_that_departed_holds_until_its_process_ends() -> None:
    it = sessions()
    number = watched(it)
    it.lost(0, number)
    it.tick(10)
    assert it.process_ended(number) == [Gone(number)]
    assert it.unacknowledged(2) == []


def test_a_peer_on_another_machine_that_departed_holds_nothing() -> None:
    it = sessions()
    number = watched(it, ELSEWHERE)
    it.lost(0, number)
    assert [type(e) for e in it.tick(10)] == [Departed, Gone]
    assert it.unacknowledged(2) == []


def test_the_end_of_a_process_is_a_departure_at_once_and_leaves_no_holder() -> None:
    it = sessions()
    number = watched(it)
    assert [type(e) for e in it.process_ended(number)] == [Departed, Gone]
    assert it.all() == []


def test_a_session_that_was_sent_nothing_holds_nothing() -> None:
    it = sessions()
    number, _ = it.connect(0, key(), 1, NEIGHBOUR, {})
    assert it.get(number).acknowledged == NOTHING_SENT
    assert it.unacknowledged(100) == []


def test_the_first_snapshot_counts_as_acknowledged_and_later_ones_do_not() -> None:
    it = sessions()
    number, _ = it.connect(0, key(), 1, NEIGHBOUR, {})
    it.sent(number, 5)
    it.sent(number, 6)
    assert [i.session for i in it.unacknowledged(6)] == [number]
    assert it.unacknowledged(5) == []
    it.acknowledge(number, 6)
    it.acknowledge(number, 4)
    assert it.unacknowledged(6) == []


def test_a_peer_that_retired_and_one_that_ended_say_so() -> None:
    it = sessions()
    _, events = it.goodbye(watched(it), "idle for 300 s", retired=True)
    assert reasons(events) == ["it retired: idle for 300 s"]
    _, events = it.goodbye(watched(it, nonce=2), "its engine was closed")
    assert reasons(events) == ["it said goodbye: its engine was closed"]


def test_those_who_can_be_asked_to_retire_say_to_be_idle_and_have_a_stream() -> None:
    it = sessions()
    one, other, silent = (watched(it, name=f"{name}:1") for name in "abc")
    it.report(100, one, 30)
    it.report(100, other, 1e9)
    assert it.idle() == {one: 70, other: 0}  # nobody is idle for longer than its session lasts
    it.lost(101, one)
    assert it.idle() == {other: 0}
    it.watching(one)
    it.report(102, other, None)
    assert it.idle() == {one: 70}
    assert it.get(one).idle_since == 70
    assert it.get(silent).idle_since is None
    it.goodbye(one, "")
    it.report(103, one, 5)
    assert it.idle() == {}


def test_sessions_and_holders_together_stay_below_the_limit() -> None:
    it = sessions(most=2)
    number = watched(it)
    it.lost(0, number)
    it.tick(10)
    watched(it, name="b:1")
    with pytest.raises(Full, match=r"keeps 2 sessions already, 1 of them of departed"):
        it.connect(11, key("c:1"), 1, NEIGHBOUR, {})
    it.goodbye(number, "")
    it.connect(12, key("c:1"), 1, NEIGHBOUR, {})


def test_a_newcomer_that_is_refused_has_replaced_what_it_replaced() -> None:
    it = sessions(most=1)
    watched(it)
    with pytest.raises(Full) as full:
        it.connect(1, key(incarnation=2), 1, NEIGHBOUR, {})
    assert [type(e) for e in full.value.events] == [Departed]


def test_notifications_are_numbered_per_session() -> None:
    it = sessions()
    number = watched(it)
    it.take_notification(number, 3)
    assert it.notified(number) == 3
    again, _ = it.connect(1, key(), 2, NEIGHBOUR, {})
    assert it.notified(again) == 0


def test_only_the_newest_reasons_are_kept() -> None:
    it = sessions(most=10)
    numbers = [watched(it, name=f"a:{i}") for i in range(1, 3)]
    it.goodbye(numbers[0], "first")
    for nonce in range(2, 400):
        it.connect(0, key("b:1"), nonce, ELSEWHERE, {})
    assert it.why_departed(numbers[0]) is None


class Model(RuleBasedStateMachine):
    """Whatever happens: one departure per opened session, and a holder only where one may be."""

    known = Bundle("known")

    def __init__(self) -> None:
        super().__init__()
        self.it = sessions(most=6)
        self.now = 0.0
        self.opened: list[int] = []
        self.departed: list[int] = []
        self.gone: set[int] = set()
        self.sent: dict[int, int] = {}
        self.acknowledged: dict[int, int] = {}
        self.hosts: dict[int, HostIdentity] = {}
        self.version = 1

    def take(self, events: list[object]) -> None:
        for event in events:
            match event:
                case Opened(info):
                    self.opened.append(info.session)
                    self.hosts[info.session] = info.host
                case Departed(info, reason):
                    assert reason
                    assert info.session in self.opened
                    self.departed.append(info.session)
                case Gone(number):
                    assert number in self.departed
                    assert number not in self.gone
                    self.gone.add(number)

    @rule(
        target=known,
        name=st.sampled_from(["a:1", "b:1", "c:1"]),
        incarnation=st.integers(1, 2),
        nonce=st.integers(1, 2),
        host=st.sampled_from([NEIGHBOUR, ELSEWHERE]),
    )
    def connect(self, name: str, incarnation: int, nonce: int, host: HostIdentity) -> int:
        try:
            number, events = self.it.connect(self.now, key(name, incarnation), nonce, host, {})
        except Full as full:
            self.take(full.events)
            return 0
        self.take(events)
        return number

    @rule(number=known)
    def watch_and_send(self, number: int) -> None:
        if self.it.get(number):
            self.it.watching(number)
            self.it.sent(number, self.version)
            self.acknowledged.setdefault(number, self.version)

    @rule(number=known)
    def lose(self, number: int) -> None:
        self.it.lost(self.now, number)

    @rule(number=known)
    def acknowledge(self, number: int) -> None:
        self.it.acknowledge(number, self.version)
        if number in self.acknowledged and number not in self.gone:
            self.acknowledged[number] = self.version

    @rule()
    def publish(self) -> None:
        self.version += 1

    @rule(number=known)
    def goodbye(self, number: int) -> None:
        was_known = number in self.opened and number not in self.gone
        found, events = self.it.goodbye(number, "done")
        assert found == was_known
        self.take(events)
        assert not was_known or number in self.gone

    @rule(number=known)
    def end_process(self, number: int) -> None:
        self.take(self.it.process_ended(number))
        assert number not in self.opened or number in self.gone

    @rule(seconds=st.sampled_from([1.0, 5.0, 10.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.it.tick(self.now))
        due = self.it.next_tick()
        assert due is None or due > self.now

    @invariant()
    def each_departs_at_most_once(self) -> None:
        assert len(self.departed) == len(set(self.departed))

    @invariant()
    def what_is_listed_is_what_may_touch_memory(self) -> None:
        listed = {i.session: i for i in self.it.all()}
        assert set(listed) == set(self.opened) - self.gone
        for number, info in listed.items():
            departed = number in self.departed
            assert departed == (info.state is SessionState.DEPARTED)
            assert not departed or (self.hosts[number] is NEIGHBOUR and number in self.acknowledged)
        behind = {i.session for i in self.it.unacknowledged(self.version)}
        assert behind == {
            n for n in listed if n in self.acknowledged and self.acknowledged[n] < self.version
        }
        assert len(listed) <= 6


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
