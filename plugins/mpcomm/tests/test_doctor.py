"""What `tent doctor` says of MPComm on machines of all kinds."""

from __future__ import annotations

from typing import Any

import pytest

from tent_core import models
from tent_core.doctor.finding import Level
from tent_core.topology import RdmaDevice, RdmaPort, Topology
from tent_mock.mpcomm import StandIn
from tent_mpcomm import doctor
from tent_mpcomm.adapter import ModuleAdapter, UnavailableAdapter
from tent_mpcomm.settings import Settings

HERE = ModuleAdapter(StandIn(version="1.4.2"))
UP = Topology(rdma_devices=(RdmaDevice("mlx5_0", ports=(RdmaPort(1, "ACTIVE"),)),))


def found(
    topology: Topology = UP, library: Any = HERE, environ: Any = None, **settings: Any
) -> dict[str, tuple[Level, str]]:
    """Findings by subject."""
    findings = doctor.findings(topology, models.make(Settings, **settings), library, environ or {})
    return {f.subject: (f.level, f"{f.found} {f.remedy}") for f in findings}


def test_a_missing_library_is_a_fact_with_its_remedy_and_the_only_one() -> None:
    assert found(library=UnavailableAdapter("it is not installed: install it")) == {
        "library": (Level.INFO, "it is not installed, so it is not used install it")
    }


def test_a_machine_that_has_everything_is_well() -> None:
    levels = {subject: level for subject, (level, _) in found().items()}
    assert levels["library"] is levels["devices"] is Level.OK
    assert "1.4.2" in found()["library"][1]


def test_an_unknown_version_and_no_device_are_warnings() -> None:
    here = found(Topology(), ModuleAdapter(StandIn(version=None)))
    assert (here["library"][0], here["devices"][0]) == (Level.WARN, Level.WARN)


def test_a_filter_that_names_no_device_of_the_machine_is_a_warning() -> None:
    level, text = found(nic_filter=["mlx5_9"])["devices"]
    assert (level, "mlx5_9" in text) == (Level.WARN, True)
    assert found(environ={"MPCOMM_NIC_FILTER": "mlx5_0"})["devices"][0] is Level.OK


def test_a_variable_that_is_wrong_is_what_will_fail() -> None:
    level, text = found(environ={"MPCOMM_GID_INDEX": "x"})["environment"]
    assert (level, "MPCOMM_GID_INDEX" in text) == (Level.BAD, True)


def test_what_the_library_will_be_told_and_its_port_are_shown() -> None:
    here = found(gid_index=5, listen_port=4711)
    assert "MPCOMM_GID_INDEX=5" in here["tuning"][1]
    assert "4711, on all interfaces" in here["handshake port"][1]


@pytest.mark.parametrize(
    ("modules", "gpu", "text"),
    [
        ({"nvidia_peermem"}, True, "loaded: GPU memory is offered"),
        ({"nvidia_peermem"}, False, "kept away"),
        (set(), True, "modprobe nvidia_peermem"),
    ],
)
def test_gpu_memory_depends_on_the_module_and_the_setting(
    modules: set[str], gpu: bool, text: str
) -> None:
    assert text in found(Topology(modules=frozenset(modules)), gpu=gpu)["nvidia_peermem"][1]
