"""Peers depart in the middle of everything: rounds with a seed each, on real transports and in real time."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

import tent_core as tent
from tent_core.testing import wait_until
from tent_core.testing.peers import Nursery, PeerProcess
from tent_core.types import Status

from .conftest import Make
from .support import changed_bytes, held_by_family, often, only, program, soon_no_more_than

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROUNDS = often(10, 200)
TRANSPORTS = ("shm", "tcp")
SIZE = 1 << 20
BLOCK = 4096
OFFSETS = np.arange(0, SIZE, BLOCK)
BOUND_S = 10.0
ENDS = {Status.COMPLETED, Status.FAILED, Status.CANCELED, Status.TIMEOUT, Status.INVALID}


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as made:
        yield made


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, tent.Engine]]:
    """One long-lived engine for each transport."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(tent.Engine(only(name))) for name in TRANSPORTS}


class Round:
    """What one round needs: a transport, an engine of it here, randomness, peers and threads that end."""

    def __init__(self, seed: int, nursery: Nursery, engine: tent.Engine, transport: str) -> None:
        self.random = random.Random(seed)
        self.here = engine
        self.transport = transport
        self._nursery = nursery
        self._peers: list[PeerProcess] = []
        self._threads: list[threading.Thread] = []
        self._raised: list[BaseException] = []

    def peer(self) -> PeerProcess:
        """An engine in a fresh process, with a buffer `target`."""
        peer = PeerProcess(only(self.transport), nursery=self._nursery)
        self._peers.append(peer)
        peer.run(program("restless"))
        peer.run("target = engine.allocate(size, name='target')", size=SIZE)
        return peer

    def start(self, call: Callable[[], object]) -> None:
        """Run `call` in a thread, which has to end within the round."""

        def run() -> None:
            try:
                call()
            except BaseException as error:
                self._raised.append(error)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def leaves(self, peer: PeerProcess, longest: float = 0.03) -> None:
        """In a while the peer closes its engine or is killed."""
        delay, killed = self.random.uniform(0, longest), self.random.random() < 0.5

        def leave() -> None:
            time.sleep(delay)
            peer.kill() if killed else peer.begin("engine.close()")

        self.start(leave)

    def pause(self, longest: float = 0.03) -> None:
        """Wait for a random time."""
        time.sleep(self.random.uniform(0, longest))

    def end(self) -> None:
        """All that was started has ended, and of the peers nothing is left."""
        for thread in self._threads:
            thread.join(BOUND_S)
            assert not thread.is_alive(), "something waits for a peer that has left"
        for error in self._raised:
            raise error
        wait_until(lambda: not self.here.peers(), BOUND_S, "the peers to be forgotten")
        held = self.here.stats()["transports"][self.transport]["holdings"]
        assert held["endpoints"] == 0
        self.here.poll_notifications()

    def kill(self) -> None:
        """Whatever happened, end the processes."""
        for peer in self._peers:
            peer.kill()


Rounds = Callable[[], Iterator[Round]]


@pytest.fixture
def rounds(nursery: Nursery, engines: dict[str, tent.Engine]) -> Rounds:
    """ROUNDS rounds, alternating between the transports; a failure names its seed."""

    def made() -> Iterator[Round]:
        for seed in range(ROUNDS):
            transport = TRANSPORTS[seed % len(TRANSPORTS)]
            one = Round(seed, nursery, engines[transport], transport)
            try:
                yield one
                one.end()
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
            finally:
                one.kill()

    return made


def submit_until_it_leaves(
    segment: tent.Segment, local: tent.Buffer, batches: list[tent.Batch]
) -> None:
    """Submit batches, writes and reads in turn, and keep them all; the error names the peer."""
    remote = segment.buffer("target")

    def submit_for_ever() -> None:
        for opcode in itertools.cycle(["write", "read"]):
            batches.append(segment.submit(opcode, local, OFFSETS, remote, OFFSETS, BLOCK))
            batches[-1].wait(BOUND_S, check=False)

    with pytest.raises(tent.TentError, match=re.escape(segment.name)):
        submit_for_ever()


def write_until_it_leaves(segment: tent.Segment, local: tent.Buffer, name: str) -> None:
    """Write all of `local` to the buffer of that name, which may be another one each time."""
    while segment.peer.departed is None:
        with contextlib.suppress(tent.TentError):
            segment.write(local, segment.buffer(name))


def test_a_departure_during_submit_ends_every_batch(rounds: Rounds) -> None:
    for round_ in rounds():
        here, peer = round_.here, round_.peer()
        local = here.register(np.zeros(SIZE, np.uint8))
        batches: list[tent.Batch] = []
        with here.open_segment(peer.segment_name) as segment:
            for _ in range(2):
                round_.start(partial(submit_until_it_leaves, segment, local, batches))
            round_.leaves(peer)
            round_.end()
        for batch in batches:
            assert batch.done
            assert set(batch.status.tolist()) <= ENDS
        local.unregister()


def test_a_departure_during_refreshes_is_survived(rounds: Rounds) -> None:
    for round_ in rounds():
        here, peer = round_.here, round_.peer()
        local = here.register(np.zeros(BLOCK, np.uint8))
        peer.run("register_for_ever(engine)")
        with here.open_segment(peer.segment_name) as segment:
            for _ in range(2):
                round_.start(partial(write_until_it_leaves, segment, local, "brief"))
            round_.leaves(peer)
            round_.end()
        local.unregister()


