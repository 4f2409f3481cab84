"""Where a peer's handshake port is, as text: `v1:<host>:<port>`, read strictly."""

from __future__ import annotations

import re
from typing import NamedTuple

from tent_core import address
from tent_core.errors import TransportError

VERSION = 1
_PREFIX = re.compile(r"v([0-9]+):", re.ASCII)
_FORM = "v1:<IPv4 address or host name>:<port>"


class Malformed(TransportError):
    """Text that names no handshake port; says what was found and what was expected."""


class HandshakeAddress(NamedTuple):
    """A host that has IPv4 (an address, or a name) and a port from 1 to 65535."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def encode(self) -> bytes:
        """As it is published."""
        return f"v{VERSION}:{self}".encode("ascii")


def decode(payload: bytes) -> HandshakeAddress:
    """The address in an attribute. Raises Malformed."""
    try:
        return parse(payload.decode("ascii"))
    except UnicodeDecodeError:
        raise Malformed(f"{payload!r} is no handshake address: it is no ASCII; {_FORM}") from None


def parse(text: str) -> HandshakeAddress:
    """The address that `text` names; without a prefix it is of version 1. Raises Malformed."""
    prefix = _PREFIX.match(text)
    if prefix is not None and prefix[1] != str(VERSION):
        raise Malformed(
            f"{text!r} is a handshake address of version {prefix[1]}; this package knows version "
            f"{VERSION}: install versions of tent-mpcomm that fit"
        )
    rest = text[prefix.end() :] if prefix is not None else text
    host, colon, port = rest.rpartition(":")
    if not colon:
        raise Malformed(f"{text!r} is no handshake address: it has no port; {_FORM}")
    if ":" in host or "[" in host:
        raise Malformed(f"{text!r} is no handshake address: MPComm has no IPv6; {_FORM}")
    return HandshakeAddress(check_host(host, text), _port(port, text))


def check_host(host: str, text: str = "") -> str:
    """A host that peers can connect to by IPv4. Raises Malformed."""
    text = text or host
    if ":" in host:
        raise Malformed(f"{text!r} is no handshake address: MPComm has no IPv6; {_FORM}")
    try:
        found = address.parse_host(host)
    except address.AddressError:
        raise Malformed(f"{text!r} is no handshake address: {host!r} is no host; {_FORM}") from None
    if address.is_wildcard(found):
        raise Malformed(f"{text!r} is no handshake address: {host} cannot be reached; {_FORM}")
    return found


def _port(port: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", port, re.ASCII) or not 1 <= int(port) <= 65535:
        raise Malformed(
            f"{text!r} is no handshake address: {port!r} is no port from 1 to 65535; {_FORM}"
        )
    return int(port)
