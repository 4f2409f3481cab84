"""A name at which nobody answers: the first call finds out, the others fail at once, one prober looks."""

from __future__ import annotations

import itertools
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from control_harness import HANG_S, Control, Peers, Process, Side, behind_proxy, side, wait_until
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tent_core.address import Address
from tent_core.control import probe
from tent_core.control.silence import FORGET_S, LOOK_EVERY_S, NAMES_KEPT, Silence
from tent_core.errors import TentError, UnknownSegment

# -------------------------------------------------------------------- decisions


def test_a_name_is_silent_from_its_first_failure_until_it_answers() -> None:
    it = Silence(0.1, 1.0)
    assert it.asked(0, "a:1") is None
    it.failed(10, "a:1", "no engine answers at a:1")
    told = it.asked(12.5, "a:1")
    assert told is not None
    assert told.startswith("no engine answers at a:1 (that was 2.5 s ago")
    it.answered("a:1")
    assert it.asked(13, "a:1") is None
    assert it.pause(13, "a:1") is None


def test_looks_become_rarer_up_to_the_longest_pause() -> None:
    it = Silence(0.1, 0.5)
    it.failed(0, "a:1", "")
    assert [it.pause(1, "a:1") for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_a_name_that_nobody_needs_any_more_is_given_up_and_the_next_call_is_real() -> None:
    it = Silence(0.1, 1.0)
    it.failed(0, "a:1", "")
    it.asked(50, "a:1")
    assert it.pause(50 + FORGET_S - 1, "a:1") is not None
    assert it.pause(50 + FORGET_S, "a:1") is None
    assert it.asked(51 + FORGET_S, "a:1") is None


def test_beyond_the_most_the_name_not_asked_for_longest_is_forgotten() -> None:
    it = Silence(0.1, 1.0)
    for number in range(NAMES_KEPT):
        assert it.failed(number, f"a:{number}", "") is None
    it.asked(NAMES_KEPT, "a:0")
    assert it.failed(NAMES_KEPT, "b:1", "") == "a:1"
    assert len(it) == NAMES_KEPT
    assert it.asked(NAMES_KEPT, "b:1") is not None


NAMES = [f"h:{i}" for i in range(1, 7)]
MOST = 4


class Model(RuleBasedStateMachine):
    """Whatever happens: a name is silent exactly between its failure and what ends that, and few are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.it = Silence(0.1, 1.0, MOST)
        self.now = 0.0
        self.asked: dict[str, float] = {}

    @rule(seconds=st.sampled_from([0.5, 10.0, FORGET_S]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=st.sampled_from(NAMES))
    def fail(self, name: str) -> None:
        pushed_out = self.it.failed(self.now, name, "nobody")
        self.asked[name] = self.now
        assert (pushed_out is not None) == (len(self.asked) > MOST)
        if pushed_out is not None:
            assert self.asked[pushed_out] == min(self.asked.values())
            assert pushed_out != name
            del self.asked[pushed_out]

    @rule(name=st.sampled_from(NAMES))
    def ask(self, name: str) -> None:
        assert (self.it.asked(self.now, name) is None) == (name not in self.asked)
        if name in self.asked:
            self.asked[name] = self.now

    @rule(name=st.sampled_from(NAMES))
    def look(self, name: str) -> None:
        if name in self.asked and self.now - self.asked[name] >= FORGET_S:
            del self.asked[name]
        pause = self.it.pause(self.now, name)
        assert (pause is None) == (name not in self.asked)
        assert pause is None or 0.1 <= pause <= 1.0

    @rule(name=st.sampled_from(NAMES))
    def answer(self, name: str) -> None:
        self.it.answered(name)
        self.asked.pop(name, None)

    @invariant()
    def so_many_are_kept(self) -> None:
        assert len(self.it) == len(self.asked) <= MOST


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# -------------------------------------------------------------------- over the wire


class BlackHole:
    """Takes connections and says nothing, as a stopped process does; counts them."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._listener.getsockname()[1]
        self.name = f"127.0.0.1:{self.port}"
        self._taken: list[socket.socket] = []
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    @property
    def attempts(self) -> int:
        return len(self._taken)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(HANG_S)
        for taken in self._taken:
            taken.close()

    def _take(self) -> None:
        try:
            while True:
                self._taken.append(self._listener.accept()[0])
        except OSError:
            return


@pytest.fixture
def hole() -> Iterator[BlackHole]:
    it = BlackHole()
    yield it
    it.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def failure(here: Side, name: str, timeout: float = 5.0) -> str:
    with pytest.raises(UnknownSegment) as error:
        here.connect(name, timeout=timeout)
    return str(error.value)


def probers(here: Side) -> int:
    return len(here.plane._client._probers)


def test_many_callers_that_need_a_silent_name_make_few_attempts_and_fail_at_once(
    hole: BlackHole,
) -> None:
    with side(Control(reconnect_max_s=2.0)) as here:
        assert "within 1 s" in failure(here, hole.name, timeout=1.0)
        before = hole.attempts
        failures: list[str] = []
        threads = [
            threading.Thread(target=lambda: failures.append(failure(here, hole.name, timeout=30)))
            for _ in range(64)
        ]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_S)
        took = time.monotonic() - began
        assert len(failures) == 64
        assert all("it is being looked for" in text for text in failures)
        assert took < 20  # one of them alone would have waited for 30 s
        # The first call made a few, one after the other; the prober makes one a second, and the 64 none.
        assert hole.attempts - before <= 2 + took
        assert probers(here) == 1


