"""All peers of an engine, over mock transports: departures told once, idleness, room, and what is left."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tent_core as tent
import tent_mock
from tent_core.errors import PeerDeparted, PeerRefused, UnknownSegment
from tent_core.hookspecs import hookimpl
from tent_core.plugins import Registry
from tent_core.testing import wait_until
from tent_core.testing.peers import PeerProcess
from tent_core.transport import TransportDeclaration

HANG_S = 20.0
NUMBER = 1001
Make = Callable[..., tent.Engine]


class Package:
    """A mock transport with hooks that write down what they are told of peers."""

    def __init__(self) -> None:
        self.declaration = tent_mock.declare("mock", NUMBER)
        self.events: list[tuple[str, str, str]] = []

    @hookimpl
    def tent_transport(self) -> TransportDeclaration:
        return self.declaration

    @hookimpl
    def tent_segment_opened(self, segment: Any) -> None:
        self.events.append(("opened", segment.name, ""))

    @hookimpl
    def tent_segment_closed(self, peer: Any) -> None:
        self.events.append(("closed", peer.name, ""))

    @hookimpl
    def tent_peer_departed(self, peer: Any, reason: str) -> None:
        self.events.append(("departed", peer.name, reason))

    def of(self, engine: tent.Engine) -> list[str]:
        """What was told of one peer, in order."""
        return [event for event, name, _ in self.events if name == engine.segment_name]

    def reasons(self, engine: tent.Engine) -> list[str]:
        return [reason for _, name, reason in self.events if name == engine.segment_name and reason]


def engine_of(control: dict[str, Any] | None = None, **peers: Any) -> tent.Engine:
    """An engine whose hooks are at `engine.told`; `peers` are the settings of that section."""
    package = Package()
    config = {
        "transports": {"mock": {"enable": True}},
        "policy": [{"name": "all", "transports": ["mock"]}],
        "peers": peers,
        "control": control or {},
        "log": {"level": "error"},
    }
    engine = tent.Engine(config, plugins=Registry.of(package))
    engine.told = package  # type: ignore[attr-defined]
    return engine


@pytest.fixture
def make() -> Iterator[Make]:
    """`engine_of`, and an end for what it makes."""
    engines: list[tent.Engine] = []

    def made(*args: Any, **more: Any) -> tent.Engine:
        engines.append(engine_of(*args, **more))
        return engines[-1]

    yield made
    for engine in engines:
        engine.close()


def told(engine: tent.Engine) -> Package:
    return engine.told  # type: ignore[attr-defined,no-any-return]


def hears(engine: tent.Engine, of: tent.Engine, events: list[str], reason: str = "") -> None:
    """Its hooks are told these events of that peer, in order, and at last this reason."""
    wait_until(lambda: len(told(engine).of(of)) >= len(events), HANG_S)
    assert told(engine).of(of) == events
    if reason:
        assert told(engine).reasons(of)[-1] == reason


def state(engine: tent.Engine) -> list[str]:
    return [peer.state for peer in engine.peers()]


class Pair:
    """An engine that moves data to another one."""

    def __init__(self, here: tent.Engine, there: tent.Engine) -> None:
        self.here, self.there = here, there
        self.target = there.allocate(1 << 12, name="target")
        self.local = here.allocate(1 << 12)
        self.segment = here.open_segment(there.segment_name, timeout=HANG_S)

    def write(self, value: int) -> None:
        self.local.array[:] = value
        self.segment.write(self.local, self.segment.buffer("target"))
        assert (self.target.array == value).all()


# -------------------------------------------------------------------- departures are told once


def test_a_peer_that_closes_is_told_of_once_on_the_side_that_opened_it(make: Make) -> None:
    here, there = make(), make()
    pair = Pair(here, there)
    there.close()
    hears(here, there, ["opened", "departed"], "it said goodbye: its engine was closed")
    pair.segment.close()
    hears(here, there, ["opened", "departed", "closed"])
    assert here.peers() == []


def test_a_peer_that_closes_is_told_of_once_on_the_side_that_it_opened(make: Make) -> None:
    here, there = make(), make()
    there.open_segment(here.segment_name)
    there.close()
    hears(here, there, ["departed"])
    assert "its engine was closed" in told(here).reasons(there)[0]
    assert here.peers() == []


def test_a_peer_that_is_opener_and_opened_departs_once_when_nothing_of_it_is_left(
    make: Make,
) -> None:
    here = make()
    for _ in range(20):  # both sides learn of it at about the same time
        there = make()
        here.open_segment(there.segment_name)
        there.open_segment(here.segment_name)
        assert [(p.opened, p.opens) for p in here.peers()] == [(True, True)]
        there.close()
        wait_until(lambda: here.peers() == [])
        wait_until(lambda gone=there: "departed" in told(here).of(gone))
        hears(here, there, ["opened", "departed"])
    here.close()
    departed = Counter(name for event, name, _ in told(here).events if event == "departed")
    assert set(departed.values()) == {1}
    assert len(departed) == 20


def test_a_side_that_is_left_keeps_a_peer_from_being_called_departed(make: Make) -> None:
    here, there = make(idle_timeout_s=0.1), make()
    there_segment = there.open_segment(here.segment_name)
    here.open_segment(there.segment_name).close()
    wait_until(lambda: [(p.opened, p.opens) for p in here.peers()] == [(False, True)], HANG_S)
    hears(here, there, ["opened", "closed"])
    there_segment.close()
    there.close()
    hears(here, there, ["opened", "closed", "departed"])


def test_closing_an_engine_tells_its_own_hooks_of_every_peer_once(make: Make) -> None:
    here, opened, opener, both = (make() for _ in range(4))
    here.open_segment(opened.segment_name)
    opener.open_segment(here.segment_name)
    here.open_segment(both.segment_name)
    both.open_segment(here.segment_name)
    here.close()
    for peer in (opened, opener, both):
        wait_until(lambda gone=peer: told(here).reasons(gone) == ["the engine was closed"])
        assert told(here).of(peer)[-1] == "departed"


def test_another_incarnation_on_the_same_port_is_another_peer(make: Make) -> None:
    here, there = make(), make()
    pair = Pair(here, there)
    name = there.segment_name
    remote = pair.segment.buffer("target")
    there.close()
    hears(here, there, ["opened", "departed"])
    again = make({"listen": name})
    target = again.allocate(1 << 12, name="target")
    with pytest.raises(PeerDeparted):
        pair.segment.write(pair.local, remote)
    opened = wait_until(lambda: _opened(here, name), HANG_S)
    opened.write(pair.local, opened.buffer("target"))
    hears(here, there, ["opened", "departed", "opened"])
    assert (target.array == pair.local.array).all()


def _opened(here: tent.Engine, name: str) -> Any:
    try:
        return here.open_segment(name)
    except UnknownSegment:  # known to be silent, until the prober finds it back
        return None


# -------------------------------------------------------------------- idle


def test_reopening_costs_no_handshake_and_is_told_again(make: Make) -> None:
    here, there = make(), make()
    for _ in range(3):
        with here.open_segment(there.segment_name):
            pass
    (peer,) = here.peers()
    assert (peer.handshakes, peer.handles, peer.state) == (1, 0, "live")
    hears(here, there, ["opened", "closed"] * 3)


def test_an_idle_peer_with_a_handle_is_released_on_both_sides_and_comes_back_unseen(
    make: Make,
) -> None:
    here, there = make(idle_timeout_s=0.2), make()
    pair = Pair(here, there)
    pair.write(1)
    wait_until(lambda: state(here) == ["dormant"], HANG_S)
    wait_until(lambda: there.peers() == [], HANG_S)
    hears(there, here, ["departed"], "it retired: idle for 0.2 s")
    hears(here, there, ["opened"])
    pair.write(2)
    assert [(p.state, p.handshakes) for p in here.peers()] == [("live", 2)]
    assert [p.opens for p in there.peers()] == [True]


def test_an_idle_peer_without_a_handle_is_forgotten_and_has_departed(make: Make) -> None:
    here, there = make(idle_timeout_s=0.1), make()
    here.open_segment(there.segment_name).close()
    wait_until(lambda: here.peers() == [], HANG_S)
    hears(here, there, ["opened", "closed", "departed"])


def test_the_last_handle_of_a_retired_peer_takes_it_along(make: Make) -> None:
    here, there = make(idle_timeout_s=0.1), make()
    segment = here.open_segment(there.segment_name)
    wait_until(lambda: state(here) == ["dormant"], HANG_S)
    segment.close()
    assert here.peers() == []
    hears(here, there, ["opened", "closed", "departed"])
    assert "last handle" in told(here).reasons(there)[0]


def test_a_peer_that_only_receives_never_judges_that_it_is_idle(make: Make) -> None:
    here, there = make(), make(idle_timeout_s=0.05)
    pair = Pair(here, there)
    for i in range(5):
        pair.write(i)
        time.sleep(0.1)  # well past the idle time of the side that receives
    assert [p.handshakes for p in here.peers()] == [1]


def test_the_opened_side_shows_for_how_long_its_peer_says_to_be_idle(make: Make) -> None:
    here, there = make(), make()
    here.open_segment(there.segment_name)
    assert [p.idle_s for p in there.peers()] == [None]
    wait_until(lambda: [p.idle_s is not None and p.idle_s >= 1 for p in there.peers()] == [True])


def test_opening_and_retiring_at_the_same_time_leaves_one_peer_that_works(make: Make) -> None:
    here, there = make(), make()
    there.allocate(1 << 12, name="target")
    local = here.allocate(1 << 12)
    over = threading.Event()

    def press() -> None:
        while not over.is_set():
            here.roster.retire_idle(0.0)
            time.sleep(0)

    presser = threading.Thread(target=press)
    presser.start()
    failed: list[BaseException] = []

    def use() -> None:
        try:
            for _ in range(25):
                with here.open_segment(there.segment_name, timeout=HANG_S) as segment:
                    segment.write(local, segment.buffer("target"))
        except BaseException as error:
            failed.append(error)

    users = [threading.Thread(target=use) for _ in range(3)]
    for user in users:
        user.start()
    for user in users:
        user.join(60)
    over.set()
    presser.join(HANG_S)
    assert failed == []
    here.roster.retire_idle(0.0)
    wait_until(lambda: here.peers() == [], HANG_S)
    wait_until(lambda: there.peers() == [], HANG_S)
    wait_until(lambda: told(here).of(there)[-1] == "departed", HANG_S)
    counts = Counter(told(here).of(there))
    assert counts["opened"] == counts["closed"]


def test_a_use_that_was_faster_than_the_end_of_a_retirement_keeps_the_peer(make: Make) -> None:
    here, there = make(), make()
    with here.open_segment(there.segment_name) as segment:
        peer = segment.peer
    here.roster._retired(peer)  # its release has ended, and it has been woken since
    assert state(here) == ["live"]
    hears(here, there, ["opened", "closed"])


# -------------------------------------------------------------------- room


def test_an_idle_peer_makes_room_for_a_newcomer_and_is_served_again_unseen(make: Make) -> None:
    small, first, second = make(max=1), make(), make()
    one = Pair(first, small)
    one.write(1)
    two = second.open_segment(small.segment_name, timeout=HANG_S)
    wait_until(lambda: state(first) == ["dormant"])
    hears(small, first, ["departed"], "it retired: it needs room")
    assert two.buffer("target").length == 1 << 12
    wait_until(lambda: _writes(one, 3), HANG_S)  # when the second one is idle in its turn
    assert state(second) == ["dormant"]


def _writes(pair: Pair, value: int) -> bool:
    try:
        pair.write(value)
    except PeerRefused:
        return False
    return True


def test_a_peer_with_work_pending_is_left_alone_and_the_newcomer_is_refused_until_there_is_room(
    make: Make,
) -> None:
    small, first, second = make(max=1), make(), make()
    one = Pair(first, small)
    mock = tent_mock.controller(first, "mock")
    mock.plan("hang")
    one.local.array[:] = 7
    batch = one.segment.submit(
        tent.Opcode.WRITE, one.local, [0], one.segment.buffer("target"), [0], 1 << 12
    )
    mock.wait_held(1)
    with pytest.raises(PeerRefused, match=r"keeps 1 sessions already.*raise peers\.max there"):
        second.open_segment(small.segment_name, timeout=2.0)
    mock.clear()
    mock.release()
    batch.wait(HANG_S)
    second.open_segment(small.segment_name, timeout=HANG_S)
    assert state(first) in (["dormant"], ["retiring"])


def test_many_threads_that_need_a_silent_name_all_fail_and_say_why(make: Make) -> None:
    here = make({"call_timeout_s": 1.0})
    with_port = make()
    name = with_port.segment_name
    with_port.close()
    failed: list[str] = []

    def use() -> None:
        for _ in range(3):
            with pytest.raises(UnknownSegment) as error:
                here.open_segment(name)
            failed.append(str(error.value))

    threads = [threading.Thread(target=use) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert len(failed) == 3 * 64
    real = [text for text in failed if "it is being looked for" not in text]
    assert 1 <= len(real) <= 64
    assert all(name in text for text in failed)
    assert here.roster._opening == {}


@pytest.mark.slow
def test_without_a_descriptor_idle_peers_make_room_and_without_those_it_says_what_is_lacking() -> (
    None
):
    config = {"transports": {"shm": {"enable": True}}, "log": {"level": "error"}}
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))"
    with (
        tent.Engine(config) as one,
        tent.Engine(config) as other,
        PeerProcess(config, before=limit) as here,
    ):
        here.run("import contextlib, tent_core.remote; left = []")
        fill = "with contextlib.suppress(OSError):\n    while True: left.append(os.dup(0))"
        here.run(fill)
        error = """
