"""Which RDMA devices are used, by which port and address, and how near each is to a memory. Pure functions.

The machine is what `tent_core.topology` has read from sysfs; no device is opened here. Index i of
`Choice.chosen` is what the rest of the package means by NIC i.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tent_core.errors import TransportUnavailable, UsageError
from tent_core.memory import check_location
from tent_core.mistakes import nearest
from tent_core.topology import Gid, RdmaDevice, RdmaPort, Topology
from tent_rdma.settings import DeviceSettings, Settings

ACTIVE = "ACTIVE"
ETHERNET, INFINIBAND = "Ethernet", "InfiniBand"
ROCE_V2 = "RoCE v2"
_LOCAL, _REMOTE = 10, 20
"""Distances of ACPI's SLIT, which the kernel uses: 10 is the same node, 20 any other by default."""

HOW_TO_TRY = (
    "to try RDMA without a NIC: modprobe rdma_rxe && rdma link add rxe0 type rxe netdev NIC"
)


class DeviceMistake(TransportUnavailable):
    """The settings name a device, port, GID or location that does not exist; `mistakes` has them all."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("; ".join(mistakes))


@dataclass(frozen=True, slots=True)
class ChosenDevice:
    """A device that is used, and how.

    `gid` is text as sysfs shows it, `gid_kind` the kernel's word for it (`RoCE v2`), `netdev` the interface
    that it belongs to ("" on InfiniBand), `numa_node` -1 where it is not known. `active` is whether the port
    was up when it was chosen: one that was not is kept, since it may come up. `reason` is for people.
    """

    name: str
    port: int
    gid_index: int
    gid: str
    gid_kind: str
    link_layer: str
    netdev: str
    numa_node: int
    rate_gbps: float
    active: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """What is used, in the order of the kernel's names, and what is not: (name, reason)."""

    chosen: tuple[ChosenDevice, ...]
    rejected: tuple[tuple[str, str], ...]


def choose(topology: Topology, settings: Settings) -> Choice:
    """The devices, ports and GIDs to use.

    Raises DeviceMistake for names and numbers in the settings that do not exist, and TransportUnavailable,
    with the reason for each device, when none is left.
    """
    if not topology.rdma_devices:
        raise TransportUnavailable(f"this machine has no RDMA device; {HOW_TO_TRY}")
    mistakes = list(_mistakes(topology, settings))
    if mistakes:
        raise DeviceMistake(mistakes)
    chosen: list[ChosenDevice] = []
    rejected: list[tuple[str, str]] = []
    for device in topology.rdma_devices:
        answer = _judge(device, settings)
        if isinstance(answer, ChosenDevice):
            chosen.append(answer)
        else:
            rejected.append((device.name, answer))
    if not chosen:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
        raise TransportUnavailable(f"no RDMA device can be used ({reasons}); see `tent doctor`")
    return Choice(tuple(chosen), tuple(rejected))


def ranks(
    location: str, chosen: Sequence[ChosenDevice], topology: Topology, settings: Settings
) -> tuple[tuple[int, ...], ...]:
    """Indexes of `chosen` for memory at `location`, in tiers of falling preference; each is in exactly one.

    `nic_priority` decides, by the location itself (`cpu:0`), its kind (`cpu`) or `*`, whichever it has
    first; devices that its lists do not name come last. Without it the distance between NUMA nodes does, for
    `cpu:N`, where what does not say its node counts as near. For other memory all are equal.
    """
    order = _priority(location, settings)
    if order is None:
        far = [_distance(location, device, topology) for device in chosen]
    else:
        tiers = {name: tier for tier, names in reversed(list(enumerate(order))) for name in names}
        far = [tiers.get(device.name, len(order)) for device in chosen]
    return tuple(tuple(i for i, f in enumerate(far) if f == tier) for tier in sorted(set(far)))


class NicInfo(Protocol):
    """What `pair` has to know of a NIC, ours or a peer's."""

    @property
    def name(self) -> str: ...
    @property
    def gid(self) -> str: ...
    @property
    def link_layer(self) -> str: ...


