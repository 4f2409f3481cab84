"""A live peer among users, revocations, retirements and departures, in 1,000 seeded interleavings."""

from __future__ import annotations

import random

import pytest

from tent_core.descriptor import SegmentDescriptor
from tent_core.errors import PeerDeparted, TentError, TransportError, UnknownSegment
from tent_core.peers import Listener, LivePeer
from tent_core.remote_buffer import RemoteBuffer

from .interleaving import Scheduler, reproducible
from .scripted import FAKE, NAME, Outside, Remote, drive

PATIENCE = 100_000.0
"""Seconds of the scheduler's clock: nobody who waits gets out by this, unless he was forgotten."""


class Drama:
    """One run: two users, a control thread, somebody who retires, and at last a departure."""

    def __init__(self, choices: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = choices
        self.scheduler = Scheduler(choices)
        drive(monkeypatch, self.scheduler)
        self.remote = Remote(self.scheduler)
        self.outside = Outside(self.scheduler, self.remote)
        listener = Listener()
        while True:
            try:
                connection = self.outside.plane.dial(NAME, 1.0, listener)
                break
            except UnknownSegment:
                continue
        self.peer = LivePeer(self.outside.owner(self.gone), listener, connection)
        self.acting = 4
        self.uses = 0
        self.taken: dict[tuple[bytes, int, int], int] = {}
        """In which version of its snapshot the peer took a buffer away."""

    def run(self) -> None:
        actors = [self.user, self.user, self.control, self.retirer]
        for number, actor in enumerate(actors):
            self.scheduler.spawn(f"{actor.__name__} {number}", lambda a=actor: self.act(a))  # type: ignore[misc]
        self.scheduler.spawn("the end", self.end)
        self.scheduler.run()
        assert self.outside.told.count("gone") == 1
        assert self.outside.told[-1] == "gone"
        assert not self.outside.transport.open
        assert all(connection.closed for connection in self.outside.plane.made)
        assert self.peer.departed is not None

    def act(self, part: object) -> None:
        try:
            part()  # type: ignore[operator]
        finally:
            self.acting -= 1

    def pause(self) -> None:
        self.scheduler.pause()

    def user(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            try:
                self.peer.begin(PATIENCE)
            except PeerDeparted:
                assert self.peer.departed is not None
                return
            except UnknownSegment:
                continue
            self.uses += 1
            try:
                self.use()
            finally:
                self.uses -= 1
                self.peer.end()
            self.pause()

    def use(self) -> None:
        assert "gone" not in self.outside.told
        try:
            endpoint = self.peer.endpoint(FAKE)
        except PeerDeparted:
            assert self.peer.departed is not None
            return
        except TransportError:
            return
        remote = self.random.choice(self.peer.buffers())
        if remote.inflight.begin():
            before = len(self.outside.plane.made)
            for _ in range(self.random.randint(0, 5)):
                self.pause()
                assert endpoint.open or self.peer.departed, "an endpoint in use was closed"  # type: ignore[attr-defined]
            assert len(self.outside.plane.made) == before, (
                "it was connected anew while it was in use"
            )
            self.not_acknowledged(remote)
            remote.inflight.end()

    def not_acknowledged(self, remote: RemoteBuffer) -> None:
        """What is in use was not let go of."""
        for connection in self.outside.plane.made:
            gone = self.taken.get((connection.key.incarnation, remote.id, remote.generation))
            assert gone is None or max(connection.acknowledged, default=0) < gone

    def control(self) -> None:
        for _ in range(self.random.randint(0, 6)):
            self.pause()
            match self.random.randrange(8):
                case 0 | 1 | 2 | 3:
                    before = self.remote.snapshot
                    self.remote.change()
                    self.note_taken(before)
                    self.remote.publish()
                case 4:
                    self.remote.reachable = not self.remote.reachable
                case 5:
                    for connection in list(self.remote.connections):
                        connection.listener.asked_to_retire()
                case 6 if self.random.random() < 0.5:
                    self.lose("its process ended")
                case 7 if self.random.random() < 0.5:
                    self.lose("it said goodbye")
                    self.remote.restart()
        self.remote.reachable = True

    def lose(self, reason: str) -> None:
        for connection in list(self.remote.connections):
            connection.lose(reason)

    def note_taken(self, before: SegmentDescriptor) -> None:
        after = self.remote.snapshot
        for old in before.buffers.values():
            if after.buffers[old.id].generation != old.generation:
                self.taken[after.incarnation, old.id, old.generation] = after.version

    def retirer(self) -> None:
        for _ in range(self.random.randint(0, 5)):
            self.pause()
            retired = self.peer.retire(self.random.choice([0.0, 0.01, 0.05]), "idle")
            if self.random.random() < 0.2:
                self.peer.replan()
            if retired:
                assert "gone" not in self.outside.told

    def gone(self, peer: LivePeer) -> None:
        assert peer is self.peer
        assert self.uses == 0, "gone while it is in use"
        assert not self.outside.transport.open, "gone with an open endpoint"

    def end(self) -> None:
        """When all else is over the peer may still depart, and nothing stays."""
        self.scheduler.wait(lambda: self.acting == 0)
        self.peer.depart("the engine was closed")
        self.scheduler.wait(lambda: self.outside.quiet)
        with pytest.raises(PeerDeparted):
            self.peer.begin(PATIENCE)


@pytest.mark.parametrize("fifties", range(20))
def test_a_thousand_interleavings_of_a_peer_leave_nothing_and_forget_nobody(
    fifties: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(fifties * 50, fifties * 50 + 50):
        with reproducible(seed) as choices, monkeypatch.context() as patch:
            Drama(choices, patch).run()


def test_a_failed_wake_is_told_to_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one who waited connects in turn, and does not wait for ever."""
    for seed in range(50):
        with reproducible(seed) as choices, monkeypatch.context() as patch:
            drama = Drama(choices, patch)
            drama.peer.retire(0.0, "idle")
            drama.remote.reachable = False
            failed: list[TentError] = []

            def use(drama: Drama = drama, failed: list[TentError] = failed) -> None:
                try:
                    drama.peer.begin(PATIENCE)
                except UnknownSegment as error:
                    failed.append(error)

            for number in range(3):
                drama.scheduler.spawn(f"user {number}", use)
            drama.scheduler.run()
            assert len(failed) == 3
