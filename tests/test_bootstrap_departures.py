"""A peer that departs while a transport makes something for it: what comes late is released too."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import tent_core as tent
import tent_mock
from tent_core.plugins import Registry
from tent_core.testing import wait_until
from tent_mock.script import On

CONFIG = {
    "transports": {"mock": {"enable": True, "handshake": True}},
    "policy": [{"name": "all", "transports": ["mock"]}],
    "peers": {"grace_s": 0.1},
    "log": {"level": "error"},
}
Pair = tuple[tent.Engine, tent.Engine]


@pytest.fixture
def pair() -> Iterator[Pair]:
    registry = Registry.of(tent_mock.declare())
    with (
        tent.Engine(CONFIG, plugins=registry) as here,
        tent.Engine(CONFIG, plugins=registry) as there,
    ):
        yield here, there


def hang_in_bootstrap(here: tent.Engine, there: tent.Engine) -> threading.Thread:
    """Have `here` connect, and the bootstrap at `there` hang."""
    control = tent_mock.controller(there, "mock")
    control.plan("hang", on="bootstrap")
    target = there.allocate(4096, name="target")
    source = here.allocate(4096)

    def write() -> None:
        segment = here.open_segment(there.segment_name)
        with pytest.raises(tent.TentError):
            segment.write(source, segment.buffer(target.name))

    writer = threading.Thread(target=write)
    writer.start()
    wait_until(lambda: control.count(On.BOOTSTRAP) == 1)
    return writer


def test_what_was_made_for_a_peer_that_departed_meanwhile_is_released_again(pair: Pair) -> None:
    here, there = pair
    control = tent_mock.controller(there, "mock")
    writer = hang_in_bootstrap(here, there)
    here.close()
    wait_until(lambda: control.count(On.RELEASE) == 1)
    control.clear()
    control.release()
    wait_until(lambda: control.count(On.RELEASE) == 2)
    writer.join(10)
    assert not writer.is_alive()


def test_a_message_of_a_peer_that_has_departed_is_not_handed_to_the_transport(pair: Pair) -> None:
    here, there = pair
    control = tent_mock.controller(there, "mock")
    running = there._transports.get("mock")
    assert running is not None
    answer = there.roster.bootstrap(running, here.key, b"mock")
    with pytest.raises(tent.TransportError, match="has departed"):
        answer.result(10)
    assert control.count(On.BOOTSTRAP) == 0