def test_many_callers_at_the_same_time_share_one_attempt(hole: BlackHole) -> None:
    with side(Control(reconnect_max_s=5.0)) as here:
        failures: list[str] = []
        threads = [
            threading.Thread(target=lambda: failures.append(failure(here, hole.name, timeout=2)))
            for _ in range(64)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_S)
        assert len(failures) == 64
        assert hole.attempts <= 6


def test_a_name_that_answers_again_is_found_and_the_next_call_connects() -> None:
    port = free_port()
    name = f"127.0.0.1:{port}"
    with side() as here:
        first = failure(here, name)
        assert "is it running there?" in first
        assert failure(here, name).startswith(first)
        with side(Control(listen=name)) as there:
            wait_until(lambda: probers(here) == 0, HANG_S)
            assert here.connect(name).key == there.key


def test_an_engine_that_is_back_is_opened_although_the_prober_has_not_looked_yet() -> None:
    name = f"127.0.0.1:{free_port()}"
    with side() as here:
        failure(here, name)
        here.plane._loop.call(here.plane._client._probers[name].cancel)
        wait_until(lambda: probers(here) == 0, HANG_S)
        with side(Control(listen=name)) as there:
            wait_until(lambda: opens(here, name), HANG_S)
            assert here.connect(name).key == there.key


def opens(here: Side, name: str) -> bool:
    try:
        here.connect(name)
    except UnknownSegment:  # it was looked for a moment ago
        return False
    return True


def test_callers_look_for_a_silent_name_at_most_every_so_often() -> None:
    it = Silence(0.1, 1.0)
    assert not it.may_look(0.0, "a:1")
    it.failed(0.0, "a:1", "")
    times = [n / 64 for n in range(640)]
    looks = [now for now in times if it.may_look(now, "a:1")]
    assert looks[0] >= LOOK_EVERY_S
    gaps = [later - earlier for earlier, later in itertools.pairwise(looks)]
    assert all(LOOK_EVERY_S <= gap <= LOOK_EVERY_S + 1 / 64 for gap in gaps)
    it.answered("a:1")
    assert not it.may_look(9.0, "a:1")


def test_a_stopped_engine_does_not_count_as_one_that_answers() -> None:
    with Process() as peer, side() as here:
        name = peer.ask("me.name")
        looks: list[bool] = []
        answers = probe.answers

        async def look(where: Address, within: float) -> bool:
            looks.append(await answers(where, within))
            return looks[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(probe, "answers", look)
            peer.signal(signal.SIGSTOP)  # its kernel still takes connections
            failure(here, name, timeout=1.0)
            wait_until(lambda: len(looks) >= 2, HANG_S)
            assert not any(looks)
            assert "it is being looked for" in failure(here, name, timeout=HANG_S)
            peer.signal(signal.SIGCONT)
            wait_until(lambda: probers(here) == 0, HANG_S)
        here.connect(name, timeout=HANG_S)


def test_a_peer_that_departed_because_it_was_cut_off_fails_fast_until_it_is_back() -> None:
    with behind_proxy() as (there, proxy), side(peers=Peers(grace_s=0.5)) as here:
        connection = here.connect(there.name)
        proxy.cut()
        wait_until(lambda: connection.departed is not None, HANG_S)
        assert "did not come back within 0.5 s" in failure(here, there.name)
        proxy.heal()
        wait_until(lambda: probers(here) == 0, HANG_S)
        assert here.connect(there.name).key == there.key


def test_a_refusal_is_an_answer_and_silences_nobody() -> None:
    with side(peers=Peers(max=1)) as small, side() as first, side() as here:
        first.connect(small.name)
        for _ in range(2):
            with pytest.raises(TentError, match="keeps 1 sessions"):
                here.connect(small.name, timeout=0.3)
        assert probers(here) == 0


def test_closing_ends_the_looking(hole: BlackHole) -> None:
    with side() as here:
        failure(here, hole.name, timeout=0.5)
        assert probers(here) == 1
        loop = here.plane._loop
        with side():  # which keeps the control thread running
            here.stop()
            wait_until(lambda: not any("look for" in t.get_name() for t in loop._tasks))
