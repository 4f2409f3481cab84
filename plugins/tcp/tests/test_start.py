"""Where the receiver listens, what is advertised, and why it does not start or is not reached."""

from __future__ import annotations

import multiprocessing.spawn
import os
import signal
import socket
from dataclasses import replace
from typing import Any

import pytest
from tcp_harness import FixedPeer, Here, OwnerProcess, work

from tent_core import models
from tent_core.errors import ConfigError, TransportError, TransportUnavailable, Unreachable
from tent_core.testing.leaks import nothing_stays_behind
from tent_core.types import Opcode, Status
from tent_tcp.protocol import Attribute
from tent_tcp.receiver.owner import Owner
from tent_tcp.settings import Settings

KIB = 1 << 10


def advertised(side: Here) -> str:
    return Attribute.decode(side.segment.snapshot.attributes["tcp"].payload).address


@pytest.mark.parametrize("host", ["::1", "127.0.0.1", "localhost", "[::1]"])
def test_bytes_go_over_either_family(here: Here, host: str) -> None:
    with OwnerProcess(host) as owner:
        local, remote = here.offer(KIB, value=8), owner.offer(KIB)
        endpoint = here.transport.connect(owner.peer())
        assert (
            work(endpoint, Opcode.WRITE, [(local, 0, remote, 0, KIB)]).status[0] == Status.COMPLETED
        )
        assert set(owner.content(remote).tolist()) == {8}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "127.0.0.1:"),
        ({"listen": "127.0.0.2"}, "127.0.0.2:"),
        ({"listen": "0.0.0.0"}, "127.0.0.1:"),
        ({"listen": "::"}, "127.0.0.1:"),
        ({"listen": "0.0.0.0", "advertise": "::1"}, "[::1]:"),
        ({"advertise": "node-7.example"}, "node-7.example:"),
    ],
)
def test_what_is_advertised_is_what_was_bound(settings: dict[str, Any], expected: str) -> None:
    with Here(**settings) as side:
        shown = advertised(side)
        assert shown.startswith(expected)
        port = int(shown.rpartition(":")[2])
        with socket.create_connection(("127.0.0.2" if "127.0.0.2" in shown else "127.0.0.1", port)):
            pass


def test_a_wildcard_listener_takes_both_families() -> None:
    with Here(listen="::") as side:
        port = int(advertised(side).rpartition(":")[2])
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, port), timeout=5):
                pass


def test_a_port_that_is_taken_says_so_and_leaves_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        def attempt() -> None:
            side = Here(port=port)
            with pytest.raises(TransportUnavailable, match=f"port {port} of 127.0.0.1 is taken"):
                side.start()
            side.transport.stop()

        attempt()
        with nothing_stays_behind():
            attempt()


@pytest.mark.parametrize(
    ("listen", "message"),
    [("192.0.2.1", "no address of this machine"), ("no-host.invalid", "cannot listen on no-host")],
)
def test_an_address_that_is_not_ours_says_so(listen: str, message: str) -> None:
    with pytest.raises(TransportUnavailable, match=message):
        Here(listen=listen).start()


