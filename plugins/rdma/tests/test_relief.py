"""What rdma lacks, idle peers give: whole engines on a fabric of fake NICs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from rig import QUEUE_PAIRS, fabric, topology

import tent_core as tent
import tent_core.topology
from tent_core.plugins import Registry
from tent_core.testing.waiting import wait_until
from tent_mock.verbs import FakeVerbs
from tent_rdma import plugin
from tent_rdma.transport import RdmaTransport

_numbers = itertools.count()
Make = Callable[..., tent.Engine]


@pytest.fixture
def verbs() -> FakeVerbs:
    return fabric(nics=1)


@pytest.fixture
def engine(verbs: FakeVerbs, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes engines whose rdma is on the fabric, with these settings of it."""
    monkeypatch.setattr(plugin, "_make", lambda: RdmaTransport(lambda: verbs))
    monkeypatch.setattr(tent_core.topology, "discover", lambda: topology(verbs))
    made: list[tent.Engine] = []

    def make(**settings: object) -> tent.Engine:
        config = {
            "transports": {"rdma": {"enable": True, "spin": 0, **settings}},
            "policy": [{"name": "all", "transports": ["rdma"]}],
            "log": {"level": "error"},
            "peers": {"idle_timeout_s": 3600},
        }
        made.append(tent.Engine(config, plugins=Registry.of(plugin)))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert verbs.counts.alive("queue_pair") == 0


def write(here: tent.Engine, there: tent.Engine) -> None:
    local, target = here.allocate(64), there.allocate(64, name=f"target {next(_numbers)}")
    local.array[:] = 7
    segment = here.open_segment(there.segment_name)
    segment.write(local, segment.buffer(target.name))
    assert (target.array == 7).all()


def is_idle(here: tent.Engine, there: tent.Engine) -> None:
    """Have `there` learn that `here` has nothing to do with it now."""
    here.roster.retire_idle(3600)
    wait_until(lambda: all(s.idle_since is not None for s in there._control.sessions()))


def test_a_newcomer_gets_the_place_of_a_peer_that_is_idle(engine: Make) -> None:
    first, second, full = engine(), engine(), engine(max_connections=1)
    write(first, full)
    is_idle(first, full)
    write(second, full)
    is_idle(second, full)
    write(first, full)  # it comes back unseen


def test_who_begins_a_connection_gets_the_place_of_a_peer_that_is_idle(engine: Make) -> None:
    first, other, full = engine(), engine(), engine(max_connections=1)
    write(first, full)
    is_idle(first, full)
    write(full, other)


def test_a_device_that_has_no_queue_pair_left_gets_one_of_an_idle_peer(
    engine: Make, verbs: FakeVerbs
) -> None:
    first, second, full = engine(), engine(), engine()
    write(first, full)
    is_idle(first, full)
    verbs.faults.max_queue_pairs = 3 * QUEUE_PAIRS  # those of the newcomer, none here
    write(second, full)
    verbs.faults.max_queue_pairs = None


def test_nobody_is_sent_away_who_is_at_work(engine: Make) -> None:
    first, second, full = engine(), engine(), engine(max_connections=1)
    write(first, full)
    with pytest.raises(tent.TentError, match="max_connections"):
        write(second, full)
    write(first, full)
