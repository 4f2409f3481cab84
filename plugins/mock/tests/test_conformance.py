"""The mock transport under the suite that every transport must pass."""

from __future__ import annotations

from typing import ClassVar

import tent_mock
from tent_core.plugins import Registry
from tent_core.testing.conformance import TransportConformance


class TestConformance(TransportConformance):
    transport = "mock"


class TestConformanceOfBoundCalls(TransportConformance):
    transport = "mock"
    settings: ClassVar = {"bind": True}


class TestConformanceWithNotifications(TransportConformance):
    transport = "talking"

    @classmethod
    def registry(cls) -> Registry:
        return Registry.of(tent_mock.declare("talking", 1001, notifications=True))
