"""A control plane with recorders around it, in this process or one of its own, and a bad network."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from tent_core import host
from tent_core.control.connection import Connection
from tent_core.control.contract import Checksum, Notification, SessionInfo
from tent_core.control.plane import ControlPlane
from tent_core.descriptor import BufferDescriptor, PeerKey, SegmentDescriptor
from tent_core.log import Logger
from tent_core.segments import LocalSegment
from tent_core.testing import wait_until
from tent_core.types import BufferState, Permission

HANG_S = 20.0


@dataclass(frozen=True)
class Control:
    """Timings short enough for tests, and long enough for a busy machine."""

    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    call_timeout_s: float = 5.0
    keepalive_time_s: float = 0.3
    keepalive_timeout_s: float = 1.0
    reconnect_max_s: float = 0.2


@dataclass(frozen=True)
class Peers:
    grace_s: float = 10.0
    max: int = 100


@dataclass
class Handler:
    """An engine that writes down what it is told."""

    room: int = 1 << 30
    notes: list[Notification] = field(default_factory=list)
    opened: list[SessionInfo] = field(default_factory=list)
    departed: list[tuple[SessionInfo, str]] = field(default_factory=list)
    bootstraps: list[tuple[PeerKey, str, int, bytes]] = field(default_factory=list)
    answer: Any = None
    document: bytes | None = None
    verified: list[Sequence[Checksum]] = field(default_factory=list)
    verdict: Future[str | None] = field(default_factory=Future)

    def bootstrap(
        self, peer: PeerKey, transport: str, number: int, payload: bytes
    ) -> Future[bytes]:
        self.bootstraps.append((peer, transport, number, payload))
        future: Future[bytes] = Future()
        if isinstance(self.answer, Exception):
            future.set_exception(self.answer)
        elif self.answer is None:
            future.set_result(payload[::-1])
        elif self.answer != "never":
            future.set_result(self.answer)
        return future

    def notification(self, note: Notification) -> bool:
        if len(self.notes) >= self.room:
            return False
        self.notes.append(note)
        return True

    def verify(self, checksums: Sequence[Checksum]) -> Future[str | None]:
        self.verified.append(checksums)
        return self.verdict

    def session_opened(self, info: SessionInfo) -> None:
        self.opened.append(info)

    def session_departed(self, info: SessionInfo, reason: str) -> None:
        self.departed.append((info, reason))

    def inspect(self) -> Future[bytes]:
        future: Future[bytes] = Future()
        if self.document is not None:
            future.set_result(self.document)
        return future


@dataclass
class Listener:
    """Writes down what becomes of a peer."""

    updates: list[tuple[SegmentDescriptor, SegmentDescriptor]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    asked: int = 0

    def updated(self, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        self.updates.append((old, new))

    def departed(self, reason: str) -> None:
        self.reasons.append(reason)

    def asked_to_retire(self) -> None:
        self.asked += 1


class Side:
    """A control plane that is bound and serves a segment."""

    def __init__(
        self, control: Control | None = None, peers: Peers | None = None, incarnation: bytes = b""
    ) -> None:
        log = Logger(lambda *_: None)
        self.plane = ControlPlane(control or Control(), peers or Peers(), log)
        self.name = self.plane.bind(5.0)
        key = incarnation or secrets.token_bytes(16)
        self.local = LocalSegment(SegmentDescriptor(self.name, key, 1, host.identify()))
        self.handler = Handler()
        self.plane.serve(self.local, self.handler)

    @property
    def key(self) -> PeerKey:
        return self.local.snapshot.key

    def connect(
        self, name: str, listener: Listener | None = None, timeout: float = 5.0
    ) -> Connection:
        return self.plane.connect(name, timeout, listener or Listener())

    def publish(self, *buffers: BufferDescriptor) -> int:
        table = MappingProxyType({b.id: b for b in buffers})
        return self.local.update(lambda old: replace(old, buffers=table)).version

    def behind(self, version: int) -> list[int]:
        return [info.session for info in self.plane.unacknowledged(version, lambda _: True)]

    def stop(self) -> None:
        self.plane.stop(5.0)


@contextlib.contextmanager
def side(control: Control | None = None, peers: Peers | None = None, **more: Any) -> Iterator[Side]:
    it = Side(control, peers, **more)
    try:
        yield it
    finally:
        it.stop()


def buffer(
    number: int, generation: int = 1, state: BufferState = BufferState.LIVE
) -> BufferDescriptor:
    return BufferDescriptor(
        number, generation, f"b{number}", 4096 * (number + 1), 4096, "cpu:0",
        Permission.GLOBAL_READ_WRITE, state,
    )  # fmt: skip


class Process:
    """This file run as a process: `run(source)` executes there, beside a Side `me`; answers are JSON."""

    def __init__(self, setup: str = "me = Side()") -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid
        self.run(setup)

    def run(self, source: str, answer: str = "None") -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([source, answer]) + "\n")
        self.process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(HANG_S):
                raise TimeoutError(source)
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(source)
        return json.loads(line)

    def ask(self, expression: str) -> Any:
        return self.run("", expression)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(HANG_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Proxy:
    """A TCP proxy on a port of its own: it passes, holds all bytes back, or cuts and refuses connections."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.target: tuple[str, int] | None = None
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._stalled = False
        self._cut = False
        self._wake, self._waker = socket.socketpair()
        self._ended = False
        self._thread = threading.Thread(target=self._pump, daemon=True)
        self._thread.start()

    def stall(self) -> None:
        """Keep connections open and carry nothing."""
        self._stalled = True

    def cut(self) -> None:
        """Close all connections, and each new one at once."""
        self._cut = True
        self._waker.send(b"x")

    def heal(self) -> None:
        self._stalled = self._cut = False
        self._waker.send(b"x")

    def close(self) -> None:
        self._ended = True
        self._waker.send(b"x")
        self._thread.join(5)
        for one in (self._listener, self._wake, self._waker):
            one.close()

    def _pump(self) -> None:
        while not self._ended:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake, selectors.EVENT_READ)
                selector.register(self._listener, selectors.EVENT_READ)
                for pair in [] if self._stalled else self._pairs:
                    for one, other in (pair, pair[::-1]):
                        selector.register(one, selectors.EVENT_READ, (pair, other))
                for ready, _ in selector.select(0.05):
                    self._serve(ready.fileobj, ready.data)
                if self._cut:
                    self._drop(list(self._pairs))
        self._drop(list(self._pairs))

    def _serve(self, source: Any, data: Any) -> None:
        if source is self._wake:
            self._wake.recv(100)
        elif source is self._listener:
            accepted, _ = self._listener.accept()
            if self._cut or self.target is None:
                accepted.close()
            else:
                self._pairs.append((accepted, socket.create_connection(self.target)))
        elif data[0] in self._pairs:
            try:
                piece = source.recv(1 << 16)
                data[1].sendall(piece)
            except OSError:
                piece = b""
            if not piece:
                self._drop([data[0]])

    def _drop(self, pairs: list[tuple[socket.socket, socket.socket]]) -> None:
        for pair in pairs:
            self._pairs.remove(pair)
            for one in pair:
                one.close()


@contextlib.contextmanager
def behind_proxy(peers: Peers | None = None) -> Iterator[tuple[Side, Proxy]]:
    """A side that peers reach through a proxy only."""
    proxy = Proxy()
    try:
        with side(Control(advertise=proxy.address), peers) as it:
            assert it.plane._bound is not None
            proxy.target = tuple(it.plane._bound)
            yield it, proxy
    finally:
        proxy.close()


__all__ = [
    "HANG_S", "Control", "Handler", "Listener", "Peers", "Process", "Proxy", "Side", "behind_proxy",
    "buffer", "side", "wait_until",
]  # fmt: skip


def _main() -> None:
    names: dict[str, Any] = dict(globals())
    for line in sys.stdin:
        source, answer = json.loads(line)
        exec(source, names)
        print(json.dumps(eval(answer, names)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    _main()
