"""A policy by size: one call is carried by two transports, as `tent explain` says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import tent_core

MIXED = Path(__file__).parents[2] / "examples" / "mixed.yaml"
SIZES = np.array([4096, 65535, 65536, 1, 1 << 20, 70_000, 12_345], np.uint64)


def test_one_call_with_mixed_sizes_is_carried_by_both_as_explain_says(start: Any, run: Any) -> None:
    explained = json.loads(run("explain", "--json", "--config", MIXED, *SIZES.tolist()).stdout)
    expected: Counter[str] = Counter()
    for answer in explained["answers"]:
        expected[answer["candidates"][0]] += answer["size"]

    served = json.loads(
        start("serve", "--config", MIXED, "--size", "4MiB", "--json").stdout.readline()
    )
    here = np.concatenate(([0], np.cumsum(SIZES)[:-1])).astype(np.uint64)
    there = np.empty_like(here)  # the same rows there: in another order, with gaps between them
    there[::-1] = np.concatenate(([0], np.cumsum(SIZES[::-1] + np.uint64(3))[:-1]))
    total = int(SIZES.sum())

    with tent_core.Engine(MIXED) as engine, engine.open_segment(served["segment"]) as segment:
        remote = segment.buffer("span")
        source = engine.allocate(total)
        source.array[:] = np.random.default_rng(1).integers(0, 256, total, np.uint8)
        written = segment.write_many(source, here, remote, there, SIZES)
        assert written.transports() == dict(expected)
        assert set(expected) == {"shm", "tcp"}
        assert (written.moved == SIZES).all()

        back = engine.register(np.zeros(total, np.uint8))
        read = segment.read_many(back, here, remote, there, SIZES)
        assert read.transports() == dict(expected)
        assert (back.array == source.array).all()
        for size, answer in zip(SIZES.tolist(), explained["answers"], strict=True):
            assert list(engine.explain(segment, size).candidates) == answer["candidates"]
