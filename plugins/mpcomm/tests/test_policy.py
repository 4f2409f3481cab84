"""The transport among others: its number and name, and who carries when it cannot."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from mpcomm_rig import declare

import tent_core as tent
from tent_core import plugins
from tent_core.control import tent_pb2
from tent_core.plugins import Registry
from tent_core.types import Opcode, TransportType, transport_name, transport_number
from tent_mock.mpcomm import StandIn
from tent_mpcomm import plugin
from tent_mpcomm.adapter import UnavailableAdapter

POLICY = [{"name": "all", "transports": ["mpcomm", "tcp"]}]


def config(**mpcomm: Any) -> dict[str, Any]:
    return {
        "transports": {"mpcomm": {"enable": "auto", **mpcomm}, "tcp": {"enable": True}},
        "policy": POLICY,
        "log": {"level": "info", "format": "json"},
    }


def registry(library: Any) -> Registry:
    return Registry.of(declare(library), plugins.discover().load("tcp").declaration)


def test_the_number_12_is_its_own_on_every_surface() -> None:
    assert int(TransportType.MPCOMM) == 12
    assert transport_number("mpcomm") == 12
    assert transport_name(12) == "mpcomm"
    assert plugin.tent_transport().number == 12
    assert plugins.discover().load("mpcomm").declaration.number == 12
    names = {v.name: v.number for v in tent_pb2.TransportType.DESCRIPTOR.values}
    assert [name for name, number in names.items() if number == 12 and "MPCOMM" in name]


def test_a_policy_that_names_it_means_it_whether_it_is_installed_or_not() -> None:
    for found in (registry(StandIn()), Registry.of(plugins.discover().load("tcp").declaration)):
        with tent.Engine({**config(), "log": {"level": "error"}}, plugins=found) as engine:
            selection = engine.explain()
            named = [*selection.candidates, *(p.name for p in selection.passed_over)]
            assert sorted(named) == ["mpcomm", "tcp"]
            assert engine.descriptor.transports.get("mpcomm", 12) == 12
            assert 0 not in engine.descriptor.transports.values()


@pytest.mark.parametrize(
    ("asks", "reason"),
    [({"devices": ["mlx5_0"]}, "cannot be told"), ({"qp_pool": "fast"}, "no queue-pair pools")],
)
def test_what_it_cannot_do_passes_it_over_visibly(asks: dict[str, Any], reason: str) -> None:
    policy = [{"name": "all", "transports": ["mpcomm", "tcp"], **asks}]
    with tent.Engine(
        {**config(), "policy": policy, "log": {"level": "error"}}, plugins=registry(StandIn())
    ) as engine:
        over = {p.name: p.reason for p in engine.explain().passed_over}
    assert reason in over["mpcomm"]


def test_a_missing_library_fails_an_engine_that_insists() -> None:
    found = registry(UnavailableAdapter("the module mpcomm is not installed: install the wheel"))
    with pytest.raises(tent.ConfigError, match="not installed: install the wheel"):
        tent.Engine({**config(), "transports": {"mpcomm": {"enable": True}}}, plugins=found)


def test_the_list_of_plugins_says_why_it_cannot_be_used_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mpcomm", None)  # which makes its import fail
    (row,) = [row for row in plugins.discover().report() if row.name == "mpcomm"]
    assert (row.number, "install the wheel of UCL-MPComm" in row.reason) == (12, True)


def missing() -> Any:
    return UnavailableAdapter("the module mpcomm is not installed: install the wheel")


def cannot_start() -> Any:
    library = StandIn()
    library.plan("init", -1, -1)
    return library


@pytest.mark.parametrize(
    ("library", "reason"), [(missing, "not installed"), (cannot_start, "-1 (device)")]
)
def test_where_it_cannot_run_tcp_carries_and_the_log_says_why_once(
    library: Callable[[], Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = registry(library())
    with ExitStack() as stack:
        here = stack.enter_context(tent.Engine(config(), plugins=found))
        there = stack.enter_context(
            tent.Engine({**config(), "log": {"level": "error"}}, plugins=found)
        )
        segment = stack.enter_context(here.open_segment(there.segment_name))
        source, target = here.allocate(4096), there.allocate(4096, name="target")
        source.array[:] = 7
        for _ in range(3):
            batch = segment.submit("write", source, [0], segment.buffer("target"), [0], 4096)
            batch.wait(10)
            assert batch.transports() == {"tcp": 4096}
        assert (target.array == 7).all()
    (said,) = [line for line in log(capsys) if reason in json.dumps(line)]
    assert (said["event"], said["transport"]) == ("transport_skipped", "mpcomm")


@pytest.mark.parametrize("opcode", [Opcode.WRITE, Opcode.READ])
def test_when_a_transfer_fails_in_flight_tcp_carries_it_and_the_log_says_why_once(
    opcode: Opcode, capsys: pytest.CaptureFixture[str]
) -> None:
    library = StandIn()
    found = registry(library)
    with ExitStack() as stack:
        here = stack.enter_context(tent.Engine(config(), plugins=found))
        quiet = {**config(), "log": {"level": "error"}}
        there = stack.enter_context(tent.Engine(quiet, plugins=found))
        segment = stack.enter_context(here.open_segment(there.segment_name))
        ours, theirs = here.allocate(4096), there.allocate(4096, name="theirs")
        random = np.random.default_rng(1)
        for _ in range(2):  # fewer than give the connection up
            ours.array[:], theirs.array[:] = random.integers(0, 256, (2, 4096), np.uint8)
            library.plan("transfer", -5)
            batch = segment.submit(opcode, ours, [0], segment.buffer("theirs"), [0], 4096)
            batch.wait(10)
            assert batch.transports() == {"tcp": 4096}
            assert np.array_equal(ours.array, theirs.array)
        batch = segment.submit(opcode, ours, [0], segment.buffer("theirs"), [0], 4096)
        batch.wait(10)
        assert batch.transports() == {"mpcomm": 4096}
        during = log(capsys)
    lines = [line for line in during if line["event"] == "transfers_failed"]
    assert [(line["transport"], "-5 (transfer)" in line["cause"]) for line in lines] == [
        ("mpcomm", True)
    ]


def log(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What engines of this test have logged since it was asked last."""
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]
