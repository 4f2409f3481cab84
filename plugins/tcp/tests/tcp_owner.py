"""The other process of a test: a transport with memory, which does what it is told."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tent_core.descriptor import PeerKey, SegmentDescriptor
from tent_core.log import Logger
from tent_core.testing.harness import Side
from tent_core.transport import LocalBuffer
from tent_core.types import Permission
from tent_tcp.plugin import tent_transport


def allocate(size: int) -> tuple[NDArray[np.uint8], int]:
    """Memory backed by a memfd, as an engine makes it, and the memfd."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    return np.frombuffer(mmap.mmap(descriptor, size), np.uint8), descriptor


class Owner(Side):
    """A side with memory of both kinds, whose log is kept."""

    def __init__(self, host: str = "127.0.0.1", **settings: Any) -> None:
        self.events: list[dict[str, Any]] = []
        super().__init__(tent_transport(), **settings)
        context: Any = self.context
        context.log = Logger(
            lambda level, event, fields: self.events.append(
                {**fields, "event": event, "level": level}
            )
        )
        context.listen_host = context.advertise_host = host

    def offer(
        self,
        size: int,
        allocated: bool = True,
        permission: Permission = Permission.GLOBAL_READ_WRITE,
        value: int = 0,
    ) -> LocalBuffer:
        """A buffer whose bytes are all `value`."""
        array, descriptor = allocate(size) if allocated else (np.zeros(size, np.uint8), -1)
        array[:] = value
        return self.register(array, permission=permission, memory_fd=descriptor)


def describe(snapshot: SegmentDescriptor) -> SegmentDescriptor:
    """A snapshot that can be pickled."""
    buffers = {i: replace(b, attributes=dict(b.attributes)) for i, b in snapshot.buffers.items()}
    return replace(
        snapshot,
        attributes=dict(snapshot.attributes),
        transports=dict(snapshot.transports),
        buffers=buffers,
    )


class Commands:
    """What the test may ask for; each method is one command."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def offer(self, size: int, allocated: bool, permission: Permission, value: int) -> LocalBuffer:
        return self._owner.offer(size, allocated, permission, value)

    def snapshot(self) -> SegmentDescriptor:
        return describe(self._owner.segment.snapshot)

    def content(self, buffer: int) -> bytes:
        return self._owner.arrays[buffer].tobytes()

    def remove(self, buffer: int, timeout: float = 5.0) -> None:
        self._owner.transport.remove_buffer(self._owner.buffers[buffer], timeout)

    def remove_and_watch(self, buffer: int, value: int, seconds: float) -> bool:
        """Remove, fill, and say whether every byte stayed."""
        self.remove(buffer)
        array = self._owner.arrays[buffer]
        array[:] = value
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not (array == value).all():
                return False
        return True

    def receiver(self) -> int:
        return self.transport._receiver.pid  # type: ignore[no-any-return]

    def bootstrap(self, name: str, incarnation: bytes, payload: bytes) -> bytes:
        return self._owner.transport.bootstrap(PeerKey(name, incarnation), payload)

    def release(self, name: str, incarnation: bytes) -> None:
        self._owner.transport.release(PeerKey(name, incarnation), "test")

    def holdings(self) -> dict[str, int]:
        return dict(self._owner.transport.holdings())

    def counters(self) -> dict[str, int]:
        return self.transport._receiver.counters.read()  # type: ignore[no-any-return]

    def events(self) -> list[dict[str, Any]]:
        return list(self._owner.events)

    def compute_without_pause(self) -> None:
        """From now on a thread never lets go of the interpreter by itself."""
        import threading

        def spin() -> None:
            while True:
                pass

        threading.Thread(target=spin, daemon=True).start()

    def fork_a_child_that_stays(self) -> int:
        child = os.fork()
        if child == 0:
            signal.pause()
        return child

    @property
    def transport(self) -> Any:
        return self._owner.transport


def serve(link: Connection, host: str, settings: dict[str, Any]) -> None:
    """Do what comes over `link` until it ends."""
    with Owner(host, **settings) as owner:
        commands = Commands(owner)
        link.send(None)
        while True:
            try:
                name, arguments = link.recv()
            except EOFError:
                return
            if name == "exec":
                os.execv(sys.executable, [sys.executable, *arguments])
            try:
                answer = getattr(commands, name)(*arguments)
            except Exception as error:
                answer = error
            link.send(answer)
