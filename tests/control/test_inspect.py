"""An engine tells of itself to callers on its own machine, and to nobody else."""

from __future__ import annotations

import socket

import pytest
from control_harness import HANG_S, side

from tent_core.control import nearby
from tent_core.control.inquiry import inspect
from tent_core.control.nearby import is_nearby
from tent_core.errors import PermissionDenied, TransportError, UnknownSegment


@pytest.mark.parametrize(
    "peer",
    ["ipv4:127.0.0.1:5", "ipv4:127.8.8.8:5", "ipv6:%5B::1%5D:5", "ipv6:[::1]:5", "ipv6:[::ffff:127.0.0.1]:5"],
)  # fmt: skip
def test_loopback_is_nearby(peer: str) -> None:
    assert is_nearby(peer)


@pytest.mark.parametrize(
    "peer",
    ["ipv4:198.51.100.7:5", "ipv6:[2001:db8::7]:5", "ipv6:%5Bfe80::1%25none%5D:5", "unix:/tmp/x", "",
     "ipv4:x", "ipv4:127.0.0.1", "ipv4:999.1.1.1:5", "ipv6:[::ffff:198.51.100.7]:5"],
)  # fmt: skip
def test_others_and_nonsense_are_not(peer: str) -> None:
    assert not is_nearby(peer)


def test_an_address_of_this_machines_own_is_nearby() -> None:
    own = own_address()
    if own is None:
        pytest.skip("this machine has no address but loopback")
    assert is_nearby(f"ipv4:{own}:5")
    # The neighbour that differs in the last bit is none.
    head, _, last = own.rpartition(".")
    assert not is_nearby(f"ipv4:{head}.{int(last) ^ 1}:5")


def own_address() -> str | None:
    from tent_core.control.listen import outward_host

    return outward_host(v6=False)


def test_a_zone_in_an_address_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def look(host: str, *_: object, **__: object) -> list[object]:
        asked.append(host)
        raise socket.gaierror

    monkeypatch.setattr(nearby.address, "look_up", look)
    assert not is_nearby("ipv6:%5Bfe80::1%25lo%5D:5")
    assert asked == ["fe80::1%lo"]


def test_an_inspection_answers_what_the_engine_says() -> None:
    with side() as it:
        it.handler.document = b'{"engine": "me", "peers": []}'
        assert inspect(it.name, HANG_S) == {"engine": "me", "peers": []}
        assert it.plane.sessions() == []


def test_a_large_document_crosses() -> None:
    with side() as it:
        it.handler.document = b'{"peers": "' + bytes(7 << 20).replace(b"\0", b"x") + b'"}'
        assert len(inspect(it.name, HANG_S)["peers"]) == 7 << 20


def test_a_caller_from_elsewhere_is_denied_and_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from tent_core.control import server

    monkeypatch.setattr(server, "is_nearby", lambda peer: False)
    with side() as it:
        it.handler.document = b"{}"
        with pytest.raises(PermissionDenied, match=r"its own machine only.*comes from ipv4:127"):
            inspect(it.name, HANG_S)


def test_an_engine_that_takes_too_long_and_one_that_is_not_there_are_errors() -> None:
    with side() as it:
        with pytest.raises(TransportError, match="did not tell"):
            inspect(it.name, 0.5)
        name = it.name
    with pytest.raises(UnknownSegment, match="no engine answers at"):
        inspect(name, 2.0)


def test_an_answer_that_is_no_document_is_an_error() -> None:
    with side() as it:
        it.handler.document = b"\xff{"
        with pytest.raises(TransportError, match="no document"):
            inspect(it.name, HANG_S)