@pytest.mark.parametrize(
    "values",
    [
        {"listen": "999.1.1.1"},
        {"listen": "1.2.3.4:5"},
        {"advertise": "a b"},
        {"advertise": "0.0.0.0"},
    ],
)
def test_settings_that_are_no_hosts_are_mistakes(values: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        models.make(Settings, **values)


def test_a_receiver_process_that_cannot_start_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with Here() as side:
        with monkeypatch.context() as patch:
            patch.setattr(multiprocessing.spawn, "_python_exe", "/nonexistent/python")
            with pytest.raises(TransportError, match=r"receiver process .*cannot be started"):
                side.offer(KIB)
        side.offer(KIB)  # it is tried again
        assert side.transport.holdings()["processes"] == 1


def test_a_receiver_process_that_fails_at_once_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('this numpy is broken')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Here() as side, pytest.raises(TransportError, match="this numpy is broken"):
        side.offer(KIB)


def test_the_secret_is_in_no_argument_and_no_environment(owner: OwnerProcess) -> None:
    owner.offer(KIB)
    receiver = owner.call("receiver")
    secret = Attribute.decode(owner.peer().segment.attributes["tcp"].payload).secret
    for name in ("cmdline", "environ"):
        with open(f"/proc/{receiver}/{name}", "rb") as file:
            content = file.read()
        assert secret not in content
        assert secret.hex().encode() not in content


def test_the_receiver_leaves_signals_to_its_engine(owner: OwnerProcess, here: Here) -> None:
    local, remote = here.offer(KIB), owner.offer(KIB)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        owner.signal_receiver(number)
    endpoint = here.transport.connect(owner.peer())
    assert work(endpoint, Opcode.WRITE, [(local, 0, remote, 0, KIB)]).status[0] == Status.COMPLETED


def test_loopback_on_another_machine_is_unreachable_and_says_so(
    owner: OwnerProcess, here: Here
) -> None:
    segment = owner.peer().segment
    elsewhere = replace(segment, host=replace(segment.host, boot_id="another"))
    with pytest.raises(Unreachable, match="loopback"):
        here.transport.connect(FixedPeer(elsewhere))


@pytest.mark.parametrize("payload", [b"", b"\x02" + bytes(60), b"\x01" + bytes(32) + b"no-port"])
def test_an_attribute_that_is_not_understood_is_unreachable(
    owner: OwnerProcess, here: Here, payload: bytes
) -> None:
    segment = owner.peer().segment
    attribute = replace(segment.attributes["tcp"], payload=payload)
    with pytest.raises(Unreachable):
        here.transport.connect(FixedPeer(replace(segment, attributes={"tcp": attribute})))
    with pytest.raises(Unreachable):
        here.transport.connect(FixedPeer(replace(segment, attributes={})))


def test_registered_memory_is_declined_where_the_kernel_forbids_to_reach_it(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Here() as side:
        side.offer(KIB)
        monkeypatch.setattr(side.transport, "_obstacle", "ptrace scope 3")
        assert "tcp" not in _attributes_of(side, allocated=False)
        assert "tcp" in _attributes_of(side, allocated=True)
        declined = [e for e in side.events if e["event"] == "tcp_registered_memory_declined"]
        assert [e["reason"] for e in declined] == ["ptrace scope 3"]


def _attributes_of(side: Here, allocated: bool) -> Any:
    buffer = side.offer(KIB, allocated)
    return side.segment.snapshot.buffers[buffer.id].attributes


def test_memory_that_holds_another_token_is_no_owner() -> None:
    import ctypes

    page = ctypes.create_string_buffer(b"x" * 16, 16)
    good = Owner(os.getpid(), ctypes.addressof(page), b"x" * 16, lambda: True)
    assert good.obstacle == ""
    other = Owner(os.getpid(), ctypes.addressof(page), b"y" * 16, lambda: True)
    assert "other memory" in other.obstacle
    assert "process_vm_readv" in Owner(os.getpid(), 8, b"x" * 16, lambda: True).obstacle


def test_holdings_count_what_is_there(owner: OwnerProcess) -> None:
    with Here() as side:
        local, remote = side.offer(KIB), owner.offer(KIB)
        endpoint = side.transport.connect(owner.peer())
        work(endpoint, Opcode.WRITE, [(local, 0, remote, 0, KIB)])
        assert side.transport.holdings() == {
            "threads": 2,
            "processes": 1,
            "endpoints": 1,
            "accepted_streams": 0,
        }
        assert endpoint.holdings() == {"streams": 1}
        endpoint.close("test")
        assert side.transport.holdings()["endpoints"] == 0
        assert endpoint.holdings() == {"streams": 0}
