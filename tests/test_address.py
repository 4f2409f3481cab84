"""Addresses are parsed and formatted alike everywhere, IPv6 included."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tent_core import address
from tent_core.address import Address, AddressError
from tent_core.errors import UsageError

ports = st.integers(0, 65535)
v4 = st.ip_addresses(v=4).map(str)
v6 = st.ip_addresses(v=6).map(str)
label = st.from_regex(r"[a-z0-9_]([a-z0-9_-]{0,20}[a-z0-9_])?", fullmatch=True)
names = (
    st.lists(label, min_size=1, max_size=4)
    .map(".".join)
    .filter(lambda n: not n.replace(".", "").isdigit())
)


@settings(deadline=None)
@given(st.one_of(v4, v6, names), ports)
def test_an_address_is_read_back_as_it_was_written(host: str, port: int) -> None:
    assert address.parse(str(Address(host, port))) == Address(host, port)


@settings(deadline=None)
@given(st.ip_addresses(v=6), ports)
def test_every_spelling_of_an_ipv6_address_is_one_address(
    ip: ipaddress.IPv6Address, port: int
) -> None:
    spellings = {f"[{ip}]:{port}", f"[{ip.exploded}]:{port}", f"[{ip.exploded.upper()}]:{port}"}
    assert len({address.parse(s) for s in spellings}) == 1


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_an_address_or_an_error_that_says_what_to_write(text: str) -> None:
    try:
        parsed = address.parse(text)
    except AddressError as error:
        said = str(error)
    else:
        said = "write host:port" if address.parse(str(parsed)) == parsed else ""
    assert "write host:port" in said


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ":",
            "h",
            "h:",
            ":1",
            "h:65536",
            "h:-1",
            "h:+1",
            "h: 1",
            "h:1 ",
            "h:\u0661",
            "h:1\n",
            "h\n:1",
        ),
        *(
            "::1:5",
            "[::1]",
            "[::1]5",
            "[::1:5",
            "[h]:1",
            "[1.2.3.4]:1",
            "[fe80::1%]:1",
            "[fe80::1%a/b]:1",
        ),
        *("1.2.3:4", "1.2.3.4.5:6", "256.1.1.1:1", "a b:1", "-a:1", "a..b:1"),
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(AddressError):
        address.parse(text)


def test_an_error_of_an_address_is_a_usage_error_and_a_value_error() -> None:
    assert issubclass(AddressError, UsageError)
    assert issubclass(AddressError, ValueError)


def test_a_zone_stays_with_its_address() -> None:
    assert str(address.parse("[fe80::1%eth0]:7")) == "[fe80::1%eth0]:7"


@pytest.mark.parametrize(
    ("text", "host"), [("::1", "::1"), ("[::1]", "::1"), ("10.0.0.1", "10.0.0.1"), ("h", "h")]
)
def test_a_host_alone_is_read_with_or_without_brackets(text: str, host: str) -> None:
    assert address.parse_host(text) == host


@pytest.mark.parametrize(
    ("host", "loopback", "wildcard"),
    [
        ("127.0.0.1", True, False),
        ("127.8.8.8", True, False),
        ("::1", True, False),
        ("::ffff:127.0.0.1", True, False),
        ("localhost", True, False),
        ("a.localhost.", True, False),
        ("0.0.0.0", False, True),
        ("::", False, True),
        ("::ffff:0.0.0.0", False, True),
        ("10.0.0.1", False, False),
        ("fd00::1", False, False),
        ("example", False, False),
    ],
)
def test_loopback_and_wildcard_are_told_from_others(
    host: str, loopback: bool, wildcard: bool
) -> None:
    assert (address.is_loopback(host), address.is_wildcard(host)) == (loopback, wildcard)
