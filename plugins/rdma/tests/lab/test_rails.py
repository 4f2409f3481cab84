"""Rails that fail, lose packets and return, while work is under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from engines import PATIENCE_S, Make, Start, config
from kernel import run, sent, set_link

import tent_core as tent
from tent_core.testing.peers import PeerProcess
from tent_core.testing.waiting import wait_until
from tent_rdma.devices import ChosenDevice

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(600)]

Rails = tuple[ChosenDevice, ChosenDevice]
MIB = 1 << 20
SPAN = 16 * MIB
QUICK = {"acknowledge_timeout": 12, "cooldown": "500ms"}
"""A lost packet is sent again after 17 ms."""


RECEIVES = """
while not engine.stats()["transports"]["tcp"]["holdings"].get("processes"):
    engine.allocate(4096).unregister()
"""
"""For a peer: have its receiver of tcp started, which takes longer here than a registration waits for it."""


class Stream:
    """Writes blocks to a peer's buffer, batch after batch, and compares what arrived."""

    def __init__(self, engine: tent.Engine, peer: PeerProcess) -> None:
        peer.run(f"span = engine.allocate({SPAN}, name='span')", timeout=PATIENCE_S)
        self._peer = peer
        self._random = np.random.default_rng(7)
        self._source = engine.allocate(SPAN)
        self._segment = engine.open_segment(peer.segment_name)
        self._target = self._segment.buffer("span")

    def begin(self, block: int = 64 << 10) -> tent.Batch:
        """Fresh bytes for the whole span, on their way."""
        self._source.array[:] = self._random.integers(0, 256, SPAN, np.uint8)
        offsets = np.arange(0, SPAN, block)
        return self._segment.submit(
            "write", self._source, offsets, self._target, offsets, block, timeout=PATIENCE_S
        )

    def arrived(self) -> bool:
        """Whether the peer holds what was written last."""
        there = self._peer.run("span.array.tobytes()", timeout=PATIENCE_S)
        return bool(there == self._source.array.tobytes())


@contextmanager
def down(*rails: ChosenDevice) -> Iterator[None]:
    """Links that are down within the block, and up after it."""
    for rail in rails:
        set_link(rail.netdev, "down")
    try:
        yield
    finally:
        for rail in rails:
            set_link(rail.netdev, "up")
        wait_until(lambda: all(_active(rail) for rail in rails), PATIENCE_S, "the links are up")


def _active(rail: ChosenDevice) -> bool:
    state = Path(f"/sys/class/infiniband/{rail.name}/ports/{rail.port}/state").read_text()
    return "ACTIVE" in state


def _carries(stream: Stream, rail: ChosenDevice) -> bool:
    before = sent(rail.name)
    stream.begin().wait(PATIENCE_S)
    return sent(rail.name) > before + SPAN // 1024 // 10


def test_both_rails_carry_one_batch(make: Make, start: Start, rails: Rails) -> None:
    stream = Stream(make(), start())

    def shared() -> bool:
        """Whether both carried a tenth at least; a rail that is not connected yet takes no part."""
        before = [sent(rail.name) for rail in rails]
        stream.begin().wait(PATIENCE_S)
        shares = [sent(rail.name) - old for rail, old in zip(rails, before, strict=True)]
        return min(shares) > SPAN // 1024 // 10

    wait_until(shared, PATIENCE_S, "both rails share a batch")
    assert stream.arrived()


def test_a_rail_that_goes_down_loses_no_request_and_carries_again_when_it_returns(
    make: Make, start: Start, rails: Rails
) -> None:
    settings = config(rdma=QUICK)
    engine = make(settings)
    stream = Stream(engine, start(settings))
    stream.begin().wait(PATIENCE_S)
    batch = stream.begin()
    with down(rails[0]):
        batch.wait(PATIENCE_S)
        assert stream.arrived()
        stream.begin().wait(PATIENCE_S)
        assert stream.arrived()
    wait_until(lambda: _carries(stream, rails[0]), PATIENCE_S, "the rail carries again")
    assert stream.arrived()
    assert engine.stats()["failovers"] == 0


def test_bytes_are_right_when_one_packet_of_a_hundred_is_lost(
    make: Make, start: Start, rails: Rails
) -> None:
    stream = Stream(make(config(rdma=QUICK)), start(config(rdma=QUICK)))
    stream.begin().wait(PATIENCE_S)
    for rail in rails:
        run("tc", "qdisc", "add", "dev", rail.netdev, "root", "netem", "loss", "1%")
    try:
        batch = stream.begin()
        batch.wait(PATIENCE_S)
        assert stream.arrived()
    finally:
        for rail in rails:
            run("tc", "qdisc", "del", "dev", rail.netdev, "root")


def test_tcp_takes_over_where_the_policy_lists_it_and_no_rail_is_left(
    make: Make, start: Start, rails: Rails
) -> None:
    settings = config("rdma", "tcp", rdma=QUICK)
    engine, peer = make(settings), start(settings)
    peer.run(RECEIVES, timeout=PATIENCE_S)
    stream = Stream(engine, peer)
    stream.begin().wait(PATIENCE_S)
    batch = stream.begin()
    with down(*rails):
        batch.wait(PATIENCE_S)
        assert stream.arrived()
        stream.begin().wait(PATIENCE_S)
        assert stream.arrived()
    assert engine.stats()["failovers"] > 0
