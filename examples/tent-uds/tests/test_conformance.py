"""The suite that every transport must pass, over real engines."""

from __future__ import annotations

from tent_core.testing.conformance import TransportConformance


class TestConformance(TransportConformance):
    transport = "uds"
