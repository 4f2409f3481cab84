"""What a transfer is for, and the entry that it names, select as the policy says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tent_core as tent
import tent_mock
from tent_core.plugins import Registry
from tent_core.types import Intent, Priority

POLICY = [
    {"name": "get", "intent": "foreground_get", "priority": "high", "transports": ["fast"]},
    {"name": "get-later", "intent": "foreground_get", "transports": ["slow", "fast"]},
    {"name": "none", "intent": "unspec", "transports": ["plain"]},
    {"name": "rest", "transports": ["slow"]},
]


@pytest.fixture(scope="module")
def segment() -> Iterator[tuple[tent.Engine, tent.Segment]]:
    names = ("fast", "slow", "plain")
    registry = Registry.of(*(tent_mock.declare(n, 1001 + i) for i, n in enumerate(names)))
    config = {"policy": POLICY, "log": {"level": "error"}}
    with (
        tent.Engine(config, plugins=registry) as there,
        tent.Engine(config, plugins=registry) as here,
    ):
        there.allocate(4096, name="target")
        here.allocate(4096)
        yield here, here.open_segment(there.segment_name)


def carried(found: tuple[tent.Engine, tent.Segment], **options: Any) -> list[str]:
    here, segment = found
    where = np.array([0])
    (source,) = here.buffers()
    batch = segment.submit("write", source, where, segment.buffer("target"), where, 64, **options)
    return list(batch.wait(30).transports())


@pytest.mark.parametrize(
    ("options", "transport"),
    [
        ({"intent": Intent.FOREGROUND_GET, "priority": Priority.HIGH}, "fast"),
        ({"intent": Intent.FOREGROUND_GET}, "slow"),
        ({}, "plain"),
        ({"intent": Intent.CHECKPOINT}, "slow"),
        ({"intent": Intent.CHECKPOINT, "policy": "get"}, "fast"),
        ({"policy": "get-later", "transport": "fast"}, "fast"),
        ({"policy": "rest", "transport": "fast"}, "slow"),
    ],
)
def test_intent_priority_entry_and_hint_select_the_transport(
    segment: Any, options: dict[str, Any], transport: str
) -> None:
    assert carried(segment, **options) == [transport]


def test_an_entry_that_there_is_not_is_a_mistake_with_the_nearest_name(segment: Any) -> None:
    with pytest.raises(tent.UsageError, match="did you mean 'rest'"):
        carried(segment, policy="rst")


def test_an_intent_that_there_is_not_is_a_mistake(segment: Any) -> None:
    with pytest.raises(tent.UsageError, match="Intent"):
        carried(segment, intent=99)


@pytest.mark.parametrize("wrong", ["foregroundget", "", "*", "any", 1, "FOREGROUND_GET"])
def test_a_wrong_intent_in_yaml_is_never_a_catch_all(wrong: Any) -> None:
    config = {"policy": [{"name": "a", "transports": ["fast"], "intent": wrong}]}
    with pytest.raises(tent.ConfigError, match=r"policy\[0\].intent"):
        tent.Engine(config, plugins=Registry.of(tent_mock.declare("fast", 1001)))
