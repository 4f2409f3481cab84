"""The machine as sysfs and procfs tell it, read from trees made for each test."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tent_core import topology
from tent_core.descriptor import Device

Write = Callable[[str, str | bytes], None]
PCI = "sys/devices/pci0000:17/0000:18:00.0"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(path: str, content: str | bytes) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def add_nic(write: Write, name: str, *, flags: str = "0x1003", **files: str) -> None:
    write(f"sys/class/net/{name}/ifindex", "7\n")
    write(f"sys/class/net/{name}/flags", f"{flags}\n")
    for file, content in files.items():
        write(f"sys/class/net/{name}/{file}", f"{content}\n")


def add_rdma(write: Write, tmp_path: Path, name: str = "mlx5_0") -> None:
    base = f"sys/class/infiniband/{name}"
    write(f"{PCI}/numa_node", "1\n")
    write(f"{base}/node_guid", "9803:9b03:0012:3456\n")
    write(f"{base}/fw_ver", "16.35.2000\n")
    write(f"{base}/node_type", "1: CA\n")
    os.symlink(tmp_path / PCI, tmp_path / base / "device")
    port = f"{base}/ports/1"
    write(f"{port}/state", "4: ACTIVE\n")
    write(f"{port}/rate", "100 Gb/sec (4X EDR)\n")
    write(f"{port}/link_layer", "Ethernet\n")
    write(f"{port}/gids/0", "fe80:0000:0000:0000:9a03:9bff:fe12:3456\n")
    write(f"{port}/gids/1", "0000:0000:0000:0000:0000:0000:0000:0000\n")
    write(f"{port}/gids/10", "0000:0000:0000:0000:0000:ffff:0a00:0001\n")
    for index, kind in (("0", "IB/RoCE v1"), ("10", "RoCE v2")):
        write(f"{port}/gid_attrs/types/{index}", f"{kind}\n")
        write(f"{port}/gid_attrs/ndevs/{index}", "ens1f0\n")


def test_a_nic_is_read_with_its_speed_pci_address_and_numa_node(
    write: Write, tmp_path: Path
) -> None:
    add_nic(write, "ens1f0", mtu="9000", speed="100000", address="98:03:9b:12:34:56")
    write(f"{PCI}/numa_node", "1\n")
    os.symlink(tmp_path / PCI, tmp_path / "sys/class/net/ens1f0/device")

    assert topology.discover(tmp_path).nics == (
        topology.Nic(
            name="ens1f0",
            up=True,
            loopback=False,
            virtual=False,
            mtu=9000,
            speed_mbps=100_000,
            mac="98:03:9b:12:34:56",
            pci_address="0000:18:00.0",
            numa_node=1,
        ),
    )


def test_an_interface_that_does_not_say_its_speed_has_none(write: Write, tmp_path: Path) -> None:
    add_nic(write, "veth0", speed="-1", flags="0x1002")
    nic = topology.discover(tmp_path).nic("veth0")
    assert nic is not None
    assert (nic.up, nic.virtual, nic.speed_mbps, nic.numa_node) == (False, True, 0, -1)


def test_files_that_are_no_interface_are_not_taken_for_one(write: Write, tmp_path: Path) -> None:
    write("sys/class/net/bonding_masters", "bond0\n")
    add_nic(write, "bond0")
    assert [nic.name for nic in topology.discover(tmp_path).nics] == ["bond0"]


def test_an_rdma_device_is_read_with_its_used_gids_in_order(write: Write, tmp_path: Path) -> None:
    add_rdma(write, tmp_path)
    device = topology.discover(tmp_path).rdma_device("mlx5_0")
    assert device is not None
    assert (device.numa_node, device.pci_address) == (1, "0000:18:00.0")
    assert (device.node_type, device.netdevs) == ("CA", ("ens1f0",))
    (port,) = device.ports
    assert (port.number, port.state, port.link_layer) == (1, "ACTIVE", "Ethernet")
    assert port.rate_gbps == 100.0
    assert [(gid.index, gid.kind) for gid in port.gids] == [(0, "IB/RoCE v1"), (10, "RoCE v2")]


def test_devices_are_in_the_order_of_their_numbers(write: Write, tmp_path: Path) -> None:
    for name in ("mlx5_10", "mlx5_2", "rxe0", "mlx5_0", "bnxt_re0"):
        write(f"sys/class/infiniband/{name}/node_guid", "0000:0000:0000:0000\n")
    found = [device.name for device in topology.discover(tmp_path).rdma_devices]
    assert found == ["bnxt_re0", "mlx5_0", "mlx5_2", "mlx5_10", "rxe0"]


def test_numa_nodes_are_read_with_cpus_memory_and_distances(write: Write, tmp_path: Path) -> None:
    node = "sys/devices/system/node/node1"
    write(f"{node}/cpulist", "8-10,24\n")
    write(f"{node}/meminfo", "Node 1 MemTotal:       1024 kB\nNode 1 MemFree: 7 kB\n")
    write(f"{node}/distance", "21 10\n")
    write("sys/devices/system/node/online", "0-1\n")
    assert topology.discover(tmp_path).numa_nodes == (
        topology.NumaNode(1, (8, 9, 10, 24), 1024 * 1024, (21, 10)),
    )


@pytest.mark.parametrize(
    ("module", "reaches"), [("nvidia_peermem", True), ("nv_peer_mem", True), ("nvidia", False)]
)
def test_gpu_memory_is_reachable_by_rdma_only_with_a_peer_memory_module(
    write: Write, tmp_path: Path, module: str, reaches: bool
) -> None:
    write("proc/modules", f"{module} 16384 0 - Live 0x0000000000000000\n\nrdma_rxe 1 0 - Live 0\n")
    write("sys/module/ib_core/parameters/x", "")
    found = topology.discover(tmp_path)
    assert found.modules == {module, "rdma_rxe", "ib_core"}
    assert found.peer_memory is reaches


def test_a_segment_publishes_rdma_devices_and_nics_but_not_loopback(
    write: Write, tmp_path: Path
) -> None:
    add_rdma(write, tmp_path)
    add_nic(write, "eth0")
    add_nic(write, "lo", flags="0x9")
    assert topology.discover(tmp_path).devices() == (
        Device("mlx5_0", 1, "rdma"),
        Device("eth0", -1, "net"),
    )


def test_a_machine_without_sysfs_has_nothing_and_raises_nothing(tmp_path: Path) -> None:
    assert topology.discover(tmp_path / "no such") == topology.Topology()


def test_directories_links_in_circles_and_unreadable_files_raise_nothing(
    write: Write, tmp_path: Path
) -> None:
    add_nic(write, "eth0")
    eth0 = tmp_path / "sys/class/net/eth0"
    (eth0 / "mtu").mkdir()
    os.symlink("device", eth0 / "device")
    os.symlink("nowhere", eth0 / "speed")
    write("sys/class/infiniband/mlx5_0", "a file, not a directory")
    write("sys/devices/system/node/node0", "likewise")
    found = topology.discover(tmp_path)
    assert found.nic("eth0") == topology.Nic("eth0", up=True, loopback=False, virtual=True)
    assert found.rdma_devices == (topology.RdmaDevice("mlx5_0"),)


@given(content=st.binary(max_size=40))
def test_no_content_of_any_file_makes_reading_raise(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    root = tmp_path_factory.mktemp("machine")

    def write(path: str, _: str | bytes) -> None:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)

    add_nic(write, "eth0", mtu="", speed="", address="")
    add_rdma(write, root)
    for path in ("proc/modules", *(f"sys/devices/system/node/node0/{f}" for f in NODE_FILES)):
        write(path, "")
    found = topology.discover(root)
    assert [nic.name for nic in found.nics] == ["eth0"]
    assert [device.name for device in found.rdma_devices] == ["mlx5_0"]


NODE_FILES = ("cpulist", "meminfo", "distance")


@given(st.sets(st.integers(0, 4096), min_size=1))
def test_every_cpu_list_reads_back_as_the_cpus_it_was_written_from(cpus: set[int]) -> None:
    assert topology.parse_cpu_list(",".join(map(str, cpus))) == tuple(sorted(cpus))
    ranges = ",".join(f"{cpu}-{cpu}" for cpu in cpus)
    assert topology.parse_cpu_list(ranges) == tuple(sorted(cpus))


@given(st.text(alphabet="0123456789-, x\n", max_size=30))
def test_no_cpu_list_raises_or_takes_all_memory(text: str) -> None:
    assert len(topology.parse_cpu_list(text)) <= (1 << 16) + 1
    assert len(topology.parse_cpu_list("5-999999999")) == (1 << 16) - 4


def test_this_machine_can_be_read() -> None:
    lo = topology.discover().nic("lo")
    assert lo is None or lo.loopback
