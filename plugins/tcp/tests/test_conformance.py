"""The shared suite for transports, over real engines."""

from __future__ import annotations

from tent_core.testing.conformance import TransportConformance


class TestConformance(TransportConformance):
    transport = "tcp"
