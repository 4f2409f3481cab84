"""The kernel's own count: a registration for each buffer and NIC, and nothing of a peer that has gone."""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest
from engines import PATIENCE_S, Make, Start, config
from kernel import resources

import tent_core as tent
from tent_core.testing.churn import POOL, VISIT, WRITE_ON, exchange
from tent_core.testing.peers import PeerProcess
from tent_core.testing.waiting import wait_until
from tent_rdma.devices import ChosenDevice

FULL = os.environ.get("TENT_TEST_FULL") == "1"
PEERS = 40 if FULL else 10
WARM_UP = 3

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(1400 if FULL else 600)]


def test_a_buffer_is_registered_once_on_every_nic(
    make: Make, chosen: tuple[ChosenDevice, ...]
) -> None:
    engine = make()
    nics = len(chosen)
    for count in range(1, 4):
        engine.allocate(1 << 16)
        assert resources(os.getpid())["mr"] == count * nics
    for buffer in [engine.allocate(1 << 16), engine.allocate(1 << 20)]:
        buffer.unregister()
    assert resources(os.getpid())["mr"] == 3 * nics


def test_a_connection_that_has_carried_a_notification_has_two_registrations_more(
    make: Make, start: Start, chosen: tuple[ChosenDevice, ...]
) -> None:
    engine, nics, buffers = make(), len(chosen), 3
    made = [engine.allocate(1 << 16) for _ in range(buffers)]
    for number in range(1, 3):
        peer = start()
        peer.run(f"pool = engine.allocate({POOL}, name='pool')", timeout=PATIENCE_S)
        segment = engine.open_segment(peer.segment_name)
        segment.write(made[0][:POOL], segment.buffer("pool"))
        assert resources(os.getpid())["mr"] == buffers * nics + 2 * (number - 1)
        assert resources(peer.pid)["mr"] == nics
        carried = _carried(engine)

        def notify(segment: tent.Segment = segment, carried: int = carried) -> bool:
            segment.notify("written")
            return _carried(engine) > carried

        wait_until(notify, PATIENCE_S, "rdma carries a notification")
        assert resources(os.getpid())["mr"] == buffers * nics + 2 * number
        assert resources(peer.pid)["mr"] == nics + 2


def _carried(engine: tent.Engine) -> int:
    """Messages of notifications that went over rdma."""
    notifications = engine.stats()["notifications"]
    carried: dict[str, int] = notifications["carried"]
    return carried.get("rdma", 0)


@pytest.mark.parametrize("role", ["passive", "active"])
def test_nothing_of_a_departed_peer_stays(role: str, make: Make, start: Start) -> None:
    lasting = make(config(peers={"grace_s": 2.0}))
    lasting.allocate(POOL, name="pool")
    before: Counter[str] = Counter()
    for number in range(PEERS):
        if number == WARM_UP:
            before = _when_alone(lasting)
        peer = start(config(peers={"grace_s": 2.0}))
        _visit(lasting, peer, role, killed=number % 3 == 2)
    assert _when_alone(lasting) == before
    _close(lasting)
    assert resources(os.getpid()) == Counter(ctx=0, pd=0, cq=0, qp=0, mr=0, pinned_kib=0)


def _visit(lasting: tent.Engine, peer: PeerProcess, role: str, *, killed: bool) -> None:
    if role == "passive":
        peer.run(VISIT, timeout=PATIENCE_S, owner=lasting.segment_name)
        if killed:
            received = _received(lasting)
            peer.begin(WRITE_ON)
            wait_until(lambda: _received(lasting) > received, PATIENCE_S, "it writes on")
    else:
        peer.run(f"pool = engine.allocate({POOL}, name='pool')", timeout=PATIENCE_S)
        exchange(lasting, peer.segment_name)
    if killed:
        peer.kill()
    else:
        peer.close(PATIENCE_S)


def _received(engine: tent.Engine) -> int:
    notifications: dict[str, int] = engine.stats()["notifications"]
    return notifications["received"]


def _when_alone(engine: tent.Engine) -> Counter[str]:
    """What is held once no peer is known any more."""
    wait_until(lambda: not engine.peers(), PATIENCE_S, "all peers are forgotten")
    return resources(os.getpid())


def _close(engine: tent.Engine) -> None:
    began = time.monotonic()
    engine.close()
    print(f"close() took {time.monotonic() - began:.3f} s")
