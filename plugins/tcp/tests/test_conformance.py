"""The tcp transport under the suite that every transport must pass."""

from __future__ import annotations

from tent_core.testing.conformance import TransportConformance


class TestConformance(TransportConformance):
    transport = "tcp"
