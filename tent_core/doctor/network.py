"""Addresses of this host, and what peers elsewhere could make of each."""

from __future__ import annotations

import fcntl
import ipaddress
import re
import socket
import struct
from pathlib import Path

from tent_core.doctor.finding import Finding, Level

_TOPIC = "network"
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_BRIDGES = re.compile(r"(docker|br-|veth|virbr|cni|flannel|cali|lxc)")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def network(root: Path) -> list[Finding]:
    """Findings about addresses and ports."""
    found = [_judge(name, address) for name, address in addresses(root)]
    return [*found, host_name(), ports(root)]


def addresses(root: Path) -> list[tuple[str, Address]]:
    """Interfaces and their addresses: the first IPv4 address of each, and all IPv6 ones."""
    return [*_v4(), *_v6(root)]


def _v4() -> list[tuple[str, Address]]:
    found: list[tuple[str, Address]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no IPv4 address
            found.append((name, ipaddress.IPv4Address(answer[20:24])))
    return found


def _v6(root: Path) -> list[tuple[str, Address]]:
    try:
        lines = (root / "proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [(row[5], ipaddress.IPv6Address(bytes.fromhex(row[0]))) for row in rows if len(row) == 6]


def _judge(name: str, address: Address) -> Finding:
    subject = f"{name} {address}"
    shown = f"[{address}]:PORT" if address.version == 6 else f"{address}:PORT"
    if address.is_loopback:
        return Finding(
            _TOPIC, subject, Level.INFO, f"{shown} is for peers on this host alone (the default)"
        )
    if address.is_link_local:
        return Finding(
            _TOPIC, subject, Level.INFO, "link-local: peers would have to name their own interface"
        )
    if _BRIDGES.match(name):
        return Finding(
            _TOPIC,
            subject,
            Level.WARN,
            "of a bridge for containers: other hosts cannot reach it, or reach another one",
            "do not advertise it: set control.listen to the address of a network that all hosts share",
        )
    return Finding(
        _TOPIC,
        subject,
        Level.OK,
        f"control.listen: '{shown}' offers this host to peers in that network",
    )


def host_name() -> Finding:
    """What the host's own name resolves to here; to peers it may mean something else."""
    name = socket.gethostname()
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError:
        return Finding(
            _TOPIC,
            f"name {name}",
            Level.INFO,
            "resolves to nothing: advertise addresses, not the name",
        )
    if all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in found):
        return Finding(
            _TOPIC,
            f"name {name}",
            Level.INFO,
            f"resolves to {', '.join(found)}: advertising the name could send peers to themselves",
            "advertise an address",
        )
    return Finding(_TOPIC, f"name {name}", Level.INFO, f"resolves to {', '.join(found)}")


def ports(root: Path) -> Finding:
    """From where the kernel takes a port when 0 is asked for: what a firewall must let through."""
    try:
        text = (root / "proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    except OSError:
        text = []
    span = "-".join(text) if len(text) == 2 else "unknown"
    return Finding(
        _TOPIC,
        "ports",
        Level.INFO,
        f"port 0 is any of {span}; a firewall between hosts must let it through, or fix the ports",
    )
