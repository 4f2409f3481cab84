"""Two hosts whose link is cut: for less than the grace the peer is kept, for longer both sides release it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tent_core.testing import Held, holding, wait_until
from tent_core.testing.namespaces import Side, cut, joined, why_not
from tent_core.testing.peers import PeerProcess

from .conftest import Start
from .support import only

pytestmark = [pytest.mark.namespaces, pytest.mark.slow, pytest.mark.timeout(180)]

SIZE = 8 << 20
SOON_S = 15.0
WRITER = """
import threading, time
from collections import Counter

def write_on():
    "Write, with another content each time, until told to end; what was raised is kept, by kind and text."
    global written, raised, ended, writer
    written, raised, ended = 0, Counter(), threading.Event()
    def work():
        global written
        while not ended.is_set():
            source.array[:] = written % 250 + 1
            try:
                segment.write(source, segment.buffer("target"), timeout=20.0)
                written += 1
            except tent.TentError as error:
                raised[type(error).__name__, str(error)] += 1
                time.sleep(0.05)
    writer = threading.Thread(target=work, daemon=True)
    writer.start()

def rest():
    ended.set()
    writer.join(25)
    assert not writer.is_alive()
    return dict(raised)

def known():
    return [(p.incarnation, p.state, p.handshakes) for p in engine.peers()]
"""


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with joined() as made:
        yield made


@pytest.fixture(params=["cut here", "cut there"])
def where(request: pytest.FixtureRequest, sides: tuple[Side, Side]) -> Side:
    """The end of the link that is taken down: the one without a route, or the one that only falls silent."""
    return sides[0] if request.param == "cut here" else sides[1]


class Hosts:
    """Starts engines on what is to TENT two machines; each notices a silent peer in two seconds."""

    def __init__(self, sides: tuple[Side, Side], start: Start, folder: Path) -> None:
        self._sides = sides
        self._start = start
        self._folder = folder

    def engines(self, grace_s: float) -> list[PeerProcess]:
        """One on each, which waits so long for the other."""
        return [self._engine(side, grace_s) for side in self._sides]

    def _engine(self, side: Side, grace_s: float) -> PeerProcess:
        boot_id = self._folder / side.namespace
        boot_id.write_text(f"{uuid.uuid4()}\n")
        control = {"listen": f"{side.v4}:0", "keepalive_time_s": 1, "keepalive_timeout_s": 1}
        config: dict[str, Any] = only("tcp", control=control, peers={"grace_s": grace_s})
        peer = self._start(config, wrapper=side.on_a_machine(boot_id))
        peer.run(WRITER)
        return peer


@pytest.fixture
def hosts(sides: tuple[Side, Side], start: Start, tmp_path: Path) -> Hosts:
    return Hosts(sides, start, tmp_path)


def opened(here: PeerProcess, there: PeerProcess) -> None:
    """`here` opens `there`, and writes on."""
    there.run("target = engine.allocate(size, name='target')", size=SIZE)
    here.run("source = engine.allocate(size)", size=SIZE)
    open_and_write(here, there)


def open_and_write(here: PeerProcess, there: PeerProcess) -> None:
    """Open the segment, and write until told to rest."""
    here.run("segment = engine.open_segment(name)", name=there.segment_name)
    here.run("write_on()")
    wait_until(lambda: here.run("written") > 2, SOON_S, "the first writes")


def arrived(here: PeerProcess, there: PeerProcess) -> None:
    """What is written now is what the other side has."""
    here.run("source.array[:] = 251")
    here.run("segment.write(source, segment.buffer('target'))")
    assert there.run("set(target.array.tolist())") == {251}


def test_a_link_that_is_cut_for_less_than_the_grace_keeps_the_peer(
    hosts: Hosts, where: Side
) -> None:
    here, there = hosts.engines(grace_s=30)
    opened(here, there)
    ((incarnation, _, _),) = here.run("known()")
    with cut(where):
        time.sleep(4.0)  # longer than it takes to notice
        stopped_at = here.run("written")
    wait_until(lambda: here.run("written") > stopped_at + 2, 30, "writes to go on")
    for kind, text in here.run("rest()"):
        assert kind in ("TransferFailed", "WaitTimeout"), text
        assert there.segment_name in text
    arrived(here, there)
    assert here.run("known()") == [(incarnation, "live", 1)]
    wait_until(lambda: there.run("[s for _, s, _ in known()]") == ["open"], SOON_S, "the session")


def test_a_link_that_is_cut_for_longer_releases_both_sides_and_heals_by_opening_again(
    hosts: Hosts, where: Side
) -> None:
    here, there = hosts.engines(grace_s=2)
    opened(here, there)  # once, for what is made once and kept
    here.run("rest(); segment.close()")
    lose(where, here, there)
    before = [held(peer) for peer in (here, there)]
    for _ in range(2):
        wait_until(lambda: opens(here, there), SOON_S, "the link to be of use again")
        open_and_write(here, there)
        lose(where, here, there)
        raised = here.run("rest()")
        assert any("departed" in text and there.segment_name in text for _, text in raised), raised
        assert here.run("written") > 2
        here.run("segment.close()")
        for peer, was in zip((here, there), before, strict=True):
            wait_until(lambda p=peer, w=was: not beyond(p, w), SOON_S, "all to be released")  # type: ignore[misc]
    wait_until(lambda: opens(here, there), SOON_S, "the link to be of use again")
    arrived(here, there)


def lose(where: Side, here: PeerProcess, there: PeerProcess) -> None:
    """Cut the link until neither side knows the other one."""
    with cut(where):
        for peer in (here, there):
            wait_until(lambda p=peer: not p.run("known()"), SOON_S, "the peer to be forgotten")  # type: ignore[misc]


def opens(here: PeerProcess, there: PeerProcess) -> bool:
    """Whether the segment can be opened (again); by itself, without anything done to the engines."""
    trial = """
try:
    segment = engine.open_segment(name, timeout=3.0)
except tent.UnknownSegment:
    segment = None
segment is not None"""
    answer: bool = here.run(trial, name=there.segment_name)
    return answer


def held(peer: PeerProcess) -> list[Held]:
    """What the process of a peer and its helpers hold."""
    own = holding(peer.pid)
    return [own, *map(holding, own.children)]


def beyond(peer: PeerProcess, before: list[Held]) -> list[str]:
    """What they hold beyond that, but for gRPC's pool of threads, which grows and shrinks with load."""
    found = [
        thing for now, was in zip(held(peer), before, strict=True) for thing in now.beyond(was)
    ]
    return [thing for thing in found if thing != "threads: event_engine"]
