"""Device memory at the peer is reached through host memory that the peer lends, and copies that it makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tent_core as tent
import tent_mock
from tent_core import lending
from tent_core.plugins import Registry
from tent_core.testing import wait_until
from tent_core.types import MemoryKind, MemoryPair, Opcode, Permission, Priority, Reach, Status

KIB = 1 << 10
SIZE = 128 * KIB
CHUNK = 8 * KIB
NEVER_S = 30.0
GPU, DRAM = MemoryKind.GPU, MemoryKind.DRAM
COPIES = frozenset({MemoryPair(GPU, DRAM), MemoryPair(DRAM, GPU)})


class World:
    """Host and device memory at both sides; each side has a copy engine of its own, unknown to the other."""

    def __init__(self, **config: Any) -> None:
        able: dict[str, Any] = {
            "memory_pairs": COPIES,
            "reach": Reach.PROCESS,
            "cancellation": True,
        }
        net = tent_mock.declare("net", 1001, reach=Reach.NETWORK, cancellation=True)
        base = {
            "staging": {"buffers": 2, "chunk": CHUNK},
            "failover": {"max_attempts": 0},
            "log": {"level": "error"},
        }
        engines = []
        for name, number in (("theirs", 1003), ("mine", 1002)):
            registry = Registry.of(net, tent_mock.declare(name, number, clock=None, **able))
            policy = [{"name": "any", "transports": ["net", name]}]
            extra = config if name == "theirs" else {}
            engines.append(tent.Engine({**base, "policy": policy, **extra}, plugins=registry))
        self.there, self.here = engines
        self.host = self.here.allocate(SIZE, name="host")
        draw = np.random.default_rng(7)
        self.host.array[:] = draw.integers(0, 256, SIZE, np.uint8)
        self.mine = draw.integers(0, 256, SIZE, np.uint8)
        self.device = self.here.register(self.mine, location="cuda:0")
        self.theirs = np.zeros(SIZE, np.uint8)
        self.there.register(self.theirs, name="device", location="cuda:0")
        self.read_only = np.zeros(KIB, np.uint8)
        self.there.register(
            self.read_only,
            name="read-only",
            location="cuda:0",
            permission=Permission.GLOBAL_READ_ONLY,
        )
        self.segment = self.here.open_segment(self.there.segment_name)
        self.remote = self.segment.buffer("device")

    def mocks(self) -> list[tent_mock.Controller]:
        return [
            tent_mock.controller(engine, name)
            for engine, name in ((self.here, "net"), (self.here, "mine"), (self.there, "theirs"))
        ]

    def submit(self, opcode: str = "write", **options: Any) -> tent.Batch:
        return self.segment.submit(
            opcode, self.host, np.array([0]), self.remote, np.array([0]), SIZE, **options
        )

    def free(self) -> int:
        borrowed = self.here.stager.lent_by(self.segment.peer)
        return borrowed.slots.free if borrowed is not None else -1

    def close(self) -> None:
        with contextlib.suppress(LookupError):
            for mock in self.mocks():
                mock.clear()
                mock.release()
        self.here.close()
        self.there.close()


Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    worlds: list[World] = []

    def made(**config: Any) -> World:
        worlds.append(World(**config))
        return worlds[-1]

    yield made
    for world in worlds:
        world.close()


def statuses(batch: tent.Batch) -> list[Status]:
    return [Status(s) for s in batch.status.tolist()]


def test_a_write_into_the_peers_device_memory_arrives(make: Make) -> None:
    world = make()
    world.segment.write(world.host, world.remote)
    assert (world.theirs == world.host.array).all()
    assert world.free() == 2


def test_a_read_from_the_peers_device_memory_arrives(make: Make) -> None:
    world = make()
    world.theirs[:] = np.arange(SIZE) % 251
    world.segment.read(world.host, world.remote)
    assert (world.host.array == world.theirs).all()


@pytest.mark.parametrize("opcode", ["write", "read"])
def test_device_memory_at_both_sides_is_staged_at_both(make: Make, opcode: str) -> None:
    world = make()
    world.theirs[:] = np.arange(SIZE) % 241
    before = world.mine.copy(), world.theirs.copy()
    batch = world.segment.submit(opcode, world.device, [0], world.remote, [0], SIZE)
    batch.wait(NEVER_S)
    assert (world.mine == world.theirs).all()
    assert (world.mine == before[opcode == "read"]).all()
    assert batch.transports() == {"mine+net+peer": SIZE}
    assert (world.free(), world.here.stager.slots.free) == (2, 2)


def test_many_requests_end_exactly(make: Make) -> None:
    world = make()
    draw = np.random.default_rng(1)
    at, to = draw.permutation(128)[:40] * KIB, draw.permutation(128)[:40] * KIB
    world.segment.write_many(world.host, at, world.remote, to, 700)
    for a, b in zip(at, to, strict=True):
        assert (world.theirs[b : b + 700] == world.host.array[a : a + 700]).all()


@pytest.mark.parametrize("opcode", ["write", "read"])
def test_a_copy_that_fails_at_the_peer_fails_its_request_alone_and_says_why(
    make: Make, opcode: str
) -> None:
    world = make()
    world.mocks()[2].plan("fail", at=3)
    offsets = np.arange(8) * 8 * KIB
    batch = world.segment.submit(
        opcode, world.host, offsets, world.remote, offsets[::-1].copy(), CHUNK
    )
    batch.wait(NEVER_S, check=False)
    assert sorted(statuses(batch)) == [Status.COMPLETED] * 7 + [Status.FAILED]
    assert "the peer could not copy" in batch.explain_failures()
    assert "theirs was told to fail" in batch.explain_failures()
    assert world.free() == 2


def test_it_is_cancelled_while_it_is_on_the_wire_and_while_it_waits(make: Make) -> None:
    world = make()
    world.mocks()[0].plan("hang")
    batch = world.submit()
    world.mocks()[0].wait_held(2)
    batch.cancel()
    batch.wait(NEVER_S, check=False)
    assert statuses(batch) == [Status.CANCELED]
    wait_until(lambda: world.free() == 2)


def test_it_ends_at_its_deadline_while_the_peer_copies(make: Make) -> None:
    world = make()
    world.submit().wait(NEVER_S)
    world.mocks()[2].plan("hang")
    batch = world.submit(timeout=0.1)
    batch.wait(NEVER_S, check=False)
    assert statuses(batch)[0] in (Status.TIMEOUT, Status.FAILED)


def test_memory_that_was_lent_goes_when_the_peer_has_gone(make: Make) -> None:
    world = make()
    world.submit().wait(NEVER_S)
    assert world.there.stager.lender.holdings() == 1
    world.here.close()
    wait_until(lambda: world.there.stager.lender.holdings() == 0)
    wait_until(lambda: all("staging" not in b.name for b in world.there.buffers()))


def test_a_peer_that_was_retired_is_asked_for_memory_again(make: Make) -> None:
    world = make()
    world.submit().wait(NEVER_S)
    peer = world.segment.peer
    wait_until(lambda: peer.retire(0.0, "test"))
    wait_until(lambda: all("staging" not in b.name for b in world.there.buffers()))
    world.theirs[:] = 0
    world.submit().wait(NEVER_S)
    assert (world.theirs == world.host.array).all()


def test_explain_shows_what_the_peer_does(make: Make) -> None:
    world = make()
    found = world.here.explain(world.segment, remote_memory="cuda:0")
    assert found.route is not None
    assert found.route.at_peer
    assert found.route.copies == ()
    assert "at the peer" in str(found)


def test_no_more_peers_than_the_settings_say_are_lent_memory(make: Make) -> None:
    world = make(staging={"buffers": 2, "chunk": CHUNK, "lent": 0})
    batch = world.submit().wait(NEVER_S, check=False)
    assert statuses(batch) == [Status.FAILED]
    assert "staging.lent" in batch.explain_failures()
    assert all("staging" not in b.name for b in world.there.buffers())


def test_sides_with_other_chunks_say_so(make: Make) -> None:
    world = make(staging={"buffers": 2, "chunk": "8KiB"})
    world.here.stager.chunk = 64 * KIB
    batch = world.submit().wait(NEVER_S, check=False)
    assert statuses(batch) == [Status.FAILED]
    assert "staging.chunk" in batch.explain_failures()


def test_two_engines_borrow_from_each_other_at_once(make: Make) -> None:
    world = make()
    source = world.there.allocate(SIZE)
    source.array[:] = 9
    world.here.register(world.read_only, name="other", location="cuda:0")
    back = world.there.open_segment(world.here.segment_name)
    both = [
        world.submit(),
        back.submit("write", source, [0], back.buffer("other"), [0], KIB),
    ]
    for batch in both:
        batch.wait(NEVER_S)
    assert (world.theirs == world.host.array).all()
    assert (world.read_only == 9).all()


# -------------------------------------------------------------------- what a peer may ask for


def _ask(world: World, message: bytes) -> bytes:
    return world.segment.peer.connection.bootstrap(lending.CHANNEL, 0, message, 5.0)


def _copy(world: World, **fields: Any) -> lending.Copy:
    d = world.remote.descriptor
    row = [d.id, d.generation, d.address, 64]
    fields.setdefault("rows", np.array([row], np.uint64))
    whole = {"opcode": Opcode.READ, "priority": Priority.LOW, "slot": 0, "seconds": 1.0}
    return lending.Copy(**{**whole, **fields})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"slot": 2}, "slot 2 of 2"),
        ({"column": 0, "value": 999}, "no buffer 999"),
        ({"column": 1, "value": 999}, "of generation 999"),
        ({"column": 2, "value": 4096}, "are not in buffer"),
        ({"column": 2, "value": 2**64 - 8}, "are not in buffer"),
        ({"column": 3, "value": CHUNK + 1}, "cannot have"),
        ({"column": 3, "value": 2**64 - 1}, "cannot have"),
        ({"column": 3, "value": 0}, "are not in buffer"),
    ],
)
def test_a_copy_outside_what_there_is_is_refused(
    make: Make, wrong: dict[str, int], message: str
) -> None:
    world = make()
    world.submit().wait(NEVER_S)
    copy = _copy(world, **({"slot": wrong["slot"]} if "slot" in wrong else {}))
    if "column" in wrong:
        copy.rows[0, wrong["column"]] = wrong["value"]
    found, why = lending.read_copied(_ask(world, lending.ask_copy(copy)), 1)
    assert found.tolist() == [Status.FAILED]
    assert message in why


def test_a_copy_that_the_owner_does_not_permit_is_refused(make: Make) -> None:
    world = make()
    world.submit().wait(NEVER_S)
    d = world.segment.buffer("read-only").descriptor
    rows = np.array([[d.id, d.generation, d.address, 64]], np.uint64)
    copy = _copy(world, opcode=Opcode.WRITE, rows=rows)
    found, why = lending.read_copied(_ask(world, lending.ask_copy(copy)), 1)
    assert found.tolist() == [Status.FAILED]
    assert "GLOBAL_READ_ONLY" in why
    allowed = _copy(world, opcode=Opcode.READ, rows=rows)
    found, _ = lending.read_copied(_ask(world, lending.ask_copy(allowed)), 1)
    assert found.tolist() == [Status.COMPLETED]


def test_an_engine_without_device_memory_lends_nothing(make: Make) -> None:
    plain = Registry.of(tent_mock.declare("net", 1001, reach=Reach.NETWORK))
    config = {"policy": [{"name": "any", "transports": ["net"]}], "log": {"level": "error"}}
    with (
        tent.Engine(config, plugins=plain) as there,
        tent.Engine(config, plugins=plain) as here,
        here.open_segment(there.segment_name) as segment,
    ):
        with pytest.raises(tent.TransportError, match="no transport copies"):
            segment.peer.connection.bootstrap(lending.CHANNEL, 0, lending.ask(CHUNK), 5.0)
        assert there.buffers() == []


@pytest.mark.parametrize(
    "message", [b"", b"L", b"X", b"C", b"L" + bytes(8), b"C" + bytes(40), b"C" * 51, b"L" * 9]
)
def test_a_message_that_means_nothing_is_refused(make: Make, message: bytes) -> None:
    world = make()
    with pytest.raises(tent.TransportError):
        _ask(world, message)
    world.submit().wait(NEVER_S)
