"""Whether a caller is on this machine, by the address that gRPC says it calls from."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import unquote

from tent_core import address

_ANY_PORT = 9


def is_nearby(peer: str) -> bool:
    """Whether `peer`, such as `ipv4:10.0.0.7:4711`, is loopback or an address of this machine's own.

    Who connects from elsewhere cannot have such an address: the answers to it would not leave this machine.
    """
    kind, _, where = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return False
    try:
        host = address.parse(where).host
    except address.AddressError:
        return False
    return address.is_loopback(host) or _is_own(host)


def _is_own(host: str) -> bool:
    # To an address of its own the kernel sends from that very address. (That it can be bound says nothing
    # where net.ipv4.ip_nonlocal_bind is set.) A datagram socket that is connected sends nothing.
    try:
        found = address.look_up(host, _ANY_PORT, socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
        family, kind, _, _, where = found[0]
        with socket.socket(family, kind) as one:
            one.connect(where)
            source = str(one.getsockname()[0])
    except OSError:
        return False
    return _bare(source) == _bare(host)


def _bare(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    ip = ipaddress.ip_address(host.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip
