"""Two sides of the transport over one stand-in for the library, driven by the contract alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tent_core.testing.harness import Row, Side, Submitted
from tent_core.transport import Endpoint, LocalBuffer, TransportDeclaration
from tent_core.types import Opcode
from tent_mock.mpcomm import StandIn
from tent_mpcomm import plugin
from tent_mpcomm.adapter import Adapter, ModuleAdapter
from tent_mpcomm.transport import MpcommTransport

KIB = 1 << 10


def declare(library: StandIn | Adapter) -> TransportDeclaration:
    """The transport, with the library that a test hands in."""
    adapter = ModuleAdapter(library) if isinstance(library, StandIn) else library
    return replace(plugin.tent_transport(), factory=lambda: MpcommTransport(adapter))


class Rig:
    """`here` initiates, `there` owns; both have started, and use one stand-in, whose calls are counted."""

    def __init__(self, library: StandIn | None = None, **settings: Any) -> None:
        self.library = library if library is not None else StandIn()
        self.declaration = declare(self.library)
        self.here = Side(self.declaration, **settings)
        self.there = Side(self.declaration, **settings)
        self.endpoints: list[Endpoint] = []

    def __enter__(self) -> Rig:
        self.here.start()
        self.there.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.library.let_go()
        for endpoint in self.endpoints:
            endpoint.close("the test ends")
        self.here.transport.stop()
        self.there.transport.stop()

    def open(self) -> Endpoint:
        """An endpoint of `here` for `there`."""
        endpoint = self.here.connect(self.there)
        self.endpoints.append(endpoint)
        return endpoint

    def calls(self, name: str) -> int:
        """How often a call of the library was made, by either side."""
        return self.library.calls[name]

    def pair(self, size: int = 4 * KIB) -> tuple[LocalBuffer, LocalBuffer]:
        """A buffer here with random content, and one there with zeros."""
        content = np.random.default_rng(5).integers(1, 256, size, np.uint8)
        return self.here.register(content), self.there.register(np.zeros(size, np.uint8))

    def content(self, side: Side, buffer: LocalBuffer) -> NDArray[np.uint8]:
        """What is in a buffer now."""
        return side.arrays[buffer.id]


def transfer(
    endpoint: Endpoint, opcode: Opcode, local: LocalBuffer, remote: LocalBuffer, size: int = 0
) -> Submitted:
    """One request over the whole of both buffers, or their first `size` bytes."""
    row: Row = (local, 0, remote, 0, size or min(local.length, remote.length))
    return Submitted(endpoint, opcode, [row])


def write(endpoint: Endpoint, local: LocalBuffer, remote: LocalBuffer, size: int = 0) -> Submitted:
    """A write of that kind."""
    return transfer(endpoint, Opcode.WRITE, local, remote, size)


def at_once(count: int, call: Callable[[], None]) -> list[BaseException]:
    """Let `count` threads make a call at the same time; what they raised."""
    barrier = threading.Barrier(count)
    errors: list[BaseException] = []

    def run() -> None:
        barrier.wait(10)
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return errors
