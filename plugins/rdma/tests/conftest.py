"""Tests marked `rdma` run where RDMA devices are; elsewhere they say how to run them.

With TENT_RDMA_REQUIRED=1, which scripts/rdma-lab sets, they fail instead of being skipped.
TENT_RDMA_DEVICES=mlx5_0,mlx5_1 restricts them to some devices.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

import pytest

from tent_core import topology
from tent_rdma import doctor
from tent_rdma.devices import ChosenDevice, choose
from tent_rdma.settings import Settings

sys.path.insert(0, str(Path(__file__).parent))

HOW = "scripts/rdma-lab -- python -m pytest -m rdma plugins/rdma; for real NICs see the README of tent-rdma"


@cache
def missing() -> str:
    """Why the tests cannot run here, or ""."""
    return doctor.obstacle(topology.discover())


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("rdma") and (why := missing()):
        if os.environ.get("TENT_RDMA_REQUIRED") == "1":
            pytest.fail(f"TENT_RDMA_REQUIRED is 1, and {why}", pytrace=False)
        pytest.skip(f"needs an RDMA device and pyverbs. To run it: {HOW}")


@pytest.fixture
def rdma_settings() -> Settings:
    """Settings of the transport that name the devices to test, if some were named."""
    named = os.environ.get("TENT_RDMA_DEVICES", "")
    return Settings(devices=tuple(filter(None, named.split(","))))


@pytest.fixture
def chosen(rdma_settings: Settings) -> tuple[ChosenDevice, ...]:
    """The devices that the transport takes on this machine, as they are now."""
    return choose(topology.discover(), rdma_settings).chosen


@pytest.fixture
def rails(chosen: tuple[ChosenDevice, ...]) -> tuple[ChosenDevice, ChosenDevice]:
    """The two soft-RoCE devices of the lab, for tests that take links down: nobody else is on them."""
    if [device.name for device in chosen] != ["rxe0", "rxe1"]:
        pytest.skip(f"takes links down, so it is for soft-RoCE devices alone: {HOW}")
    return chosen[0], chosen[1]
