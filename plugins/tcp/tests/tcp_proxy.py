"""A way to a data port on which a test can hold bytes back, let them go, or cut it."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType

from tcp_harness import FixedPeer

from tent_core import address
from tent_core.testing import wait_until
from tent_tcp.protocol import Attribute

_PIECE = 64 << 10


class Proxy:
    """Passes streams on to the data port of `peer`; `through` is that peer as reached this way.

    Of each stream only the first `allowed` bytes go on, until `let_go`: the rest is taken and held, and it is
    passed on even when the initiator has closed its end meanwhile, as a slow network does.
    """

    def __init__(self, peer: FixedPeer, allowed: int) -> None:
        self._where = Attribute.decode(peer.segment.attributes["tcp"].payload)
        self._allowed = allowed
        self._go = threading.Event()
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._held: list[int] = []
        """Bytes that wait, by stream."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._start(self._accept)
        attributes = dict(peer.segment.attributes)
        here = Attribute(self._where.secret, f"127.0.0.1:{self._listener.getsockname()[1]}")
        attributes["tcp"] = replace(attributes["tcp"], payload=here.encode())
        self.through: FixedPeer = peer.with_segment(
            replace(peer.segment, attributes=MappingProxyType(attributes))
        )

    def let_go(self) -> None:
        """Pass on what was held, and wait until it has gone as far as it does."""
        self._go.set()
        for thread in self._threads[1:]:
            thread.join(10)

    def let_go_on(self) -> None:
        """Pass on what was held, and all that still comes."""
        self._go.set()

    def cut(self) -> None:
        """Close every stream on the initiator's side alone, and take no more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut_once()

    def cut_once(self) -> None:
        """Close every stream on the initiator's side alone."""
        for end in list(self._ends[::2]):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def wait_until_holding(self, size: int, stream: int = 0) -> None:
        """Wait until so many bytes of that stream, in the order of their making, are held."""
        wait_until(lambda: len(self._held) > stream and self._held[stream] >= size)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._go.set()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for end in self._ends:
            end.close()

    def _start(self, run: object, *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(address.parse(self._where.address))
            self._ends += [near, far]
            self._held.append(0)
            self._start(self._forth, near, far, len(self._held) - 1)
            self._start(self._back, far, near)

    def _forth(self, near: socket.socket, far: socket.socket, number: int) -> None:
        left, held = self._allowed, bytearray()
        near.settimeout(0.02)
        with suppress(OSError):
            while True:
                try:
                    data = near.recv(_PIECE)
                except TimeoutError:
                    if self._go.is_set() and held:
                        far.sendall(held)
                        held = bytearray()
                    continue
                if not data:
                    break
                if not self._go.is_set():
                    now, later = data[:left], data[left:]
                    left -= len(now)
                    held += later
                    self._held[number] += len(later)
                    data = now
                elif held:
                    data, held = bytes(held) + data, bytearray()
                if data:
                    far.sendall(data)
        self._go.wait(30)
        with suppress(OSError):
            far.sendall(held)
        with suppress(OSError):
            far.shutdown(socket.SHUT_WR)

    def _back(self, far: socket.socket, near: socket.socket) -> None:
        with suppress(OSError):
            while data := far.recv(_PIECE):
                near.sendall(data)
        with suppress(OSError):
            near.shutdown(socket.SHUT_WR)
