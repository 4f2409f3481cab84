"""The shared suite for transports, over real engines: on the stand-in always, on the library where it is."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from mpcomm_library import missing

from tent_core.testing.conformance import TransportConformance


@pytest.mark.usefixtures("stand_in_on_the_path")
class TestOnTheStandIn(TransportConformance):
    transport = "mpcomm"
    one_machine = "the stand-in finds its peers on this machine"
    # What the library keeps of departed peers is freed at every chance, so that nothing may stay behind.
    settings: ClassVar[dict[str, Any]] = {"max_retained": 0}


@pytest.mark.skipif(bool(missing()), reason=f"needs the library and a device: {missing()}")
class TestOnTheLibrary(TransportConformance):
    transport = "mpcomm"
    settings: ClassVar[dict[str, Any]] = {"max_retained": 0}
