"""Where an engine listens and which address it advertises: what is advertised is what was bound."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

from tent_core import address
from tent_core.address import Address
from tent_core.errors import TentError

_SIOCGIFADDR = 0x8915  # netdevice(7)
_BRIDGES = (
    "docker",
    "br-",
    "virbr",
    "veth",
    "cni",
    "flannel",
    "cali",
    "cilium",
    "lxc",
    "lxd",
    "podman",
    "kube",
)
_ELSEWHERE = {socket.AF_INET: "198.51.100.1", socket.AF_INET6: "2001:db8::1"}  # RFC 5737, RFC 3849


def resolve(listen: str) -> Address:
    """The IP address and port of the setting `control.listen`; a host name is looked up. Raises TentError."""
    try:
        wanted = address.parse(listen)
    except address.AddressError as error:
        raise TentError(f"control.listen: {error}") from None
    try:
        # One address, not all that a name has: gRPC would bind each of them, with a port of its own.
        found = address.look_up(
            wanted.host, wanted.port, socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise TentError(
            f"control.listen: {wanted.host!r} cannot be resolved ({error}): give an address of this machine"
        ) from None
    return Address(address.parse_host(str(found[0][4][0])), wanted.port)


def advertised(advertise: str | None, bound: Address) -> Address:
    """What peers are told: the setting `control.advertise` (a host, or host:port), else what was bound.

    For a wildcard that is the address from which this machine reaches others: see `outward_host`.
    Raises TentError when there is none, or when the setting is no address that can be reached.
    """
    if advertise is None:
        if not address.is_wildcard(bound.host):
            return bound
        host = outward_host(v6=address.is_v6(bound.host))
        if host is None:
            raise TentError(
                f"control.listen is {bound.host}, and no interface but loopback has an address to advertise: "
                "set control.advertise"
            )
        return Address(host, bound.port)
    try:
        told = address.parse(advertise)
    except address.AddressError:
        try:
            told = Address(address.parse_host(advertise), 0)
        except address.AddressError as error:
            raise TentError(f"control.advertise: {error}") from None
    if address.is_wildcard(told.host):
        raise TentError(f"control.advertise: {advertise!r} is no address that a peer can reach")
    return told if told.port else Address(told.host, bound.port)


def why_not_bound(wanted: Address) -> str:
    """What the kernel says when `wanted` is bound, and the remedy."""
    family = socket.AF_INET6 if address.is_v6(wanted.host) else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((wanted.host, wanted.port))
            probe.listen(1)
    except OSError as error:
        remedy = _PRIVILEGED if isinstance(error, PermissionError) else _REMEDY
        return f"{error.strerror or error}: {remedy}"
    return f"it was taken for a moment: {_REMEDY}"


_REMEDY = (
    "set control.listen to an address of this machine and a port that is free (port 0 takes any)"
)
_PRIVILEGED = "ports below 1024 need CAP_NET_BIND_SERVICE; set control.listen to another"


def outward_host(*, v6: bool) -> str | None:
    """The address to advertise when all are listened on, or None.

    The source address of the default route, as the kernel picks it (nothing is sent). Without a default
    route: the first address of an interface that is no loopback, bridges of containers last. Listening on
    `[::]` prefers IPv6 and takes IPv4 where there is none.
    """
    families = (socket.AF_INET6, socket.AF_INET) if v6 else (socket.AF_INET,)
    for family in families:
        if host := _source(family):
            return host
        names = sorted((_is_bridge(name), index, name) for index, name in socket.if_nameindex())
        for _, _, name in names:
            if host := _v6_of(name) if family == socket.AF_INET6 else _v4_of(name):
                return host
    return None


def _source(family: socket.AddressFamily) -> str | None:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_ELSEWHERE[family], 9))
            return _reachable(str(probe.getsockname()[0]))
    except OSError:
        return None


def _reachable(host: str) -> str | None:
    ip = ipaddress.ip_address(host)
    return None if ip.is_loopback or ip.is_link_local or ip.is_unspecified else str(ip)


def _v4_of(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return _reachable(socket.inet_ntoa(answer[20:24]))


def _v6_of(name: str) -> str | None:
    try:
        with open("/proc/net/if_inet6") as file:
            rows = [line.split() for line in file]
    except OSError:  # the kernel has no IPv6
        return None
    found = [
        _reachable(str(ipaddress.IPv6Address(bytes.fromhex(row[0]))))
        for row in rows
        if row[5] == name
    ]
    return next((host for host in found if host), None)


def _is_bridge(name: str) -> bool:
    return name.startswith(_BRIDGES) or os.path.isdir(f"/sys/class/net/{name}/bridge")
