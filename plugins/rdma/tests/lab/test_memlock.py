"""A limit of locked memory that a few peers would exhaust if they left anything behind."""

from __future__ import annotations

import pytest
from engines import PATIENCE_S, Start, config
from kernel import resources

from tent_core.testing.churn import POOL, VISIT
from tent_core.testing.peers import PeerProcess
from tent_core.testing.waiting import wait_until

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(600)]

PEERS = 20
LIMIT = 80 << 20
"""Bytes: beside the pool, two connections that have carried notifications fit, and a third does not."""

UNPRIVILEGED = (
    "setpriv",
    "--bounding-set=-ipc_lock",
    "--inh-caps=-ipc_lock",
    "prlimit",
    f"--memlock={LIMIT}",
)


def test_twenty_peers_one_after_the_other_succeed_under_a_limit_that_allows_few(
    start: Start,
) -> None:
    settings = config(peers={"grace_s": 2.0})
    with PeerProcess(settings, wrapper=UNPRIVILEGED, start_timeout=PATIENCE_S) as lasting:
        lasting.run(f"pool = engine.allocate({POOL}, name='pool')", timeout=PATIENCE_S)
        before = resources(lasting.pid)
        for _ in range(PEERS):
            peer = start(settings)
            peer.run(VISIT, timeout=PATIENCE_S, owner=lasting.segment_name)
            peer.close(PATIENCE_S)
        wait_until(lambda: not lasting.run("engine.peers()"), PATIENCE_S, "all have gone")
        assert resources(lasting.pid) == before
        assert lasting.run("engine.stats()['notifications']['received']") == PEERS


def test_a_buffer_that_cannot_be_locked_is_left_to_other_transports(start: Start) -> None:
    settings = config("rdma", "tcp")
    with PeerProcess(settings, wrapper=UNPRIVILEGED, start_timeout=PATIENCE_S) as lasting:
        size = 2 * LIMIT
        lasting.run(f"large = engine.allocate({size}, name='large')", timeout=PATIENCE_S)
        peer = start(settings)
        peer.run("source = engine.allocate(1 << 16)", timeout=PATIENCE_S)
        peer.run(
            "segment = engine.open_segment(owner)\n"
            "segment.write(source, segment.buffer('large')[: 1 << 16])",
            timeout=PATIENCE_S,
            owner=lasting.segment_name,
        )
        assert set(peer.run("engine.stats()['transports']")) >= {"tcp"}
        assert resources(lasting.pid)["mr"] == 0
