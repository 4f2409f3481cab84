"""What this machine is made of: NICs, RDMA devices, NUMA nodes, kernel modules, from sysfs and procfs alone.

Nothing here needs a vendor library, and nothing raises on a strange machine: what cannot be read is absent
or has the value that its field names for "unknown". The layout of the files read is described in the kernel's
Documentation/ABI (sysfs-class-net, sysfs-class-infiniband, sysfs-devices-node) and in proc(5).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tent_core.descriptor import Device

_LARGEST_CPU = 1 << 16
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


@dataclass(frozen=True, slots=True)
class Nic:
    """A network interface. `speed_mbps` is 0 where the driver does not say, as of every virtual one."""

    name: str
    up: bool
    loopback: bool
    virtual: bool
    mtu: int = 0
    speed_mbps: int = 0
    mac: str = ""
    pci_address: str = ""
    numa_node: int = -1


@dataclass(frozen=True, slots=True)
class Gid:
    """One used entry of a port's GID table; `netdev` is empty where the kernel names no interface for it."""

    index: int
    value: str
    kind: str = ""
    netdev: str = ""


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of an RDMA device. `state` and `link_layer` are the kernel's words (`ACTIVE`, `Ethernet`)."""

    number: int
    state: str = ""
    link_layer: str = ""
    rate_gbps: float = 0.0
    gids: tuple[Gid, ...] = ()


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """An RDMA device as `ibv_devices` would list it. Soft devices have no PCI address.

    `node_type` is the kernel's word: `CA` of InfiniBand and RoCE, `RNIC` of iWARP, and others.
    """

    name: str
    node_guid: str = ""
    firmware: str = ""
    pci_address: str = ""
    numa_node: int = -1
    ports: tuple[RdmaPort, ...] = ()
    node_type: str = ""

    @property
    def netdevs(self) -> tuple[str, ...]:
        """The interfaces that its GIDs belong to, each once."""
        return tuple(
            dict.fromkeys(gid.netdev for port in self.ports for gid in port.gids if gid.netdev)
        )


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node. `distances` has one entry per node online, in their order; 10 is local."""

    id: int
    cpus: tuple[int, ...] = ()
    memory_bytes: int = 0
    distances: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Topology:
    """A machine at the moment of `discover`. Modules are those loaded or built in, by their kernel names."""

    nics: tuple[Nic, ...] = ()
    rdma_devices: tuple[RdmaDevice, ...] = ()
    numa_nodes: tuple[NumaNode, ...] = ()
    modules: frozenset[str] = frozenset()

    def nic(self, name: str) -> Nic | None:
        """The interface of that name, or None."""
        return next((nic for nic in self.nics if nic.name == name), None)

    def rdma_device(self, name: str) -> RdmaDevice | None:
        """The RDMA device of that name, or None."""
        return next((device for device in self.rdma_devices if device.name == name), None)

    @property
    def peer_memory(self) -> bool:
        """Whether a module is loaded that lets RDMA devices reach NVIDIA GPU memory directly."""
        return not self.modules.isdisjoint({"nvidia_peermem", "nv_peer_mem"})

    def devices(self) -> tuple[Device, ...]:
        """What a segment publishes of the machine: its RDMA devices, and its NICs but loopback."""
        rdma = [Device(d.name, d.numa_node, "rdma") for d in self.rdma_devices]
        net = [Device(n.name, n.numa_node, "net") for n in self.nics if not n.loopback]
        return (*rdma, *net)


def discover(root: str | Path = "/") -> Topology:
    """Read the machine whose `sys` and `proc` are below `root`. Never raises; takes some milliseconds."""
    root = Path(root)
    return Topology(
        nics=tuple(
            _nic(path) for path in _entries(root / "sys/class/net") if _exists(path / "ifindex")
        ),
        rdma_devices=tuple(_rdma_device(path) for path in _entries(root / "sys/class/infiniband")),
        numa_nodes=tuple(
            _numa_node(int(path.name[4:]), path)
            for path in _entries(root / "sys/devices/system/node")
            if re.fullmatch(r"node[0-9]{1,6}", path.name)
        ),
        modules=modules(root),
    )


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The CPUs of a kernel list such as `0-3,8`, ascending; parts that make no sense are left out."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
        if found:
            first = int(found[1])
            last = int(found[2]) if found[2] else first
            cpus.update(range(first, min(last, _LARGEST_CPU) + 1))
    return tuple(sorted(cpus))


def _nic(path: Path) -> Nic:
    device = path / "device"
    flags = _integer(path / "flags", 0)  # IFF_UP is 0x1, IFF_LOOPBACK 0x8: netdevice(7)
    return Nic(
        name=path.name,
        up=bool(flags & 0x1),
        loopback=bool(flags & 0x8),
        virtual=not _exists(device),
        mtu=max(_integer(path / "mtu", 0), 0),
        speed_mbps=max(_integer(path / "speed", 0), 0),
        mac=_text(path / "address"),
        pci_address=_pci_address(device),
        numa_node=_integer(device / "numa_node", -1),
    )


def _rdma_device(path: Path) -> RdmaDevice:
    device = path / "device"
    return RdmaDevice(
        name=path.name,
        node_guid=_text(path / "node_guid"),
        firmware=_text(path / "fw_ver"),
        pci_address=_pci_address(device),
        numa_node=_integer(device / "numa_node", -1),
        ports=tuple(
            _rdma_port(int(port.name), port)
            for port in _entries(path / "ports")
            if re.fullmatch(r"[0-9]{1,6}", port.name)
        ),
        node_type=_text(path / "node_type").rpartition(": ")[2],
    )


def _rdma_port(number: int, path: Path) -> RdmaPort:
    rate = re.match(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) Gb/sec", _text(path / "rate"))
    return RdmaPort(
        number=number,
        state=_text(path / "state").rpartition(": ")[2],
        link_layer=_text(path / "link_layer"),
        rate_gbps=float(rate[1]) if rate else 0.0,
        gids=tuple(
            Gid(
                index=int(entry.name),
                value=value,
                kind=_text(path / "gid_attrs/types" / entry.name),
                netdev=_text(path / "gid_attrs/ndevs" / entry.name),
            )
            for entry in _entries(path / "gids")
            if re.fullmatch(r"[0-9]{1,6}", entry.name)
            and (value := _text(entry)) not in ("", _NO_GID)
        ),
    )


def _numa_node(number: int, path: Path) -> NumaNode:
    memory = re.search(r"MemTotal:\s+([0-9]{1,15}) kB", _text(path / "meminfo"))
    distances = _text(path / "distance").split()
    return NumaNode(
        id=number,
        cpus=parse_cpu_list(_text(path / "cpulist")),
        memory_bytes=int(memory[1]) * 1024 if memory else 0,
        distances=tuple(int(d) for d in distances if re.fullmatch(r"[0-9]{1,9}", d)),
    )


def modules(root: str | Path = "/") -> frozenset[str]:
    """The modules alone, for who needs no more of the machine: some devices have a thousand GIDs to read."""
    # /proc/modules has what is loaded; /sys/module also has what is built in and takes parameters.
    root = Path(root)
    lines = _text(root / "proc/modules").splitlines()
    loaded = {line.split()[0] for line in lines if line.strip()}
    return frozenset(loaded | {path.name for path in _entries(root / "sys/module")})


def _pci_address(device: Path) -> str:
    try:
        name = device.resolve().name
    except (OSError, RuntimeError):
        return ""
    return name if re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", name) else ""


def _entries(path: Path) -> list[Path]:
    """What is in a directory, in the order of a reader: mlx5_2 before mlx5_10. Empty if it cannot be read."""
    try:
        found = list(path.iterdir())
    except OSError:
        return []
    return sorted(
        found, key=lambda p: [(len(t), t) if t.isdecimal() else (0, t) for t in _parts(p)]
    )


def _parts(path: Path) -> list[str]:
    return re.split(r"([0-9]+)", path.name)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, RuntimeError):
        return False


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _integer(path: Path, otherwise: int) -> int:
    text = _text(path)
    return (
        int(text, 0)
        if re.fullmatch(r"-?(0x[0-9a-fA-F]{1,8}|0|[1-9][0-9]{0,9})", text)
        else otherwise
    )
