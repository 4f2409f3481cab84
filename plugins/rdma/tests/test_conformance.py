"""The shared suite for transports, over real engines and real verbs."""

from __future__ import annotations

import pytest

from tent_core.testing.conformance import TransportConformance


@pytest.mark.rdma
class TestConformance(TransportConformance):
    transport = "rdma"
    carries_within_s = 60.0  # an emulated machine takes its time to make a channel
    one_machine = (
        "network namespaces have no RDMA devices of their own: two machines take two hosts"
    )
