"""The shared suite for transports, over real engines: on the stand-in always, on the library where it is."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from tent_core import topology
from tent_core.testing.conformance import TransportConformance
from tent_mpcomm import adapter
from tent_mpcomm.transport import device_list


@pytest.mark.usefixtures("stand_in_on_the_path")
class TestOnTheStandIn(TransportConformance):
    transport = "mpcomm"
    # What the library keeps of departed peers is freed at every chance, so that nothing may stay behind.
    settings: ClassVar[dict[str, Any]] = {"max_retained": 0}


def _missing() -> str:
    """Why the suite cannot run on the library, or ""."""
    found = adapter.load()
    if found.obstacle or "stand" in found.version:
        return found.obstacle or "the module mpcomm is a stand-in"
    return "" if device_list(topology.discover()) else "no RDMA device has an active port"


@pytest.mark.skipif(bool(_missing()), reason=f"needs the library and a device: {_missing()}")
class TestOnTheLibrary(TransportConformance):
    transport = "mpcomm"
    settings: ClassVar[dict[str, Any]] = {"max_retained": 0}
