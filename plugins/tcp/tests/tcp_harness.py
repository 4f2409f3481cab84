"""Two real processes for a test: the transport of this one, and an owner that does what it is told."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tcp_owner import Owner, serve

from tent_core.descriptor import PeerKey, SegmentDescriptor
from tent_core.errors import TransportError
from tent_core.testing import wait_until
from tent_core.testing.harness import Row, requests
from tent_core.transport import Endpoint, LocalBuffer
from tent_core.types import Opcode, Permission
from tent_core.work import Work

ANSWER_S = 30.0


class OwnerProcess:
    """A process with one transport and its memory. Ends with the block, however the test ends."""

    def __init__(self, host: str = "127.0.0.1", **settings: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._link, theirs = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(theirs, host, settings))
        self.process.start()
        theirs.close()
        self._answer()
        self.pid: int = self.process.pid or 0

    def call(self, name: str, *arguments: Any) -> Any:
        """Have `tcp_owner.Commands.name` run there; its answer. Raises what it raised."""
        self.tell(name, *arguments)
        return self._answer()

    def tell(self, name: str, *arguments: Any) -> None:
        """The same without the wait."""
        self._link.send((name, arguments))

    def offer(
        self,
        size: int,
        *,
        allocated: bool = True,
        permission: Permission = Permission.GLOBAL_READ_WRITE,
        value: int = 0,
    ) -> LocalBuffer:
        """A buffer there whose bytes are all `value`."""
        buffer: LocalBuffer = self.call("offer", size, allocated, permission, value)
        return buffer

    def content(self, buffer: LocalBuffer) -> NDArray[np.uint8]:
        """What a buffer holds there."""
        return np.frombuffer(self.call("content", buffer.id), np.uint8)

    def peer(self, key: PeerKey | None = None) -> FixedPeer:
        """The process as a peer, known as `key`, sees it now."""
        return FixedPeer(self.call("snapshot"), self, key)

    def signal_receiver(self, number: int) -> int:
        """Send a signal to its receiver process; that process's id."""
        pid: int = self.call("receiver")
        os.kill(pid, number)
        return pid

    def kill(self) -> None:
        """End it without a goodbye."""
        self.process.kill()
        # Not join: it waits for a pipe, which a forked child keeps open.
        wait_until(lambda: process_is_gone(self.pid))

    def __enter__(self) -> OwnerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()
        try:
            wait_until(lambda: process_is_gone(self.pid), 5)
        except AssertionError:
            self.kill()
        self.process.join()
        self.process.close()

    def _answer(self) -> Any:
        if not self._link.poll(ANSWER_S):
            raise AssertionError(f"the owner process {self.process.pid} did not answer")
        answer = self._link.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


class FixedPeer:
    """A peer with one snapshot; implements `transport.Peer` and keeps `suspicions`. Its control plane is the
    pipe to its process, if that is given and knows `here`, the key of this side."""

    def __init__(
        self,
        segment: SegmentDescriptor,
        process: OwnerProcess | None = None,
        here: PeerKey | None = None,
    ) -> None:
        self.segment = segment
        self.suspicions: list[Exception] = []
        self._process = process
        self._here = here

    def with_segment(self, segment: SegmentDescriptor) -> FixedPeer:
        """The same peer with another snapshot."""
        return FixedPeer(segment, self._process, self._here)

    @property
    def key(self) -> PeerKey:
        return self.segment.key

    def bootstrap(self, payload: bytes, timeout: float) -> bytes:
        if self._process is None or self._here is None:
            raise TransportError("nobody answers on the control plane")
        answer: bytes = self._process.call("bootstrap", *self._here, payload)
        return answer

    def begin_bootstrap(self, payload: bytes, timeout: float) -> Future[bytes]:
        answer: Future[bytes] = Future()

        def ask() -> None:
            try:
                answer.set_result(self.bootstrap(payload, timeout))
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=ask, daemon=True).start()
        return answer

    def suspect(self, cause: Exception) -> None:
        self.suspicions.append(cause)


class Here(Owner):
    """The side of this process."""

    def __enter__(self) -> Here:
        self.start()
        return self


def work(
    endpoint: Endpoint,
    opcode: Opcode,
    rows: Sequence[Row],
    *,
    timeout: float = 20.0,
    waiting: bool = True,
    wait_for: float = 25.0,
) -> Work:
    """Submit and wait for the end, in this thread (`waiting`) or in the transport's."""
    ended = threading.Event()
    made = Work(
        requests(opcode, rows),
        lambda _: ended.set(),
        may_block=waiting,
        deadline=time.monotonic() + timeout,
    )
    endpoint.submit(made)
    assert ended.wait(wait_for), f"not finished: {np.flatnonzero(made.status == 1)}"
    assert made.surplus == 0
    return made


def process_is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "XZ"
    except (FileNotFoundError, ProcessLookupError):
        return True
