"""Random and almost valid bytes on every port of an engine: a good peer notices nothing, no byte changes."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator

import pytest

import tent_core as tent
from tent_core.testing import wait_until
from tent_core.testing.peers import PeerProcess

from . import hostile
from .conftest import Start
from .support import often, only, program

THROWS = often(2_000, 10_000)
SIZE = 1 << 16
OFFER = """
whole = np.zeros(3 * size, np.uint8)
arena = engine.register(whole[size:2 * size], name="arena")
good = engine.register(np.zeros(size, np.uint8), name="good")
from tent_core.testing import holding
notes = []
import threading
def listen():
    notes.extend(note for note in engine.notifications())
threading.Thread(target=listen, daemon=True).start()
"""


class Attacked:
    """An engine in a process of its own, a good peer of it, and what a hostile one can know."""

    def __init__(self, owner: PeerProcess, good: PeerProcess, here: tent.Engine) -> None:
        self.owner, self.good = owner, good
        owner.run(OFFER, size=SIZE)
        with here.open_segment(owner.segment_name) as segment:
            self.segment = segment.descriptor
        good.run(program("good_peer"))
        good.run("peer = GoodPeer(engine, owner, 'good')", owner=owner.segment_name)

    def goes_on(self) -> None:
        """The good peer gets further."""
        before = self.good.run("peer.rounds")
        wait_until(lambda: self.good.run("peer.rounds") > before, 20, "the good peer to go on")

    def end(self) -> None:
        """The good peer saw no error, and nothing was written beside the arena."""
        self.goes_on()
        report = self.good.run("peer.stop()")
        assert report["error"] is None
        assert not report["hangs"]
        assert self.owner.run("not (whole[:size].any() or whole[2 * size:].any())")
        wait_until(
            lambda: self.owner.run("len(notes)") >= report["rounds"], 10, "its notifications"
        )
        sent = self.owner.run(
            "[n.payload for n in notes if n.sender.name == good]", good=self.good.segment_name
        )
        assert sent == [str(i).encode() for i in range(report["rounds"])]


@pytest.fixture
def attacked(start: Start, request: pytest.FixtureRequest) -> Iterator[Attacked]:
    """The parameter, if any, is the grace of peers in seconds."""
    tcp = {"enable": True, "handshake_timeout": "1s"}
    grace = getattr(request, "param", 10)
    config = only("tcp", transports={"tcp": tcp}, peers={"grace_s": grace})
    with tent.Engine(only("tcp")) as here:
        made = Attacked(start(config), start(only("tcp")), here)
    yield made
    made.end()


def bombard(
    attacked: Attacked, place: hostile.Place, make: Callable[[random.Random], bytes]
) -> None:
    dice = random.Random(6)
    for i in range(THROWS):
        hostile.throw(place, make(dice), dice)
        if i % (THROWS // 4) == 0:
            attacked.goes_on()


def test_random_bytes_on_the_control_port_harm_nobody(attacked: Attacked) -> None:
    beginnings = (hostile.HTTP2_PREFACE, hostile.HTTP2_PREFACE + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    place = hostile.control_port(attacked.segment)
    bombard(attacked, place, lambda dice: hostile.noise(dice, beginnings))


def test_random_bytes_on_the_data_port_harm_nobody(attacked: Attacked) -> None:
    valid = hostile.data_session(attacked.segment, "arena")
    beginnings = tuple(valid[:n] for n in (8, 64, 75, 139))
    place = hostile.data_port(attacked.segment)
    bombard(attacked, place, lambda dice: hostile.noise(dice, beginnings))


def test_almost_valid_bytes_on_the_control_port_harm_nobody(attacked: Attacked) -> None:
    valid = hostile.control_session(attacked.segment)
    place = hostile.control_port(attacked.segment)
    bombard(attacked, place, lambda dice: hostile.mutated(valid, dice))


def test_almost_valid_bytes_on_the_data_port_harm_nobody(attacked: Attacked) -> None:
    valid = hostile.data_session(attacked.segment, "arena")
    place = hostile.data_port(attacked.segment)
    with socket.create_connection(place, timeout=10) as stream:
        stream.sendall(valid)
        wait_until(lambda: attacked.owner.run("int(arena.array[1])") == 1, 10, "it is valid")
    bombard(attacked, place, lambda dice: hostile.mutated(valid, dice))


@pytest.mark.parametrize("attacked", [1], indirect=True)
def test_half_a_message_and_then_silence_costs_that_connection_only(attacked: Attacked) -> None:
    valid = hostile.data_session(attacked.segment, "arena")
    before = attacked.owner.run("len(holding().descriptors)")
    silent = []
    for place, data in (
        (hostile.data_port(attacked.segment), valid),
        (hostile.control_port(attacked.segment), hostile.control_session(attacked.segment)),
    ):
        for i in range(50):
            silent.append(socket.create_connection(place, timeout=10))
            silent[-1].sendall(data[: i * len(data) // 50])
    attacked.goes_on()
    for stream in silent:
        stream.close()
    wait_until(
        lambda: attacked.owner.run("len(holding().descriptors)") <= before, 20, "all to be released"
    )
