"""What is wrong in settings, in what peers say, and in what they still hold: a clear error, and no harm."""

from __future__ import annotations

import numpy as np
import pytest
from engines import PATIENCE_S, Make, Start, config

import tent_core as tent
from tent_core.testing.waiting import wait_until
from tent_rdma.devices import ChosenDevice

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(300)]

SIZE = 1 << 16


def test_a_device_that_does_not_exist_is_named_with_those_that_do(
    chosen: tuple[ChosenDevice, ...],
) -> None:
    with pytest.raises(tent.ConfigError) as error:
        tent.Engine(config(rdma={"devices": ["mlx9_9"]}))
    assert "mlx9_9" in str(error.value)
    assert chosen[0].name in str(error.value)


def test_no_usable_device_at_all_is_said(chosen: tuple[ChosenDevice, ...]) -> None:
    with pytest.raises(tent.ConfigError, match="RDMA"):
        tent.Engine(config(rdma={"exclude": [device.name for device in chosen]}))


def test_malformed_bootstraps_are_refused_and_transfers_go_on(make: Make, start: Start) -> None:
    engine, peer = make(), start()
    peer.run(f"pool = engine.allocate({SIZE}, name='pool')", timeout=PATIENCE_S)
    source = engine.allocate(SIZE)
    source.array[:] = 7
    segment = engine.open_segment(peer.segment_name)
    segment.write(source, segment.buffer("pool"))
    bootstrap = segment._peer.connection.bootstrap
    for payload in (b"", b"{", b'{"kind": "open"}', b'{"kind": "close", "connections": [-1]}'):
        with pytest.raises(tent.TransportError, match="rdma"):
            bootstrap("rdma", 1, payload, PATIENCE_S)
    source.array[:] = 9
    segment.write(source, segment.buffer("pool"))
    assert peer.run("int(pool.array.min())", timeout=PATIENCE_S) == 9


def test_a_key_of_a_buffer_that_is_gone_moves_nothing_and_spares_the_other_buffers(
    make: Make, start: Start
) -> None:
    engine, peer = make(), start()
    peer.run(
        f"gone, stays = engine.allocate({SIZE}, name='gone'), engine.allocate({SIZE}, name='stays')",
        timeout=PATIENCE_S,
    )
    source = engine.allocate(SIZE)
    source.array[:] = 7
    segment = engine.open_segment(peer.segment_name)
    prepared = segment.prepare("write", source, segment.buffer("gone"))
    prepared.run()
    # Behind the back of the core, which would hear of it: what a peer that lags behind would do.
    peer.run(
        "engine._transports.get('rdma').transport.remove_buffer(gone.local, 5.0)",
        timeout=PATIENCE_S,
    )
    with pytest.raises(tent.TransferFailed, match="remote access error"):
        prepared.run()
    segment.write(source, segment.buffer("stays"))
    assert peer.run("int(stays.array.min())", timeout=PATIENCE_S) == 7


def test_a_peer_with_fewer_nics_is_reached_by_what_it_has(
    make: Make, start: Start, rails: tuple[ChosenDevice, ChosenDevice]
) -> None:
    engine, peer = make(), start(config(rdma={"devices": [rails[0].name]}))
    peer.run(f"pool = engine.allocate({SIZE}, name='pool')", timeout=PATIENCE_S)
    source = engine.allocate(SIZE)
    source.array[:] = 7
    segment = engine.open_segment(peer.segment_name)
    segment.write(source, segment.buffer("pool"), timeout=PATIENCE_S)
    assert peer.run("int(pool.array.min())", timeout=PATIENCE_S) == 7


def test_the_same_random_batch_over_rdma_and_over_tcp_leaves_the_same_memory(
    make: Make, start: Start
) -> None:
    both = config("rdma", "tcp")
    engine, peer = make(both), start(both)
    peer.run(
        "def offered():\n"
        f"    made = engine.allocate({SIZE}, name='one'), engine.allocate({SIZE}, name='two')\n"
        "    return made",
        timeout=PATIENCE_S,
    )
    wait_until(
        lambda: peer.run(
            "engine.allocate(4096).unregister()\n"
            "bool(engine.stats()['transports']['tcp']['holdings'].get('processes'))",
            timeout=PATIENCE_S,
        ),
        PATIENCE_S,
        "the receiver of tcp runs",
    )
    peer.run("one, two = offered()", timeout=PATIENCE_S)
    random = np.random.default_rng(11)
    source = engine.allocate(SIZE)
    source.array[:] = random.integers(0, 256, SIZE, np.uint8)
    rows = np.sort(random.permutation(SIZE // 64)[:300])
    here, there = random.permutation(rows) * 64, random.permutation(rows) * 64
    lengths = random.integers(1, 65, len(rows))
    segment = engine.open_segment(peer.segment_name)
    for name, transport in (("one", "rdma"), ("two", "tcp")):
        batch = segment.write_many(
            source, here, segment.buffer(name), there, lengths, transport=transport
        )
        assert set(batch.transports()) == {transport}
    assert peer.run("bool((one.array == two.array).all())", timeout=PATIENCE_S)
    assert peer.run("int(one.array.any())", timeout=PATIENCE_S) == 1
