"""The receiver process as its engine sees it: started, ordered, watched, ended."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from multiprocessing import spawn
from typing import Any

from tent_core.errors import TransportError
from tent_tcp.counters import Counters
from tent_tcp.reactor import Reactor
from tent_tcp.receiver.orders import encode, receive

_POLL_S = 0.002
_TAIL = 2000


class ReceiverProcess:
    """A child process that serves the listening socket. Orders may come from any thread.

    It ends when this process does. `on_event` is told what it reports, and `on_end` once, with the reason,
    when it has ended although nobody stopped it; both in the reactor's thread.
    """

    def __init__(
        self,
        reactor: Reactor,
        listener: socket.socket,
        on_event: Callable[[dict[str, Any]], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Start the process; it serves nothing before the order `serve`. Raises OSError."""
        self._reactor = reactor
        self._on_event = on_event
        self._on_end = on_end
        self._lock = threading.Lock()
        self._numbers = 0
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._ended: str | None = None
        self._stopping = False
        self.counters = Counters()
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.setblocking(False)
        self._complaints = os.memfd_create("tent-tcp-stderr")
        owner = -1
        try:
            owner = os.pidfd_open(os.getpid())
            passed = (theirs.fileno(), listener.fileno(), owner, self.counters.descriptor)
            self._process = subprocess.Popen(
                [spawn.get_executable(), "-P", "-m", "tent_tcp.receiver", *map(str, passed)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._complaints,
                pass_fds=passed,
                env=_environment(),
            )
        except OSError:
            self._release()
            raise
        finally:
            theirs.close()
            if owner >= 0:
                os.close(owner)
        self.pid = self._process.pid
        self._pledge: Future[bytes] = Future()
        reactor.call(self._make_pledge)
        reactor.call(self._watch)

    def pledge(self, timeout: float) -> bytes:
        """What the page of the counters has for as long as this process is what it is. Raises OSError."""
        return self._pledge.result(timeout)

    def order(
        self, what: str, timeout: float, descriptors: Sequence[int] = (), **fields: Any
    ) -> dict[str, Any]:
        """Give an order and wait for its answer. Raises TransportError when none comes within `timeout` s."""
        deadline = time.monotonic() + timeout
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._ended is not None:
                raise TransportError(self._ended)
            self._numbers += 1
            number = self._numbers
            self._waiting[number] = answer
        try:
            self._send(encode({"order": what, "number": number, **fields}), descriptors, deadline)
            reply = answer.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeout:
            raise TransportError(
                f"the receiver process {self.pid} did not answer {what!r} within {timeout:g} s; "
                "it may be stopped, or the machine short of processor time"
            ) from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        if "error" in reply:
            raise TransportError(f"the receiver process {self.pid} failed at {reply['error']}")
        return reply

    @property
    def ended(self) -> bool:
        """Whether the process has ended, so that it touches no memory any more."""
        return self._process.poll() is not None

    def ends(self, timeout: float) -> bool:
        """Whether the process has ended, or does within `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, timeout))
            return True
        return False

    def stop(self, timeout: float) -> None:
        """End the process. Idempotent."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        with contextlib.suppress(OSError):  # it has ended already
            self._link.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # it runs nothing more, late or not
                self._process.wait(timeout)

    def close(self) -> None:
        """Close the descriptors; after `stop`, and after the reactor has stopped."""
        self._finish("the receiver process was stopped")
        self._release()

    def _release(self) -> None:
        self._link.close()
        self.counters.close()
        if self._complaints >= 0:
            os.close(self._complaints)
            self._complaints = -1

    def _send(self, data: bytes, descriptors: Sequence[int], deadline: float) -> None:
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            if descriptors
            else []
        )
        while True:
            try:
                self._link.sendmsg([data], rights, socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise FutureTimeout from None
                poll = select.poll()
                poll.register(self._link.fileno(), select.POLLOUT)
                poll.poll(left * 1000)
            except OSError as error:
                raise TransportError(
                    f"the receiver process {self.pid} has ended ({error})"
                ) from None

    # ---------------------------------------------------------------- in the reactor's thread

    def _make_pledge(self) -> None:
        try:
            self._pledge.set_result(self.counters.pledge())
        except Exception as error:
            self._pledge.set_exception(error)

    def _watch(self) -> None:
        self._reactor.watch(self._link.fileno(), select.EPOLLIN, self._hear)

    def _hear(self, _: int) -> None:
        while True:
            try:
                received = receive(self._link)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                received = None
            if received is None:
                self._reactor.forget(self._link.fileno())
                self._report_end()
                return
            message, _descriptors = received
            if "answer" in message:
                with self._lock:
                    future = self._waiting.get(message["answer"])
                if future is not None:
                    future.set_result(message)
            else:
                self._on_event(message)

    def _report_end(self) -> None:
        with self._lock:
            if self._stopping:
                return
        reason = f"the receiver process {self.pid} has ended{self._why()}"
        self._finish(reason)
        self._on_end(reason)

    def _finish(self, reason: str) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = reason
            waiting = list(self._waiting.values())
        for future in waiting:
            if not future.done():
                future.set_exception(TransportError(reason))

    def _why(self) -> str:
        deadline = time.monotonic() + 1.0
        while (code := self._process.poll()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        size = os.fstat(self._complaints).st_size
        said = (
            os.pread(self._complaints, _TAIL, max(0, size - _TAIL)).decode(errors="replace").strip()
        )
        how = f" by signal {-code}" if code is not None and code < 0 else f" with status {code}"
        return how + (f": {said}" if said else "")


def _environment() -> dict[str, str]:
    """The child finds what this process finds, however its path was made; numpy starts no threads there."""
    path = os.pathsep.join(str(p) or os.getcwd() for p in sys.path)
    return {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
