"""Engines over real verbs: in this process, and in others that were forked with everything imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import tent_core as tent
from tent_core.testing.peers import Nursery, PeerProcess

sys.path.insert(0, str(Path(__file__).parent))

from engines import IMPORTED, PATIENCE_S, Config, Make, Start, config


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Importing takes more than ten seconds there."""
    with Nursery(also=IMPORTED) as made:
        yield made


@pytest.fixture
def start(nursery: Nursery) -> Iterator[Start]:
    """Starts engines in processes of their own, which are killed at the end of the test."""
    with ExitStack() as stack:

        def started(settings: Config | None = None, **options: Any) -> PeerProcess:
            options.setdefault("start_timeout", PATIENCE_S)
            peer = PeerProcess(settings or config(), nursery=nursery, **options)
            stack.callback(peer.kill)
            return peer

        yield started


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes engines in this process, closed at the end of the test."""
    with ExitStack() as stack:
        yield lambda settings=None: stack.enter_context(tent.Engine(settings or config()))
