"""NUMA nodes, NICs, RDMA devices with their GIDs, and kernel modules."""

from __future__ import annotations

from collections.abc import Iterator

from tent_core.doctor.finding import Finding, Level
from tent_core.topology import Gid, Nic, RdmaDevice, RdmaPort, Topology

_TOPIC = "devices"
_MODULES = ("ib_core", "ib_uverbs", "rdma_cm", "mlx5_ib", "rdma_rxe", "siw", "nvidia_peermem")


def devices(topology: Topology) -> list[Finding]:
    """Findings about the hardware."""
    return [
        *(_numa(topology)),
        *(_nic(nic) for nic in topology.nics if not nic.loopback),
        *_rdma(topology),
        _modules(topology),
    ]


def _numa(topology: Topology) -> Iterator[Finding]:
    for node in topology.numa_nodes:
        memory = f"{node.memory_bytes / (1 << 30):.1f} GiB"
        yield Finding(
            _TOPIC, f"NUMA node {node.id}", Level.INFO, f"{len(node.cpus)} CPUs, {memory}"
        )


def _modules(topology: Topology) -> Finding:
    loaded = [name for name in _MODULES if name in topology.modules]
    missing = [name for name in _MODULES if name not in topology.modules]
    found = f"loaded: {', '.join(loaded) or 'none'}; not loaded: {', '.join(missing) or 'none'}"
    return Finding(_TOPIC, "kernel modules", Level.INFO, found)


def _nic(nic: Nic) -> Finding:
    speed = f", {nic.speed_mbps / 1000:g} Gb/s" if nic.speed_mbps else ""
    numa = f", NUMA node {nic.numa_node}" if nic.numa_node >= 0 else ""
    kind = "virtual" if nic.virtual else nic.pci_address or "NIC"
    found = f"{kind}, {'up' if nic.up else 'down'}, MTU {nic.mtu}{speed}{numa}"
    return Finding(_TOPIC, f"NIC {nic.name}", Level.INFO, found)


def _rdma(topology: Topology) -> Iterator[Finding]:
    if not topology.rdma_devices:
        yield Finding(
            _TOPIC,
            "RDMA",
            Level.INFO,
            "no device",
            "to try RDMA without one: modprobe rdma_rxe && rdma link add rxe0 type rxe netdev NIC",
        )
        return
    if "ib_uverbs" not in topology.modules:
        yield Finding(
            _TOPIC,
            "ib_uverbs",
            Level.WARN,
            "not loaded: no process can open an RDMA device",
            "modprobe ib_uverbs",
        )
    if "nvidia" in topology.modules and not topology.peer_memory:
        yield Finding(
            _TOPIC,
            "nvidia_peermem",
            Level.WARN,
            "not loaded: RDMA devices cannot reach GPU memory directly",
            "modprobe nvidia_peermem",
        )
    for device in topology.rdma_devices:
        numa = f", NUMA node {device.numa_node}" if device.numa_node >= 0 else ""
        nets = f", on {', '.join(device.netdevs)}" if device.netdevs else ""
        yield Finding(
            _TOPIC,
            f"RDMA {device.name}",
            Level.INFO,
            f"{device.pci_address or 'software'}{numa}{nets}",
        )
        for port in device.ports:
            yield _port(device, port)
            for gid in port.gids:
                yield _gid(device, port, gid)


def _port(device: RdmaDevice, port: RdmaPort) -> Finding:
    subject = f"RDMA {device.name} port {port.number}"
    state, layer = port.state or "state unknown", port.link_layer or "link layer unknown"
    found = f"{state}, {layer}, {port.rate_gbps:g} Gb/s"
    if port.state == "ACTIVE":
        return Finding(_TOPIC, subject, Level.OK, found)
    return Finding(
        _TOPIC,
        subject,
        Level.WARN,
        found,
        "bring the link up: ip link set NETDEV up, or check the cable",
    )


def _gid(device: RdmaDevice, port: RdmaPort, gid: Gid) -> Finding:
    subject = f"RDMA {device.name} port {port.number} GID {gid.index}"
    kind = gid.kind or "kind unknown"
    net = gid.netdev or "no network device, so no peer reaches it over Ethernet"
    return Finding(_TOPIC, subject, Level.INFO, f"{gid.value}, {kind}, {net}")
