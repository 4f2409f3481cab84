"""Peers come, write, notify and leave, many of them killed: an engine then holds what it held before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import tent_core as tent
from tent_core.testing import Held, wait_until
from tent_core.testing.peers import Nursery, PeerProcess

from .conftest import Make
from .support import held_by_family, often, only, program, soon_no_more_than

SIZE = 1 << 18
BOTH = only("shm", "tcp")
VISITS = often(20, 200)
VISITED = often(6, 60)
WARM_UP = 4


def comes_and_goes(nursery: Nursery, owner: str, buffer: str, value: int) -> None:
    """One peer that writes by both transports; every third is killed."""
    peer = PeerProcess(BOTH, nursery=nursery)
    try:
        peer.run(program("visitor"))
        count = peer.run("visit(engine, owner, name, value)", owner=owner, name=buffer, value=value)
        assert count == SIZE
        if value % 3:
            peer.close()
    finally:
        peer.kill()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_engine_that_many_peers_visit_holds_afterwards_what_it_held_before(
    make: Make, nursery: Nursery
) -> None:
    here = make(BOTH)
    targets = [here.allocate(SIZE, name="0"), here.register(np.zeros(SIZE, np.uint8), name="1")]
    before: Held | None = None
    with ThreadPoolExecutor(2) as pool:
        for i in range(0, VISITS, 2):
            pair = [
                pool.submit(comes_and_goes, nursery, here.segment_name, t.name, 1 + (i + j) % 250)
                for j, t in enumerate(targets)
            ]
            for visit in pair:
                visit.result(60)
            if i + 2 == WARM_UP:
                before = once_alone(here, None)
    once_alone(here, before)
    assert here.stats()["notifications"]["received"] == VISITS
    for target in targets:
        target.unregister(timeout=5)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_engine_that_visits_many_peers_holds_afterwards_what_it_held_before(
    make: Make, nursery: Nursery
) -> None:
    here = make(BOTH)
    local = here.register(np.full(SIZE, 7, np.uint8))
    before: Held | None = None
    for i in range(1, 1 + VISITED):
        peer = PeerProcess(BOTH, nursery=nursery)
        try:
            peer.run("target = engine.allocate(size, name='target')", size=SIZE)
            with here.open_segment(peer.segment_name) as segment:
                for transport in ("shm", "tcp"):
                    segment.write(local, segment.buffer("target"), transport=transport)
            assert peer.run("int((target.array == 7).sum())") == SIZE
            if i % 3:
                peer.close()
        finally:
            peer.kill()
        if i == WARM_UP // 2:
            before = once_alone(here, None)
    once_alone(here, before)


def once_alone(engine: tent.Engine, before: Held | None) -> Held:
    """What is held once every peer has departed; soon no more than `before`."""
    wait_until(lambda: not engine.peers() and not engine.stats()["sessions"], 10, "all to depart")
    if before is not None:
        soon_no_more_than(before)
    return held_by_family()
