"""Engines here and in other processes, all of which end with the test; more time for full rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import tent_core as tent
from tent_core.testing.peers import Nursery, PeerProcess

from .support import FULL

FULL_TIMEOUT_S = 900

Start = Callable[..., PeerProcess]
Make = Callable[..., tent.Engine]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Full rounds take minutes."""
    for item in items:
        if FULL and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(FULL_TIMEOUT_S))


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where processes come from that need no command line of their own."""
    with Nursery() as made:
        yield made


@pytest.fixture
def start(nursery: Nursery) -> Iterator[Start]:
    """Starts engines in processes of their own, which are killed at the end of the test."""
    with ExitStack() as stack:

        def started(config: dict[str, Any], **options: Any) -> PeerProcess:
            forked = None if "wrapper" in options else nursery
            peer = PeerProcess(config, nursery=forked, **options)
            stack.callback(peer.kill)
            return peer

        yield started


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes engines in this process, which are closed at the end of the test."""
    with ExitStack() as stack:
        yield lambda config, **options: stack.enter_context(tent.Engine(config, **options))
