"""What `tent doctor` shows of RDMA: what is used and why, how near, and what would fail. Changes nothing."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tent_core.doctor.finding import Finding, Level
from tent_core.errors import TransportUnavailable
from tent_core.topology import Topology
from tent_core.units import format_size
from tent_rdma import by_pyverbs
from tent_rdma.devices import (
    ETHERNET,
    HOW_TO_TRY,
    ROCE_V2,
    ChosenDevice,
    DeviceMistake,
    address,
    choose,
    ranks,
)
from tent_rdma.settings import GIB, KIB, Settings
from tent_rdma.verbs import Verbs, VerbsError

_TOPIC = "rdma"
_LEAST = 1 * GIB
"""Of memory that should be registrable; below it nobody's KV cache fits."""
_NOTIFYING = 2 * 256 * 64 * KIB
"""Pinned for one peer that notifies, and is notified, by RDMA: 256 slots of 64 KiB each way."""
_CAP_IPC_LOCK = 14  # linux/capability.h

Load = Callable[[], Verbs]


def obstacle(topology: Topology, load: Load = by_pyverbs.load) -> str:
    """Why the transport cannot run on this machine with any settings, with the remedy; "" if it can."""
    try:
        load()
        choose(topology, Settings())
    except TransportUnavailable as error:
        return str(error)
    return ""


def findings(
    topology: Topology, settings: Settings, load: Load = by_pyverbs.load, root: Path = Path("/")
) -> list[Finding]:
    """Findings about what this transport needs and would do here, with these settings."""
    if not topology.rdma_devices:
        return [
            *_pyverbs(load, Level.INFO)[1],
            Finding(_TOPIC, "devices", Level.INFO, "none, so it is not used", HOW_TO_TRY),
        ]
    verbs, found = _pyverbs(load, Level.WARN)
    try:
        choice = choose(topology, settings)
    except DeviceMistake as error:
        remedy = "mend transports.rdma in the configuration"
        return [
            *found,
            *(Finding(_TOPIC, "settings", Level.BAD, m, remedy) for m in error.mistakes),
        ]
    except TransportUnavailable as error:
        remedy = "each device above is listed with its ports and GIDs"
        return [*found, Finding(_TOPIC, "devices", Level.WARN, str(error), remedy)]
    return [
        *found,
        *(_chosen(device) for device in choice.chosen),
        *(Finding(_TOPIC, n, Level.INFO, f"not used: {reason}") for n, reason in choice.rejected),
        *(_opened(verbs, device.name) for device in choice.chosen if verbs is not None),
        *_ranks(choice.chosen, topology, settings),
        memlock(_soft_limit(), _privileged(root), len(choice.chosen)),
        _gpu(topology),
    ]


def memlock(limit: int, privileged: bool, nics: int) -> Finding:
    """What may be pinned, against what registering memory on `nics` NICs pins.

    `limit` is the soft limit in bytes, `privileged` whether this process has CAP_IPC_LOCK. The kernel
    counts each registration by itself (ib_umem_get): memory on two NICs counts twice.
    """
    if privileged or limit == resource.RLIM_INFINITY:
        why = "this process has CAP_IPC_LOCK" if privileged else "unlimited"
        return Finding(_TOPIC, "memlock", Level.OK, f"any memory can be registered: {why}")
    each = f", since each of {nics} NICs pins all of it" if nics > 1 else ""
    found = (
        f"at most {format_size(limit // nics // KIB * KIB)} can be registered{each}; "
        f"a peer with notifications takes {format_size(_NOTIFYING)} of {format_size(limit)} as well"
    )
    if limit >= _LEAST * nics:
        return Finding(_TOPIC, "memlock", Level.OK, found)
    return Finding(
        _TOPIC,
        "memlock",
        Level.WARN,
        f"{found}; more fails with 'Cannot allocate memory'",
        "ulimit -l unlimited; for services LimitMEMLOCK=infinity; for containers --ulimit memlock=-1",
    )


def _pyverbs(load: Load, level: Level) -> tuple[Verbs | None, list[Finding]]:
    try:
        verbs = load()
    except TransportUnavailable as error:
        reason = str(error).removesuffix(f": {by_pyverbs.REMEDY}")
        return None, [Finding(_TOPIC, "pyverbs", level, reason, by_pyverbs.REMEDY)]
    return verbs, [Finding(_TOPIC, "pyverbs", Level.OK, "can be imported")]


def _chosen(device: ChosenDevice) -> Finding:
    numa = f", NUMA node {device.numa_node}" if device.numa_node >= 0 else ""
    found = f"used: {device.reason}; {device.link_layer}, {device.rate_gbps:g} Gb/s{numa}"
    remedy = ""
    if not device.active:
        remedy = (
            f"bring the link up: ip link set {device.netdev or 'NETDEV'} up, or check the cable"
        )
    elif device.link_layer == ETHERNET and not _routable(device):
        net = device.netdev or "its interface"
        remedy = (
            f"give {net} an IP address that peers reach, or name device.{device.name}.gid_index"
        )
    return Finding(_TOPIC, device.name, Level.WARN if remedy else Level.OK, found, remedy)


def _routable(device: ChosenDevice) -> bool:
    found = address(device.gid)
    known = device.gid_kind == ROCE_V2 and bool(device.netdev) and found is not None
    return known and found is not None and not found.is_link_local


def _opened(verbs: Verbs, name: str) -> Finding:
    try:
        verbs.open(name).close()
    except VerbsError as error:
        remedy = (
            "modprobe ib_uverbs; the files /dev/infiniband/uverbs* must be there and writable "
            "for this user; for containers --device=/dev/infiniband"
        )
        return Finding(_TOPIC, f"{name} opened", Level.BAD, str(error), remedy)
    return Finding(_TOPIC, f"{name} opened", Level.OK, "this process may use it")


def _ranks(
    chosen: Sequence[ChosenDevice], topology: Topology, settings: Settings
) -> Iterator[Finding]:
    locations = dict.fromkeys([f"cpu:{node.id}" for node in topology.numa_nodes] or ["*"])
    if topology.peer_memory:
        locations["cuda"] = None
    for location in (*locations, *(key for key in settings.nic_priority if key not in locations)):
        tiers = ranks(location, chosen, topology, settings)
        found = ", then ".join(", ".join(chosen[i].name for i in tier) for tier in tiers)
        yield Finding(_TOPIC, f"memory at {location}", Level.INFO, f"by {found}")


def _gpu(topology: Topology) -> Finding:
    subject = "nvidia_peermem"
    if topology.peer_memory:
        return Finding(_TOPIC, subject, Level.OK, "loaded: GPU memory can be registered")
    if "nvidia" not in topology.modules:
        return Finding(_TOPIC, subject, Level.INFO, "not loaded, and there is no NVIDIA driver")
    found = "not loaded: GPU memory cannot be registered, and is no candidate for this transport"
    return Finding(_TOPIC, subject, Level.WARN, found, "modprobe nvidia_peermem")


def _soft_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def _privileged(root: Path) -> bool:
    try:
        lines = (root / "proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    for line in lines.splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False
