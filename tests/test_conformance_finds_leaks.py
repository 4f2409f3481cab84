"""A stranger's transport that keeps something of peers that have gone fails the shared suite, by name."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from tent_core.descriptor import PeerKey
from tent_core.plugins import Registry
from tent_core.testing import conformance
from tent_core.transport import Endpoint, Peer
from tent_core.types import Retained
from tent_mock.transport import NAME, MockEndpoint, MockTransport, declare

TIMES = rf"\(({conformance.PEERS}|{2 * conformance.PEERS}) times\)"
"""Once or twice a peer: its own engine, in the same process, has the same transport."""
Undo = list[Callable[[], object]]


class OpensAFile(MockTransport):
    """Leaves a descriptor open for every peer that it connects to."""

    def connect(self, peer: Peer) -> Endpoint:
        descriptor = os.open(os.devnull, os.O_RDONLY)
        undo.append(lambda: os.close(descriptor))
        return super().connect(peer)


class OpensAFileWhenAsked(MockTransport):
    """Leaves a descriptor open for every peer that connects to it."""

    def bootstrap(self, peer: PeerKey, payload: bytes) -> bytes:
        descriptor = os.open(os.devnull, os.O_RDONLY)
        undo.append(lambda: os.close(descriptor))
        return super().bootstrap(peer, payload)


class StartsAThread(MockTransport):
    """Starts a thread for every peer, and nobody ends it."""

    def connect(self, peer: Peer) -> Endpoint:
        end = threading.Event()
        undo.append(end.set)
        threading.Thread(target=end.wait, args=(60,), name="lingers", daemon=True).start()
        return super().connect(peer)


class MapsMemory(MockTransport):
    """Maps memory for every peer, and never unmaps it."""

    def connect(self, peer: Peer) -> Endpoint:
        descriptor = os.memfd_create("never-unmapped")
        os.ftruncate(descriptor, 4096)
        mapping = mmap.mmap(descriptor, 4096)
        os.close(descriptor)
        undo.append(mapping.close)
        return super().connect(peer)


class KeepsState(MockTransport):
    """Has a table of the peers that connected, and says so, but does not heed `release`."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[PeerKey] = set()

    def bootstrap(self, peer: PeerKey, payload: bytes) -> bytes:
        self._known.add(peer)
        return super().bootstrap(peer, payload)

    def holdings(self) -> Mapping[str, int]:
        return {**super().holdings(), "known peers": len(self._known)}


class KeepsEndpoints(MockTransport):
    """Refers to its endpoints for ever."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[Endpoint] = []

    def connect(self, peer: Peer) -> Endpoint:
        self._made.append(super().connect(peer))
        return self._made[-1]


class KeepsNothing(KeepsEndpoints, KeepsState):
    """The same tables, and lets go when it is told to."""

    def connect(self, peer: Peer) -> Endpoint:
        endpoint = MockTransport.connect(self, peer)
        assert isinstance(endpoint, MockEndpoint)
        self._made.append(endpoint)
        close = endpoint.close

        def forget(reason: str) -> None:
            close(reason)
            with suppress(ValueError):
                self._made.remove(endpoint)
            del endpoint.close

        endpoint.close = forget  # type: ignore[method-assign]
        return endpoint

    def release(self, peer: PeerKey, reason: str) -> None:
        self._known.discard(peer)


undo: Undo = []


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    while undo:
        undo.pop()()


def churn(kind: type[MockTransport], **claims: Any) -> None:
    """The suite's test, for a transport whose engines are all in this process."""

    class Suite(conformance.TransportConformance):
        transport = NAME
        settings: Mapping[str, Any] = {"handshake": True}

        @classmethod
        def registry(cls) -> Registry:
            return Registry.of(replace(declare(**claims), factory=kind))

    Suite().test_peers_that_come_and_go_leave_nothing_of_themselves()


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (OpensAFile, rf"descriptors: /dev/null {TIMES}"),
        (OpensAFileWhenAsked, rf"descriptors: /dev/null {TIMES}"),
        (StartsAThread, rf"threads: lingers {TIMES}"),
        (MapsMemory, rf"mappings: /memfd:never-unmapped \(deleted\) {TIMES}"),
        (KeepsState, rf"holdings\(\): known peers {TIMES}"),
        (KeepsEndpoints, rf"endpoints that are still referred to: .*MockEndpoint {TIMES}"),
    ],
)
def test_a_transport_that_leaks_fails_with_what_it_leaks(
    kind: type[MockTransport], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance.TransportConformance, "settles_s", 0.5)
    with pytest.raises(AssertionError, match=fault):
        churn(kind)


def test_a_transport_that_lets_go_of_all_that_it_kept_passes() -> None:
    churn(KeepsNothing)


@pytest.mark.parametrize("descriptors", [1, 2])
def test_what_a_transport_declares_to_retain_is_allowed_and_no_more(
    descriptors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance.TransportConformance, "settles_s", 0.5)
    kept = Retained("what its library cannot free", descriptors=descriptors)
    if descriptors == 2:  # one for each of the two engines that connect
        churn(OpensAFile, retained_per_peer=kept)
    else:
        with pytest.raises(AssertionError, match=rf"/dev/null \({conformance.PEERS} times\)"):
            churn(OpensAFile, retained_per_peer=kept)
