"""A policy that sends small requests by tcp and the rest by shm: one call is carried by both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import tent_core as tent
from tent_core.cli.app import tent as command_line

from .conftest import Make, Start

KIB = 1024
EDGE = 64 * KIB
YAML = """
transports:
  shm: {enable: true}
  tcp: {enable: true}
policy:
  - {name: large, min_size: 64KiB, transports: [shm]}
  - {name: small, transports: [tcp]}
log: {level: error}
"""
SIZES = [1, 4 * KIB, EDGE - 1, EDGE, EDGE + 1, 300 * KIB]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "tent.yaml"
    file.write_text(YAML)
    return file


def carrier(size: int) -> str:
    return "tcp" if size < EDGE else "shm"


def mixed(total: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Offsets and lengths of requests of all SIZES in any order, that together fit into `total` bytes."""
    lengths = np.random.default_rng(11).permutation(np.array(SIZES * 12, np.uint64))
    offsets = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.uint64)
    assert lengths.sum() <= total
    return offsets, lengths


@pytest.mark.parametrize("opcode", ["write", "read"])
def test_one_call_with_mixed_sizes_is_carried_by_both_and_every_byte_is_right(
    make: Make, start: Start, config: Path, opcode: str
) -> None:
    here, there = make(config), start(str(config))
    total = 8 << 20
    noise = np.random.default_rng(12).integers(0, 256, total, np.uint8)
    there.run("target = engine.allocate(n, name='target'); target.array[:] = n8", n=total, n8=noise)
    local = here.register(np.roll(noise, 1) if opcode == "write" else np.zeros(total, np.uint8))
    offsets, lengths = mixed(total)
    turned = lengths.sum() - offsets - lengths  # the other way round at the peer
    with here.open_segment(there.segment_name) as segment:
        remote = segment.buffer("target")
        batch = segment.submit(opcode, local, offsets, remote, turned, lengths).wait(30)
    small = int(lengths[lengths < EDGE].sum())
    assert batch.transports() == {"tcp": small, "shm": int(lengths.sum()) - small}
    target = there.run("target.array.copy()")
    for offset, other, length in zip(offsets, turned, lengths, strict=True):
        assert (target[other : other + length] == local.array[offset : offset + length]).all()
    if opcode == "write":
        assert (target[int(lengths.sum()) :] == noise[int(lengths.sum()) :]).all()


def test_the_engine_explains_what_then_carries_each_size(
    make: Make, start: Start, config: Path
) -> None:
    here, there = make(config), start(str(config))
    there.run("target = engine.allocate(n, name='target')", n=max(SIZES))
    local = here.allocate(max(SIZES))
    with here.open_segment(there.segment_name) as segment:
        remote = segment.buffer("target")
        for size in SIZES:
            batch = segment.write_many(local, [0], remote, [0], size)
            assert batch.transports() == {carrier(size): size}
            assert here.explain(segment, size).candidates == (carrier(size),)
            assert here.explain(size=size).candidates == (carrier(size),)


def test_the_command_line_says_the_same_of_each_size(config: Path) -> None:
    command = ["explain", *map(str, SIZES), "--config", str(config), "--json"]
    result = CliRunner().invoke(command_line, command)
    assert result.exit_code == 0, result.output
    for size, answer in zip(SIZES, json.loads(result.stdout)["answers"], strict=True):
        assert (answer["size"], answer["candidates"]) == (size, [carrier(size)])


def test_a_named_entry_chooses_another_carrier_for_the_same_size(
    make: Make, start: Start, config: Path
) -> None:
    here, there = make(config), start(str(config))
    there.run("target = engine.allocate(4096, name='target')")
    local = here.allocate(4096)
    with here.open_segment(there.segment_name) as segment:
        remote = segment.buffer("target")
        assert segment.write_many(local, [0], remote, [0], 64).transports() == {"tcp": 64}
        named: tent.Batch = segment.write_many(local, [0], remote, [0], 64, policy="large")
        assert named.transports() == {"shm": 64}