try:
    engine.open_segment(name)
except tent.TransportError as error:
    found = str(error)
found"""
        assert "no descriptor is left" in here.run(error, name=one.segment_name)
        here.run("[os.close(left.pop()) for _ in range(8)]")
        here.run("first = engine.open_segment(name)", name=one.segment_name)
        here.run(fill)
        here.run("second = engine.open_segment(name)", name=other.segment_name)
        here.run("[os.close(one) for one in left]")
        found = dict(here.run("[(peer.name, peer.state) for peer in engine.peers()]"))
        assert found == {one.segment_name: "dormant", other.segment_name: "live"}


# -------------------------------------------------------------------- nothing is left


def census() -> Counter[str]:
    """How many objects of the engine there are, by type."""
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())
    return Counter(k.__qualname__ for k in kinds if str(k.__module__).startswith("tent_core"))


def come_and_go(lasting: tent.Engine) -> None:
    with engine_of() as visitor:
        pair = Pair(visitor, lasting)
        pair.write(3)
        there = lasting.open_segment(visitor.segment_name)
        there.notify("hello", b"")
        there.close()
        lasting.unregister(pair.target)
    wait_until(lambda: lasting.peers() == [])


def test_no_object_of_a_peer_that_has_gone_is_kept(make: Make) -> None:
    """So closing takes no longer for the peers that ever were."""
    lasting = make()
    for _ in range(3):
        come_and_go(lasting)
    before = census()
    for _ in range(20):
        come_and_go(lasting)
    wait_until(lambda: not census() - before, HANG_S, "the census to be what it was")


STOPPED_PEERS = 3


@pytest.mark.slow
@pytest.mark.parametrize("retiring", [False, True])
def test_closing_is_bounded_and_quiet_while_peers_are_stopped(
    retiring: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"transports": {"tcp": {"enable": True}}, "log": {"level": "error"}}
    here = tent.Engine(config)
    peers = [PeerProcess(config) for _ in range(STOPPED_PEERS)]
    try:
        memory = here.register(np.zeros(1 << 12, np.uint8), name="memory")
        for peer in peers:
            here.open_segment(peer.segment_name)
            peer.run("segment = engine.open_segment(name)", name=here.segment_name)
        assert len(here.peers()) == STOPPED_PEERS
        for peer in peers:
            peer.stop()
        if retiring:
            here.roster.retire_idle(0.0)
        began = time.monotonic()
        here.close()
        assert time.monotonic() - began < 12  # it promises about 5 s; this machine may be busy
        assert memory.length == 1 << 12
        assert "Traceback" not in capsys.readouterr().err
    finally:
        here.close()
        for peer in peers:
            peer.resume()
            peer.kill()


def test_what_is_known_of_peers_is_plain_and_complete(make: Make) -> None:
    here, there = make(), make()
    pair = Pair(here, there)
    pair.write(1)
    (peer,) = here.peers()
    found = json.loads(json.dumps(peer.as_dict()))
    assert found["name"] == there.segment_name
    assert found["incarnation"] == there.incarnation.hex()
    assert found["transports"]["mock"]["bytes"] == 1 << 12
    assert (found["opened"], found["opens"], found["handles"]) == (True, False, 1)
    (back,) = there.peers()
    assert (back.opened, back.opens, back.state) == (False, True, "open")
