"""What `tent doctor` and `tent plugins` say of RDMA."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tent_core import models
from tent_core.doctor.finding import Finding, Level
from tent_core.errors import TransportUnavailable
from tent_core.topology import Gid, NumaNode, RdmaDevice, RdmaPort, Topology
from tent_rdma import by_pyverbs, doctor
from tent_rdma.settings import Settings
from tent_rdma.verbs import Device, Verbs, VerbsError

V4 = Gid(1, "0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2", "eth0")
LINK_LOCAL = Gid(0, "fe80:0000:0000:0000:9a03:9bff:fe12:3456", "RoCE v2", "eth1")


class Opening:
    """Verbs of which only opening is asked; the device `locked` cannot be opened."""

    def devices(self) -> list[str]:
        raise AssertionError("sysfs says it")

    def open(self, name: str) -> Device:
        if name == "locked":
            raise VerbsError(f"open the RDMA device {name}", 13)
        return Closing()  # type: ignore[return-value]


class Closing:
    def close(self) -> None:
        pass


def here() -> Verbs:
    return Opening()


def absent() -> Verbs:
    raise TransportUnavailable(f"pyverbs cannot be imported (no such): {by_pyverbs.REMEDY}")


def device(name: str, *gids: Gid, state: str = "ACTIVE", node: int = -1) -> RdmaDevice:
    port = RdmaPort(1, state, "Ethernet", 100.0, gids or (V4,))
    return RdmaDevice(name, numa_node=node, ports=(port,), node_type="CA")


def found(*devices: RdmaDevice, load: object = here, **settings: object) -> dict[str, Finding]:
    nodes = (NumaNode(0, distances=(10, 20)), NumaNode(1, distances=(20, 10)))
    topology = Topology(rdma_devices=devices, numa_nodes=nodes)
    findings = doctor.findings(topology, models.make(Settings, **settings), load)  # type: ignore[arg-type]
    assert all(f.remedy for f in findings if f.level in (Level.WARN, Level.BAD))
    assert all(f.topic == "rdma" for f in findings)
    by_subject = {f.subject: f for f in findings}
    assert len(by_subject) == len(findings) or "settings" in by_subject
    return by_subject


def test_each_device_is_shown_with_the_reason_why_it_is_used_or_not() -> None:
    shown = found(device("mlx5_0", node=1), device("mlx5_1"), exclude=("mlx5_1",))
    assert shown["mlx5_0"].level is Level.OK
    assert "port 1: the only one; GID 1: 10.0.0.1 on eth0 (RoCE v2)" in shown["mlx5_0"].found
    assert "NUMA node 1" in shown["mlx5_0"].found
    assert shown["mlx5_1"].found == "not used: excluded by the settings (exclude)"
    assert shown["pyverbs"].level is shown["mlx5_0 opened"].level is Level.OK


def test_a_device_that_peers_can_hardly_reach_is_a_warning_with_the_remedy() -> None:
    shown = found(device("mlx5_0", state="DOWN"), device("mlx5_1", LINK_LOCAL))
    assert "ip link set eth0 up" in shown["mlx5_0"].remedy
    assert "give eth1 an IP address" in shown["mlx5_1"].remedy


def test_ranks_are_shown_for_each_numa_node_and_each_location_of_the_settings() -> None:
    shown = found(
        device("mlx5_0", node=0),
        device("mlx5_1", node=1),
        nic_priority={"cuda:0": (("mlx5_1",), ("mlx5_0",))},
    )
    assert shown["memory at cpu:0"].found == "by mlx5_0, then mlx5_1"
    assert shown["memory at cpu:1"].found == "by mlx5_1, then mlx5_0"
    assert shown["memory at cuda:0"].found == "by mlx5_1, then mlx5_0"


def test_without_a_device_it_is_said_in_one_line_and_nothing_is_wrong() -> None:
    shown = found()
    assert shown["devices"].level is Level.INFO
    assert "rdma_rxe" in shown["devices"].remedy
    shown = found(load=absent)
    assert shown["pyverbs"].level is Level.INFO


def test_devices_without_pyverbs_are_a_warning_that_says_where_it_comes_from() -> None:
    shown = found(device("mlx5_0"), load=absent)
    assert shown["pyverbs"].level is Level.WARN
    assert shown["pyverbs"].found == "pyverbs cannot be imported (no such)"
    assert "apt install python3-pyverbs" in shown["pyverbs"].remedy
    assert shown["mlx5_0"].level is Level.OK
    assert "mlx5_0 opened" not in shown


def test_a_device_that_cannot_be_opened_is_bad() -> None:
    shown = found(device("locked"))
    assert shown["locked opened"].level is Level.BAD
    assert "Permission denied" in shown["locked opened"].found


def test_mistakes_of_the_settings_are_bad_and_name_what_exists() -> None:
    shown = found(device("mlx5_0"), devices=("mlx5_9",))
    assert shown["settings"].level is Level.BAD
    assert "there are: mlx5_0" in shown["settings"].found


def test_devices_that_are_all_excluded_are_a_warning() -> None:
    shown = found(device("mlx5_0"), exclude=("mlx5_0",))
    assert shown["devices"].level is Level.WARN


@pytest.mark.parametrize(
    ("limit", "privileged", "nics", "level", "says"),
    [
        (resource.RLIM_INFINITY, False, 2, Level.OK, "unlimited"),
        (8 << 20, True, 2, Level.OK, "CAP_IPC_LOCK"),
        (2 << 30, False, 2, Level.OK, "at most 1GiB"),
        (2 << 30, False, 4, Level.WARN, "at most 512MiB can be registered, since each of 4 NICs"),
        (8 << 20, False, 1, Level.WARN, "at most 8MiB can be registered; a peer"),
    ],
)
def test_a_memlock_limit_counts_once_for_each_nic(
    limit: int, privileged: bool, nics: int, level: Level, says: str
) -> None:
    finding = doctor.memlock(limit, privileged, nics)
    assert finding.level is level
    assert says in finding.found
    assert bool(finding.remedy) == (level is Level.WARN)


def test_the_privilege_to_pin_is_read_from_the_process(tmp_path: Path) -> None:
    assert not doctor._privileged(tmp_path)
    (tmp_path / "proc/self").mkdir(parents=True)
    status = tmp_path / "proc/self/status"
    for capabilities, privileged in ((1 << 14, True), (1 << 19, False)):
        status.write_text(f"Name:\tx\nCapEff:\t{capabilities:016x}\n")
        assert doctor._privileged(tmp_path) is privileged


@pytest.mark.parametrize(
    ("modules", "level"),
    [(set(), Level.INFO), ({"nvidia"}, Level.WARN), ({"nvidia", "nvidia_peermem"}, Level.OK)],
)
def test_gpu_memory_needs_the_peer_memory_module(modules: set[str], level: Level) -> None:
    topology = Topology(rdma_devices=(device("mlx5_0"),), modules=frozenset(modules))
    findings = {f.subject: f for f in doctor.findings(topology, Settings(), here)}
    assert findings["nvidia_peermem"].level is level
    assert ("memory at cuda" in findings) == ("nvidia_peermem" in modules)


def test_what_stands_in_the_way_is_pyverbs_first_and_then_the_devices() -> None:
    assert "python3-pyverbs" in doctor.obstacle(Topology(), absent)
    assert "no RDMA device" in doctor.obstacle(Topology(), here)
    assert doctor.obstacle(Topology(rdma_devices=(device("mlx5_0"),)), here) == ""
