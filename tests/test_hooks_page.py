"""The examples of docs/hooks.md run as they are printed."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import tent_core as tent
import tent_mock
from tent_core.hookspecs import hookimpl
from tent_core.plugins import Registry
from tent_core.testing import wait_until
from tent_core.types import Intent

PAGE = (Path(__file__).parents[1] / "docs" / "hooks.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
OBSERVER, PINNING, AVOIDING = range(3)

Write = Callable[..., dict[str, int]]


def package(block: int, **changes: Any) -> ModuleType:
    """A package with a transport `hooked`, and what the page shows; names of it may be set otherwise."""
    module = ModuleType(f"example_{block}")
    exec(compile(BLOCKS[block], "docs/hooks.md", "exec"), module.__dict__)
    vars(module).update(changes)

    @hookimpl
    def tent_transport() -> Any:
        return tent_mock.declare("hooked", 1003)

    module.tent_transport = tent_transport  # type: ignore[attr-defined]
    return module


@pytest.fixture
def write() -> Iterator[Write]:
    """Write 128 KiB between two engines that load a package; which transports carried how much."""
    with ExitStack() as stack:

        def written(
            module: ModuleType, policy: list[dict[str, Any]], **options: Any
        ) -> dict[str, int]:
            registry = Registry.of(
                tent_mock.declare("one", 1001), tent_mock.declare("two", 1002), module
            )
            config = {
                "transports": {name: {"enable": True} for name in ("one", "two", "hooked")},
                "policy": policy,
                "log": {"level": "error"},
            }
            here, there = (
                stack.enter_context(tent.Engine(config, plugins=registry)) for _ in range(2)
            )
            target = there.allocate(1 << 17)
            segment = stack.enter_context(here.open_segment(there.segment_name))
            source = here.register(np.ones(1 << 17, np.uint8))
            segment.write(source, segment.buffer(target.name), **options)
            counters = here.stats()["transports"]
            return {name: n["bytes"] for name, n in counters.items() if n["bytes"]}

        yield written


def policy(**match: Any) -> list[dict[str, Any]]:
    """An entry that matches so, and one for the rest."""
    return [
        {"name": "checkpoints", "transports": ["one", "two"], **match},
        {"name": "rest", "transports": ["one", "two"]},
    ]


def test_there_are_these_examples() -> None:
    assert len(BLOCKS) == 3


@pytest.mark.parametrize(("slow", "logged"), [(1e15, 1), (0.0, 0)])
def test_the_observer_logs_transfers_that_are_slow_and_no_others(
    write: Write, caplog: pytest.LogCaptureFixture, slow: float, logged: int
) -> None:
    seen: list[int] = []
    module = package(OBSERVER, SLOW=slow)
    observe = module.tent_transfers_finished

    @hookimpl
    def tent_transfers_finished(
        peer: Any, transport: str, tasks: int, bytes_moved: int, failed: int, seconds: float
    ) -> None:
        observe(peer, transport, tasks, bytes_moved, failed, seconds)
        seen.append(tasks)

    module.tent_transfers_finished = tent_transfers_finished  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING, "slow-transfers"):
        write(module, policy())
        wait_until(lambda: seen, what="the observer is told")
    messages = [r.getMessage() for r in caplog.records if r.name == "slow-transfers"]
    assert len(messages) == logged
    assert all(re.fullmatch(r"one to \S+: 1 tasks at \d+ MB/s, 0 failed", m) for m in messages)


def test_the_selector_pins_an_intent_to_a_transport(write: Write) -> None:
    module = package(PINNING, PINNED={"checkpoints": "two"})
    entries = policy(intent="checkpoint")
    assert write(module, entries, intent=Intent.CHECKPOINT) == {"two": 1 << 17}
    assert write(module, entries) == {"one": 1 << 17}


def test_the_selector_has_no_opinion_where_what_it_wants_is_no_candidate(write: Write) -> None:
    module = package(PINNING)
    assert write(module, policy(intent="checkpoint"), intent=Intent.CHECKPOINT) == {"one": 1 << 17}


def test_the_selector_avoids_a_host_over_a_transport(write: Write) -> None:
    assert write(package(AVOIDING, AVOIDED={("127.0.0.1", "one")}), policy()) == {"two": 1 << 17}
    assert write(package(AVOIDING, AVOIDED={("10.0.0.1", "one")}), policy()) == {"one": 1 << 17}
