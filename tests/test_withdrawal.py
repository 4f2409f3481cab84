"""In which order an engine's transports, and its peers, let go of a buffer that is being unregistered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

import tent_core as tent
import tent_mock
from tent_core.plugins import Registry
from tent_core.testing.waiting import wait_until
from tent_core.types import Capabilities

CONFIG: dict[str, Any] = {
    "transports": {"checked": {"enable": True}, "unchecked": {"enable": True}},
    "policy": [{"name": "all", "transports": ["unchecked", "checked"]}],
    "log": {"level": "error"},
}


def _engine() -> tent.Engine:
    checked = tent_mock.declare("checked", 1001, owner_checked=True)
    unchecked = tent_mock.declare("unchecked", 1002, owner_checked=False)
    return tent.Engine(CONFIG, plugins=Registry.of(checked, unchecked))


@pytest.fixture
def engines() -> Iterator[tuple[tent.Engine, tent.Engine]]:
    with ExitStack() as stack:
        yield stack.enter_context(_engine()), stack.enter_context(_engine())


def test_a_transport_that_stops_nobody_lets_go_after_the_peers_and_one_that_does_before(
    engines: tuple[tent.Engine, tent.Engine],
) -> None:
    here, there = engines
    target, source = there.allocate(4096, name="target"), here.allocate(4096)
    checked = tent_mock.controller(there, "checked")
    unchecked = tent_mock.controller(there, "unchecked")
    initiator = tent_mock.controller(here, "unchecked")
    with here.open_segment(there.segment_name) as segment:
        initiator.plan("hang", at=1)
        batch = segment.submit("write", source, [0], segment.buffer("target"), [0], 64)
        initiator.wait_held(1)
        with pytest.raises(tent.RevocationTimeout) as raised:
            target.unregister(timeout=0.2)
        assert here.segment_name in "".join(raised.value.holders)
        assert checked.count("remove_buffer") == 1
        assert unchecked.count("remove_buffer") == 0
        initiator.release()
        batch.wait(5)
        target.unregister(timeout=5)
        wait_until(lambda: unchecked.count("remove_buffer") == 1)
        assert checked.count("remove_buffer") == 1


def test_what_a_transport_can_do_here_may_be_less_than_what_was_declared() -> None:
    class Modest(tent_mock.MockTransport):
        def capabilities(self, declared: Capabilities) -> Capabilities:
            return Capabilities()

    modest = replace(tent_mock.declare("modest", 1001), factory=Modest)
    with tent.Engine(
        {"transports": {"modest": {"enable": True}}, "log": {"level": "error"}},
        plugins=Registry.of(modest),
    ) as engine:
        (out,) = engine.explain().passed_over
    assert (out.name, "cannot move" in out.reason) == ("modest", True)
