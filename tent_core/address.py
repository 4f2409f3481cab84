"""Segment names and listen addresses: `host:port`, `[v6]:port`, parsed and formatted in one place."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from tent_core.errors import UsageError

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"
_HOSTNAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*\.?")
_ZONE = re.compile(r"[A-Za-z0-9_.\-]{1,15}")  # an interface name (IFNAMSIZ) or index
_FORM = "write host:port, 192.0.2.7:port or [2001:db8::7]:port"


class AddressError(UsageError, ValueError):
    """Text that is no address of the form `host:port` or `[v6]:port`."""


class Address(NamedTuple):
    """A host (a name, an IPv4 address, or an IPv6 address without brackets) and a port from 0 to 65535."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


def parse(text: str) -> Address:
    """The address that `text` names; IP addresses come back in their canonical spelling.

    Port 0 is allowed: for listening it means any. Raises AddressError.
    """
    if text.startswith("["):
        host, closed, tail = text[1:].partition("]")
        if not closed or not tail.startswith(":"):
            raise AddressError(
                f"{text!r} is no address: after the brackets :port was expected; {_FORM}"
            )
        return Address(_v6(host, text), _port(tail[1:], text))
    host, colon, port = text.rpartition(":")
    if not colon:
        raise AddressError(f"{text!r} is no address: it has no port; {_FORM}")
    if ":" in host:
        raise AddressError(f"{text!r} is no address: an IPv6 address needs brackets; {_FORM}")
    return Address(_name_or_v4(host, text), _port(port, text))


def parse_host(text: str) -> str:
    """The host that `text` names, without a port; IPv6 with or without brackets. Raises AddressError."""
    if text.startswith("[") and text.endswith("]"):
        return _v6(text[1:-1], text)
    return _v6(text, text) if ":" in text else _name_or_v4(text, text)


def look_up(
    host: str, port: int, kind: socket.SocketKind, flags: int = 0
) -> Sequence[tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]]:
    """What `socket.getaddrinfo` finds for a host that was parsed. Raises OSError, also if there is none.

    It is given bytes: for text it would first load the tables of international names, which no host has here.
    """
    return socket.getaddrinfo(host.encode("ascii"), port, type=kind, flags=flags)


def bracketed(host: str) -> str:
    """`host` as it stands before a colon and a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Whether only the machine itself can reach `host`."""
    ip = _ip(host)
    if ip is None:
        return host.rstrip(".").lower() == "localhost" or host.rstrip(".").lower().endswith(
            ".localhost"
        )
    return _unmapped(ip).is_loopback


def is_wildcard(host: str) -> bool:
    """Whether `host` means every address of the machine: it can be listened on, not reached."""
    ip = _ip(host)
    return ip is not None and _unmapped(ip).is_unspecified


def is_v6(host: str) -> bool:
    """Whether `host` is an IPv6 address."""
    return isinstance(_ip(host), ipaddress.IPv6Address)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _unmapped(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip


def _v6(host: str, text: str) -> str:
    ip = _ip(host)
    if not isinstance(ip, ipaddress.IPv6Address):
        raise AddressError(f"{text!r} is no address: {host!r} is no IPv6 address; {_FORM}")
    if ip.scope_id is not None and not _ZONE.fullmatch(ip.scope_id):
        raise AddressError(f"{text!r} is no address: {ip.scope_id!r} is no zone; {_FORM}")
    return str(ip)


def _name_or_v4(host: str, text: str) -> str:
    ip = _ip(host)
    if ip is not None:
        return str(ip)
    # What looks like a dotted quad and is none would otherwise be asked of the name service.
    if re.fullmatch(r"[0-9.]+", host) or not _HOSTNAME.fullmatch(host):
        raise AddressError(f"{text!r} is no address: {host!r} is no host; {_FORM}")
    return host


def _port(port: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise AddressError(f"{text!r} is no address: {port!r} is no port from 0 to 65535; {_FORM}")
    return int(port)