def pair(local: Sequence[NicInfo], remote: Sequence[NicInfo]) -> list[tuple[int, int]]:
    """Pairs (local index, remote index) that may form a rail, in falling preference.

    First one for each local NIC: its own peer. Then the alternates, for when that one is down: a second for
    each local NIC, a third, and so on, until every pair that can work has been named once. A NIC without any
    pair has no NIC over there that speaks its protocol: another link layer, or IPv4 against IPv6.

    The peer of a NIC is the one of the same name, else the one at the same index, else the one that the
    fewest have taken. That is what clusters are built for: the NICs of one number of all hosts hang on one
    switch (rail-optimised), equal hosts name them equally, and from one rail to another it is a longer way
    or none at all. Subnets are not compared: a GID does not show how long the prefix is, and routed rails
    have many. When both sides have the same names, both directions form the same rails.
    """
    own = _own_peers(local, remote)
    pairs = list(own.items())
    for step in range(1, len(remote)):
        for here, there in own.items():
            alternate = (there + step) % len(remote)
            if _reach(local[here], remote[alternate]):
                pairs.append((here, alternate))
    return pairs


# --- one device


def _judge(device: RdmaDevice, settings: Settings) -> ChosenDevice | str:
    """How the device is used, or why it is not."""
    if device.name in settings.exclude:
        return "excluded by the settings (exclude)"
    if settings.devices and device.name not in settings.devices:
        return "not among the devices of the settings"
    if device.node_type not in ("", "CA"):
        return f"a {device.node_type}, which has no reliable connections without rdma_cm"
    if not device.ports:
        return "has no port"
    told = settings.device.get(device.name, DeviceSettings())
    port, why_port = _port(device, told)
    answer = _gid(port, settings.ip_version, told)
    if answer is None:
        state = port.state or "state unknown"
        return f"port {port.number} ({state}) has no GID: give its interface an address"
    gid, why_gid = answer
    return ChosenDevice(
        name=device.name,
        port=port.number,
        gid_index=gid.index,
        gid=gid.value,
        gid_kind=gid.kind,
        link_layer=port.link_layer,
        netdev=gid.netdev,
        numa_node=device.numa_node,
        rate_gbps=port.rate_gbps,
        active=port.state == ACTIVE,
        reason=f"port {port.number}: {why_port}; GID {gid.index}: {why_gid}",
    )


def _port(device: RdmaDevice, told: DeviceSettings) -> tuple[RdmaPort, str]:
    by_number = {port.number: port for port in device.ports}
    if told.port is not None:
        port, why = by_number[told.port], "by the settings"
    else:
        port = min(device.ports, key=lambda p: (not p.gids, p.state != ACTIVE, p.number))
        why = "the only one" if len(by_number) == 1 else "the first that is active and has a GID"
        if len(by_number) > 1 and port.state != ACTIVE:
            why = "none that has a GID is active"
    if port.state != ACTIVE:
        why += f", {port.state or 'of unknown state'}, used when it comes up"
    return port, why


def _gid(port: RdmaPort, version: int, told: DeviceSettings) -> tuple[Gid, str] | None:
    """The GID to use and why; None where there is none."""
    if told.gid_index is not None:
        gid = next(gid for gid in port.gids if gid.index == told.gid_index)
        return gid, f"by the settings, {_described(gid)}"
    if not port.gids:
        return None
    if port.link_layer == INFINIBAND:
        return min(port.gids, key=lambda gid: gid.index), "the first, on InfiniBand"
    gid = min(port.gids, key=lambda gid: (_liking(gid, version), gid.index))
    why = (
        f"{ROCE_V2} with an IPv{version} address, as preferred",
        f"{ROCE_V2}; there is none with an IPv{version} address",
        f"{ROCE_V2}, but link-local: only peers of one network segment are reached",
        f"{ROCE_V2}, but without a network device",
        f"there is none of {ROCE_V2}",
    )[_liking(gid, version)]
    return gid, f"{_described(gid)}: {why}"


def _liking(gid: Gid, version: int) -> int:
    """How much a GID of an Ethernet port is liked, 0 the most."""
    found = address(gid.value)
    if gid.kind != ROCE_V2 or found is None:
        return 4
    if not gid.netdev:
        return 3  # in a container, perhaps one of the host or of another container
    if found.is_link_local:
        return 2
    return 0 if found.version == version else 1


def _described(gid: Gid) -> str:
    on = f" on {gid.netdev}" if gid.netdev else ""
    return f"{address(gid.value) or gid.value}{on} ({gid.kind or 'of unknown kind'})"


