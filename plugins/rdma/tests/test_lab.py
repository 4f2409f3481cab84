"""What the choice of devices makes of a kernel that has them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

import pytest

from tent_core import topology
from tent_core.doctor.finding import Level
from tent_rdma import by_pyverbs, doctor
from tent_rdma.devices import ROCE_V2, ChosenDevice, address, choose
from tent_rdma.settings import Settings

pytestmark = pytest.mark.rdma

PATIENCE_S = 30.0


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.05)


def test_the_library_can_open_every_device_that_was_chosen_from_sysfs(
    chosen: tuple[ChosenDevice, ...],
) -> None:
    verbs = by_pyverbs.load()
    assert {device.name for device in chosen} <= set(verbs.devices())
    for device in chosen:
        opened = verbs.open(device.name)
        try:
            port = opened.port(device.port)
            assert port.active is device.active
            assert port.ethernet is (device.link_layer == "Ethernet")
            assert opened.limits.max_registration > 0
        finally:
            opened.close()


def test_the_doctor_finds_nothing_bad(rdma_settings: Settings) -> None:
    found = doctor.findings(topology.discover(), rdma_settings)
    assert [finding for finding in found if finding.level is Level.BAD] == []
    assert {"pyverbs", "memlock", "nvidia_peermem"} <= {finding.subject for finding in found}


def test_both_rails_are_chosen_by_their_ipv4_addresses(
    rails: tuple[ChosenDevice, ChosenDevice],
) -> None:
    for number, device in enumerate(rails):
        assert str(address(device.gid)) == f"10.0.{number}.1"
        assert (device.port, device.netdev, device.gid_kind) == (1, f"d{number}", ROCE_V2)
        assert device.active


def test_a_rail_that_is_down_is_kept_and_is_active_again_when_it_returns(
    rails: tuple[ChosenDevice, ChosenDevice],
) -> None:
    def state() -> list[bool]:
        return [device.active for device in choose(topology.discover(), Settings()).chosen]

    def link(state: str) -> None:
        subprocess.run(
            ["ip", "link", "set", rails[0].netdev, state], check=True, timeout=PATIENCE_S
        )

    link("down")
    try:
        until(lambda: state() == [False, True], "the first rail is kept, and is not active")
    finally:
        link("up")
    until(lambda: choose(topology.discover(), Settings()).chosen == rails, "all is as it was")
