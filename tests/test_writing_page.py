"""docs/writing-a-transport.md names what there is: every method, capability and part of a work."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from tent_core.testing.conformance import TransportConformance
from tent_core.transport import Endpoint, Transport
from tent_core.types import Capabilities
from tent_core.work import Requests, Work

PAGE = (Path(__file__).parents[1] / "docs" / "writing-a-transport.md").read_text()
NEVER_ASKED = {"bandwidth_estimate", "nic_load"}
"""Capabilities that the page says of that nothing asks for them."""

KEPT = {"causes", "moved", "on_finished", "status", "surplus"}
"""Parts of a work that are the core's: transports report by methods."""

FROM_THERE = """
install uninstall capabilities allocateSubBatch freeSubBatch submitTransferTasks getTransferStatus
cancelTransferTask allocateLocalMemory freeLocalMemory warmupMemory addMemoryBuffer removeMemoryBuffer
sendNotification receiveNotification getEstimatedBandwidth getNicLoadStats supportsLocal supportsRemote
supportsNotif getSupportedMems connect disconnect getConnInfo loadRemoteConnInfo registerMem
deregisterMem getPublicData loadRemoteMD loadLocalMD unloadMD prepXfer estimateXferCost postXfer
checkXfer releaseReqH getNotifs genNotif get_backend_options
"""
"""The methods of those from whom people come."""


@pytest.mark.parametrize("kind", [Transport, Endpoint])
def test_every_method_of_the_contract_is_on_the_page(kind: type) -> None:
    for name in (n for n in vars(kind) if not n.startswith("_")):
        assert re.search(rf"\b{name}\b", PAGE), f"{kind.__name__}.{name}"


def test_every_capability_is_on_the_page() -> None:
    for field in fields(Capabilities):
        assert f"`{field.name}`" in PAGE or field.name in NEVER_ASKED, field.name


def test_every_column_is_on_the_page() -> None:
    for name in Requests.__slots__:
        assert f".{name}`" in PAGE, name


def test_every_part_of_a_work_that_a_transport_reads_is_on_the_page() -> None:
    for name in Work.__slots__:
        assert f"`work.{name}" in PAGE or name.startswith("_") or name in KEPT, name


@pytest.mark.parametrize(
    "name",
    sorted(set(re.findall(r"\w+", FROM_THERE))),
)
def test_the_tables_for_those_who_port_are_whole(name: str) -> None:
    tables = PAGE[PAGE.index("## For those who port") :]
    assert re.search(rf"`{name}\b", tables)


def test_the_knobs_of_the_suite_are_those_that_the_page_names() -> None:
    for name in (
        "settings",
        "largest",
        "settles_s",
        "lets_go_s",
        "carries_within_s",
        "one_machine",
        "registry",
    ):
        assert hasattr(TransportConformance, name)
        assert f"`{name}" in PAGE or f" {name} = " in PAGE