def address(gid: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a RoCE GID is; None if it is none. IPv4 ones are mapped: ::ffff:10.0.0.1."""
    try:
        found = ipaddress.IPv6Address(gid)
    except ValueError:
        return None
    return found.ipv4_mapped or found


# --- mistakes in the settings


def _mistakes(topology: Topology, settings: Settings) -> Iterator[str]:
    """What the settings name that does not exist, one sentence each."""
    known = [device.name for device in topology.rdma_devices]
    for where, names in _named(settings):
        for name in dict.fromkeys(names):
            if name not in known:
                close = nearest(name, known)
                hint = f" (did you mean {close!r}?)" if close else ""
                yield f"{where}: no RDMA device {name!r} here{hint}; there are: {', '.join(known)}"
    for name, told in settings.device.items():
        device = topology.rdma_device(name)
        if device is not None:
            yield from _untrue(device, told)
    for location in settings.nic_priority:
        try:
            check_location(location)
        except UsageError as error:
            yield f"nic_priority: {error}"


def _named(settings: Settings) -> Iterator[tuple[str, Iterable[str]]]:
    yield "devices", settings.devices
    yield "exclude", settings.exclude
    yield "device", settings.device
    for location, tiers in settings.nic_priority.items():
        yield f"nic_priority.{location}", [name for tier in tiers for name in tier]


def _untrue(device: RdmaDevice, told: DeviceSettings) -> Iterator[str]:
    """What is told of a device and is not so. A device without ports is rejected elsewhere."""
    numbers = [port.number for port in device.ports]
    if told.port is not None and told.port not in numbers:
        there = ", ".join(map(str, numbers)) or "none"
        yield f"device.{device.name}.port: there is no port {told.port}; there are: {there}"
    elif told.gid_index is not None and device.ports:
        port, _ = _port(device, told)
        if told.gid_index not in [gid.index for gid in port.gids]:
            there = ", ".join(f"{gid.index} = {_described(gid)}" for gid in port.gids) or "none"
            yield (
                f"device.{device.name}.gid_index: port {port.number} has no GID {told.gid_index}; "
                f"there are: {there}"
            )


# --- distance


def _priority(location: str, settings: Settings) -> tuple[tuple[str, ...], ...] | None:
    for key in (location, location.partition(":")[0], "*"):
        if key in settings.nic_priority:
            return settings.nic_priority[key]
    return None


def _distance(location: str, device: ChosenDevice, topology: Topology) -> int:
    found = re.fullmatch(r"cpu:([0-9]{1,6})", location)
    if not found or device.numa_node < 0:
        return _LOCAL
    here, there = int(found[1]), device.numa_node
    if here == there:
        return _LOCAL
    nodes = {node.id: (place, node) for place, node in enumerate(topology.numa_nodes)}
    if here not in nodes:
        return _LOCAL  # nobody knows where that is
    distances = nodes[here][1].distances
    place = nodes[there][0] if there in nodes else len(distances)
    return distances[place] if place < len(distances) else _REMOTE


# --- pairs


def _own_peers(local: Sequence[NicInfo], remote: Sequence[NicInfo]) -> dict[int, int]:
    """For each local NIC that reaches any, by index and in order, the index of its own peer."""
    own: dict[int, int] = {}
    by_name = {nic.name: there for there, nic in reversed(list(enumerate(remote)))}
    for here, nic in enumerate(local):
        there = by_name.get(nic.name)
        if there is not None and _reach(nic, remote[there]):
            own[here] = there
    named = set(own.values())
    for here, (nic, other) in enumerate(zip(local, remote, strict=False)):
        if here not in own and here not in named and _reach(nic, other):
            own[here] = here
    taken = Counter(own.values())
    for here, nic in enumerate(local):
        reached = [there for there, other in enumerate(remote) if _reach(nic, other)]
        if reached and here not in own:
            # Of those that the fewest have taken, the next after its own index: a smaller peer is spread.
            own[here] = min(reached, key=lambda t: (taken[t], (t - here) % len(remote)))
            taken[own[here]] += 1
    return dict(sorted(own.items()))


def _reach(one: NicInfo, other: NicInfo) -> bool:
    """Whether a packet of one could be understood by the other at all."""
    if one.link_layer != other.link_layer:
        return False
    if one.link_layer == INFINIBAND:
        return True
    mine, theirs = address(one.gid), address(other.gid)
    return mine is not None and theirs is not None and mine.version == theirs.version
