"""Makes the harness importable, here and in the processes that tests spawn."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tcp_harness import Here, OwnerProcess


@pytest.fixture(scope="module")
def owner() -> Iterator[OwnerProcess]:
    """A process that offers memory, shared by the tests of a module: none of them may end it."""
    with OwnerProcess() as process:
        yield process


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    """A transport of this process, shared likewise."""
    with Here() as side:
        yield side
