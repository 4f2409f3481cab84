"""Two engines over the stand-in: what only shows through the public API."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpcomm_rig import declare

import tent_core as tent
from tent_core.plugins import Registry
from tent_core.testing.waiting import wait_until
from tent_mock.mpcomm import StandIn

CONFIG: dict[str, Any] = {
    "transports": {"mpcomm": {"enable": True}},
    "policy": [{"name": "only", "transports": ["mpcomm"]}],
    "log": {"level": "error"},
}


class Both:
    """`here` has opened the segment of `there`, and written to it once."""

    def __init__(self) -> None:
        self.library = StandIn()
        registry = Registry.of(declare(self.library))
        self.here = tent.Engine(CONFIG, plugins=registry)
        self.there = tent.Engine(CONFIG, plugins=registry)
        self.source, self.target = self.here.allocate(4096), self.there.allocate(4096, name="t")
        self.segment = self.here.open_segment(self.there.segment_name)
        self.segment.write(self.source, self.segment.buffer("t"))

    def submit(self) -> tent.Batch:
        """A write that nobody waits for, under way in the library."""
        before = self.library.calls["put_async"]
        batch = self.segment.submit("write", self.source, [0], self.segment.buffer("t"), [0], 64)
        wait_until(lambda: self.library.calls["put_async"] == before + 1)
        return batch

    def close(self) -> None:
        self.library.let_go()
        self.here.close()
        self.there.close()

    @property
    def releases(self) -> set[int]:
        """How often each handle was released."""
        return {self.library.released[h] for h in range(1, self.library.calls["put_async"] + 1)}


@pytest.fixture
def both() -> Iterator[Both]:
    made = Both()
    yield made
    made.close()


def test_a_batch_that_is_freed_while_it_is_under_way_releases_its_handle_once(both: Both) -> None:
    both.library.hold()
    both.submit()  # and nobody keeps what this answers
    gc.collect()
    both.library.let_go()
    wait_until(lambda: both.releases == {1})


def test_unregistering_waits_for_what_a_timeout_left_under_way(both: Both) -> None:
    both.library.hold()
    late = both.segment.submit(
        "write", both.source, [0], both.segment.buffer("t"), [0], 64, timeout=0.1
    )
    with pytest.raises(tent.TransferFailed, match="in time"):
        late.wait(10)
    with pytest.raises(tent.RevocationTimeout, match="under way"):
        both.source.unregister(timeout=0.1)
    both.library.let_go()
    both.source.unregister(timeout=10)
    assert both.releases == {1}


def test_closing_an_engine_with_transfers_under_way_releases_each_handle_once(both: Both) -> None:
    both.library.hold()
    batches = [both.submit() for _ in range(3)]
    both.here.close()
    for batch in batches:
        with pytest.raises(tent.TentError):
            batch.wait(10)
    assert both.releases == {1}


def test_a_peer_that_closes_ends_what_is_under_way_to_it_with_a_cause(both: Both) -> None:
    both.library.hold()
    batch = both.submit()
    both.there.close()
    with pytest.raises(tent.TransferFailed, match=both.there.segment_name):
        batch.wait(10)
    both.library.let_go()
    wait_until(lambda: both.releases == {1})


def test_neighbours_are_one_transfer_of_the_library(both: Both) -> None:
    before = both.library.calls["put_async"]
    blocks, remote = np.arange(0, 4096, 512), both.segment.buffer("t")
    batch = both.segment.write_many(both.source, blocks, remote, blocks, 512)
    assert batch.moved.tolist() == [512] * 8
    assert both.library.calls["put_async"] == before + 1


def test_bulk_of_low_priority_is_not_cut_for_a_library_that_slices_itself(both: Both) -> None:
    source, target = both.here.allocate(8 << 20), both.there.allocate(8 << 20, name="large")
    source.array[:] = 3
    before = both.library.calls["put_async"]
    both.segment.write(source, both.segment.buffer("large"), priority=tent.Priority.LOW)
    assert (target.array == 3).all()
    assert both.library.calls["put_async"] == before + 1


def test_what_carried_the_bytes_is_counted(both: Both) -> None:
    counted = both.here.stats()["transports"]["mpcomm"]
    assert (counted["bytes"], counted["failures"]) == (4096, 0)
    assert counted["holdings"]["outgoing_connections"] == 1
