"""What is advertised is what was bound, and what cannot be bound or reached is an error with its remedy."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys

import pytest
from control_harness import Control, side

from tent_core.address import Address
from tent_core.control import listen
from tent_core.errors import TentError


@pytest.mark.parametrize(
    ("advertise", "told"),
    [
        (None, "10.0.0.1:700"),
        ("kv.example", "kv.example:700"),
        ("10.9.9.9", "10.9.9.9:700"),
        ("10.9.9.9:80", "10.9.9.9:80"),
        ("10.9.9.9:0", "10.9.9.9:700"),
        ("fd00::1", "[fd00::1]:700"),
        ("[fd00::1]", "[fd00::1]:700"),
        ("[fd00::1]:80", "[fd00::1]:80"),
    ],
)
def test_the_advertised_address_is_the_bound_one_unless_the_settings_say_otherwise(
    advertise: str | None, told: str
) -> None:
    assert str(listen.advertised(advertise, Address("10.0.0.1", 700))) == told


@pytest.mark.parametrize("advertise", ["0.0.0.0", "[::]:80", "a b", "x:y:z"])
def test_what_no_peer_can_reach_is_not_advertised(advertise: str) -> None:
    with pytest.raises(TentError, match=r"control\.advertise"):
        listen.advertised(advertise, Address("10.0.0.1", 700))


def test_a_wildcard_advertises_what_this_machine_reaches_others_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listen, "outward_host", lambda *, v6: "fd00::7" if v6 else "10.0.0.7")
    assert str(listen.advertised(None, Address("0.0.0.0", 5))) == "10.0.0.7:5"
    assert str(listen.advertised(None, Address("::", 5))) == "[fd00::7]:5"


def test_a_wildcard_without_any_address_to_advertise_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listen, "outward_host", lambda *, v6: None)
    with pytest.raises(TentError, match=r"set control\.advertise"):
        listen.advertised(None, Address("0.0.0.0", 5))


@pytest.mark.parametrize("setting", ["nonsense", "127.0.0.1:99999", "no-such-host.invalid:1"])
def test_what_cannot_be_listened_on_is_an_error_that_names_the_setting(setting: str) -> None:
    with pytest.raises(TentError, match=r"control\.listen"):
        listen.resolve(setting)


def test_a_name_is_listened_on_at_one_address() -> None:
    assert listen.resolve("localhost:0").host in ("127.0.0.1", "::1")


def test_a_taken_port_is_an_error_and_never_shared() -> None:
    with (
        side() as first,
        pytest.raises(TentError, match=r"Address already in use: set control\.listen"),
        side(Control(listen=first.name)),
    ):
        pass


def test_an_address_of_another_machine_is_an_error() -> None:
    with (
        pytest.raises(TentError, match=r"cannot listen on 192\.0\.2\.99:0: .*assign"),
        side(Control(listen="192.0.2.99:0")),
    ):
        pass


def test_port_0_takes_any_and_that_one_is_advertised() -> None:
    with side() as it:
        assert it.name == f"127.0.0.1:{it.plane._bound.port}"
        assert (it.plane.listen_host, it.plane.advertised_host) == ("127.0.0.1", "127.0.0.1")
        socket.create_connection(("127.0.0.1", it.plane._bound.port)).close()


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="this kernel has no IPv6")
def test_an_ipv6_engine_is_reached_by_its_bracketed_name() -> None:
    with side(Control(listen="[::1]:0")) as it, side() as other:
        assert it.name.startswith("[::1]:")
        other.connect(it.name).notify("n", b"", 5)
        assert it.handler.notes[0].name == "n"


def test_an_interface_is_asked_for_its_addresses() -> None:
    assert listen._v4_of("lo") is None
    assert listen._v6_of("lo") is None
    assert listen._v4_of("no-such-nic") is None


NAMESPACE = """
set -e
ip link set lo up
ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up
{more}
{python} -c "from tent_core.control.listen import outward_host as o; print(o(v6=False), o(v6=True))"
"""


NIC = "ip link add e1 type veth peer e2; ip link set e1 up; ip link set e2 up"


@pytest.mark.namespaces
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and ip(8)")
@pytest.mark.parametrize(
    ("more", "found"),
    [
        ("", "172.17.0.1 172.17.0.1"),
        (
            f"{NIC}; ip addr add 10.7.0.1/24 dev e1",
            "10.7.0.1 10.7.0.1",
        ),
        (
            f"{NIC}; ip addr add fd07::1/64 dev e1 nodad",
            "172.17.0.1 fd07::1",
        ),
        (
            f"{NIC}; ip addr add 10.7.0.1/24 dev e1; ip addr add 10.8.0.1/24 dev e2; "
            "ip route add default via 10.8.0.9",
            "10.8.0.1 10.8.0.1",
        ),
    ],
    ids=["a bridge alone", "a NIC before a bridge", "ipv6", "the default route first"],
)
def test_the_address_to_advertise_is_that_of_the_default_route_or_of_a_nic_and_of_a_bridge_last(
    more: str, found: str
) -> None:
    script = NAMESPACE.format(more=more, python=sys.executable)
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", script], capture_output=True, text=True, timeout=50
    )
    if (
        "docker0" in done.stderr
        or "Unknown device type" in done.stderr
        or "Operation not" in done.stderr
    ):
        pytest.skip(f"no namespaces with bridges here: {done.stderr.strip()}")
    assert done.stdout.strip() == found, done.stderr
