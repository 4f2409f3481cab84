"""The text that says where a peer's handshake port is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tent_mpcomm.attribute import HandshakeAddress, Malformed, decode, parse

LABELS = st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True)
HOSTS = st.one_of(
    st.ip_addresses(v=4).map(str).filter(lambda host: host != "0.0.0.0"),
    st.lists(LABELS, min_size=1, max_size=3).map(".".join),
)


@given(HOSTS, st.integers(1, 65535))
def test_what_is_published_is_read_back(host: str, port: int) -> None:
    address = HandshakeAddress(host, port)
    assert decode(address.encode()) == address
    assert address.encode().startswith(b"v1:")


@given(HOSTS.filter(lambda host: not host[1:].isdecimal()), st.integers(1, 65535))
def test_text_without_a_prefix_is_of_version_1(host: str, port: int) -> None:
    assert parse(f"{host}:{port}") == (host, port)


@pytest.mark.parametrize("host", ["v", "vm7", "v1.example", "v-2", "velo", "v1a"])
def test_a_host_whose_name_begins_like_a_prefix_is_none(host: str) -> None:
    assert parse(f"{host}:80") == (host, 80)
    assert parse(f"v1:{host}:80") == (host, 80)


@pytest.mark.parametrize("text", ["v2:10.0.0.1:80", "v12:80", "v0:a:1", "v01:a:1", "v2:[::1]:80"])
def test_another_version_is_named_in_the_error(text: str) -> None:
    with pytest.raises(Malformed, match="of version "):
        parse(text)


@pytest.mark.parametrize("text", ["[::1]:80", "::1:80", "v1:[2001:db8::7]:80", "v1:2001:db8::7:80"])
def test_ipv6_is_refused_by_name_instead_of_being_cut_at_a_colon(text: str) -> None:
    with pytest.raises(Malformed, match="IPv6"):
        parse(text)


@pytest.mark.parametrize(
    "port", ["0", "65536", "-1", "+80", " 80", "80 ", "8_0", "0x50", "", "٨٠", "8e1", "100000"]
)
def test_a_port_is_1_to_65535_in_plain_digits(port: str) -> None:
    with pytest.raises(Malformed, match="port"):
        parse(f"v1:10.0.0.1:{port}")


@pytest.mark.parametrize("host", ["", "0.0.0.0", "10.0.0", "a b", "1.2.3.4.5", "-a"])
def test_a_host_that_cannot_be_reached_is_refused(host: str) -> None:
    with pytest.raises(Malformed, match="host"):
        parse(f"v1:{host}:80")


@given(st.binary(max_size=64))
def test_any_bytes_are_an_address_or_a_clear_error(payload: bytes) -> None:
    try:
        host, port = decode(payload)
    except Malformed:
        return
    assert host
    assert 1 <= port <= 65535