def test_a_departure_during_a_revocation_ends_it(rounds: Rounds) -> None:
    for round_ in rounds():
        here, peer = round_.here, round_.peer()
        ours = [here.allocate(SIZE, name="0"), here.register(np.zeros(SIZE, np.uint8), name="1")]
        arrays = [buffer.array for buffer in ours]
        for buffer in ours:
            write = "write_for_ever(engine, owner, name)"
            peer.run(write, owner=here.segment_name, name=buffer.name)
        round_.leaves(peer)
        for buffer, array in zip(ours, arrays, strict=True):
            round_.pause(0.02)
            buffer.unregister(timeout=BOUND_S)
            assert changed_bytes(array, 0.01) == 0


def test_a_departure_during_another_departure_leaves_nothing_either(rounds: Rounds) -> None:
    for round_ in rounds():
        here, peers = round_.here, [round_.peer(), round_.peer()]
        local = here.allocate(SIZE, name="ours")
        names = [here.segment_name, *(peer.segment_name for peer in peers)]
        for peer in peers:
            for owner in names:
                if owner != peer.segment_name:
                    name = "ours" if owner == here.segment_name else "target"
                    peer.run("write_for_ever(engine, owner, name)", owner=owner, name=name)
            segment = here.open_segment(peer.segment_name)
            round_.start(partial(write_until_it_leaves, segment, local, "target"))
        for peer in peers:
            round_.leaves(peer, 0.01)
        round_.end()
        local.unregister()


def test_a_departure_during_close_does_not_hold_it_up(rounds: Rounds) -> None:
    before = None
    for round_ in rounds():
        peer = round_.peer()
        engine = tent.Engine(only(round_.transport))
        local = engine.allocate(SIZE, name="ours")
        peer.run("write_for_ever(engine, owner, 'ours')", owner=engine.segment_name)
        segment = engine.open_segment(peer.segment_name)
        round_.start(partial(write_until_it_leaves, segment, local, "target"))
        round_.leaves(peer)
        round_.pause()
        began = time.monotonic()
        engine.close()
        assert time.monotonic() - began < BOUND_S
        round_.end()
        round_.kill()
        if round_.transport == TRANSPORTS[0] and before is None:
            before = held_by_family()
    assert before is not None
    soon_no_more_than(before)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_request_that_crosses_a_retirement_never_fails(
    transport: str, make: Make, nursery: Nursery
) -> None:
    idle_s = 0.03
    here = make(only(transport, peers={"idle_timeout_s": idle_s}))
    choices = random.Random(7)
    local = here.allocate(SIZE)
    with PeerProcess(only(transport), nursery=nursery) as peer:
        peer.run("target = engine.allocate(size, name='target')", size=SIZE)
        segment = here.open_segment(peer.segment_name)
        remote = segment.buffer("target")
        prepared = segment.prepare("write", local, remote)
        calls: list[Callable[[], object]] = [
            prepared.run,
            lambda: segment.read(local, remote),
            lambda: segment.submit("write", local, OFFSETS, remote, OFFSETS, BLOCK).wait(BOUND_S),
            lambda: segment.notify("still here"),
            lambda: segment.buffer("target"),
            lambda: here.open_segment(peer.segment_name).close(),
        ]
        for _ in range(ROUNDS * 5):
            time.sleep(choices.choice([idle_s * choices.uniform(0.5, 2.0), 0.0]))
            choices.choice(calls)()
        (info,) = here.peers()
        assert info.handshakes > 1, "it was never retired"
        assert info.handles == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_peer_that_only_reads_is_never_idle_to_the_side_that_is_read(
    transport: str, make: Make, nursery: Nursery
) -> None:
    """A passive side cannot see one-sided traffic: its own idle time does not end what peers use."""
    idle_s = 0.1
    here = make(only(transport, peers={"idle_timeout_s": idle_s}))
    for memory in (here.allocate(SIZE, name="0"), here.register(bytearray(SIZE), name="1")):
        memory.array[:] = 7
    choices = random.Random(8)
    with PeerProcess(only(transport), nursery=nursery) as peer:
        peer.run("import time; segment = engine.open_segment(owner)", owner=here.segment_name)
        peer.run("local = engine.allocate(size)", size=SIZE)
        for _ in range(ROUNDS * 2):
            time.sleep(choices.choice([0.0, 1.5 * idle_s, 3 * idle_s]))
            peer.run("segment.read(local, segment.buffer(n))", n=choices.choice("01"))
            assert peer.run("set(local.array.tolist())") == {7}
        assert peer.run("[p.handshakes for p in engine.peers()]") == [1]


def test_two_sides_that_connect_to_each_other_while_one_closes_do_not_wait_for_each_other(
    make: Make,
) -> None:
    """With a transport that exchanges messages to connect, in both directions at once."""
    handshake = {"transports": {"mock": {"enable": True, "handshake": True}}}
    config = {**handshake, "log": {"level": "error"}}
    lasting = make(config)
    mine = lasting.allocate(BLOCK, name="pool")
    for seed in range(ROUNDS * 2):
        choices = random.Random(seed)
        leaving = tent.Engine(config)
        theirs = leaving.allocate(BLOCK, name="pool")
        threads = [
            threading.Thread(target=write_once, args=way, daemon=True)
            for way in ((lasting, mine, leaving), (leaving, theirs, lasting))
        ]
        for thread in threads:
            thread.start()
        time.sleep(choices.uniform(0, 0.02))
        began = time.monotonic()
        leaving.close()
        for thread in threads:
            thread.join(BOUND_S)
            assert not thread.is_alive(), f"seed {seed}"
        assert time.monotonic() - began < BOUND_S, f"seed {seed}"
        wait_until(lambda: not lasting.peers(), BOUND_S, f"the peer to be forgotten, seed {seed}")


def write_once(engine: tent.Engine, local: tent.Buffer, other: tent.Engine) -> None:
    """Open the other engine and write, if it is still there."""
    with contextlib.suppress(tent.TentError), engine.open_segment(other.segment_name) as segment:
        segment.write(local, segment.buffer("pool"), timeout=5.0)
