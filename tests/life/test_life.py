"""The decisions of a peer's life agree with a simple model, in 1,000 seeded interleavings of events."""

from __future__ import annotations

import random

import pytest

from tent_core.life import Begin, Life, PeerState

from .interleaving import reproducible

STEPS = 60


class Model:
    """What is so, told apart by what has happened, where `Life` has one state."""

    def __init__(self) -> None:
        self.connected = True
        self.releasing = False
        self.connecting = False
        self.departed = False
        self.uses = 0
        self.used = 0.0

    @property
    def state(self) -> PeerState:
        if self.departed:
            return PeerState.DEPARTED
        if self.connected:
            return PeerState.LIVE
        if self.releasing:
            return PeerState.RETIRING
        return PeerState.WAKING if self.connecting else PeerState.DORMANT


class Run:
    """Applies the same events to both, those that an owner which keeps its promises may report."""

    def __init__(self, choices: random.Random) -> None:
        self.random = choices
        self.now = 5.0
        self.life, self.model = Life(self.now), Model()
        self.model.used = self.now
        self.released_uses = 0

    def step(self) -> None:
        self.now += self.random.uniform(0, 2)
        events = [self.begin, self.retire, self.look]
        if self.model.uses:
            events += [self.end, self.end]
        if self.model.releasing:
            events += [self.released, self.released]
        if self.model.connecting:
            events += [self.connected, self.connect_failed]
        if self.random.random() < 0.03:
            events = [self.depart]
        self.random.choice(events)()
        assert self.life.state is self.model.state
        assert self.life.users == self.model.uses

    def begin(self) -> None:
        model = self.model
        expected = {
            PeerState.LIVE: Begin.GO,
            PeerState.DORMANT: Begin.CONNECT,
            PeerState.DEPARTED: Begin.GONE,
        }.get(model.state, Begin.WAIT)
        assert self.life.begin() is expected
        model.uses += expected is Begin.GO
        model.connecting |= expected is Begin.CONNECT

    def end(self) -> None:
        self.model.uses -= 1
        self.model.used = self.now
        assert self.life.end(self.now) is (self.model.departed and self.model.uses == 0)

    def look(self) -> None:
        model = self.model
        idle = model.state is PeerState.LIVE and not model.uses
        assert self.life.idle_for(self.now) == (self.now - model.used if idle else None)

    def retire(self) -> None:
        model, least = self.model, self.random.uniform(0, 4)
        may = model.state is PeerState.LIVE and not model.uses and self.now - model.used >= least
        assert self.life.retire(self.now, least) is may
        if may:
            model.connected, model.releasing = False, True

    def released(self) -> None:
        self.life.released()
        self.model.releasing = False

    def connected(self) -> None:
        model = self.model
        assert self.life.connected(self.now) is not model.departed
        model.connecting = False
        if not model.departed:
            model.connected, model.used = True, self.now

    def connect_failed(self) -> None:
        self.life.connect_failed()
        self.model.connecting = False

    def depart(self) -> None:
        model = self.model
        before = None if model.departed else model.state
        assert self.life.depart(f"at {self.now}") is before
        if before is not None:
            self.reason = f"at {self.now}"
        model.departed = True
        assert self.life.reason == self.reason


@pytest.mark.parametrize("tens", range(10))
def test_a_thousand_interleavings_of_a_life_agree_with_the_model(tens: int) -> None:
    for seed in range(tens * 100, tens * 100 + 100):
        with reproducible(seed) as choices:
            run = Run(choices)
            for _ in range(STEPS):
                run.step()


def test_what_departs_stays_departed_whatever_comes_late() -> None:
    for late in (Life.begin, Life.released, Life.connect_failed):
        life = Life(0.0)
        life.depart("gone")
        late(life)
        assert life.state is PeerState.DEPARTED
        assert life.reason == "gone"
        assert not life.connected(1.0)
        assert not life.retire(100.0, 0.0)
        assert life.depart("again") is None


def test_the_last_use_of_a_departed_peer_says_so_once() -> None:
    life = Life(0.0)
    assert [life.begin(), life.begin()] == [Begin.GO, Begin.GO]
    life.depart("gone")
    assert [life.end(1.0), life.end(1.0)] == [False, True]
