"""Engines in processes of their own, driven line by line from a test, and stopped or killed as it says.

A process takes half a second to import what an engine needs. A `Nursery` has imported it, and forks.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tent_core.testing.waiting import wait_until

_LENGTH = struct.Struct(">Q")
START_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
WARM_UP_S = 120.0
"""For a nursery to import all, on a machine that is emulated."""


class PeerError(Exception):
    """What a peer ran raised; `kind` is the name of the error's class, and the text has the traceback."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        self.kind = kind
        self.message = message
        super().__init__(f"{kind}: {message}\n{trace}")


class Nursery:
    """A process that forks others which have imported all, and started no engine: fresh ones, at once.

    `also` names more modules to import, such as those of a transport. None may start a thread. Ends with its
    block, or with the process that made it; what it has forked goes on. Thread-safe.
    """

    def __init__(self, also: Sequence[str] = ()) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*_command(theirs, "fork"), *also],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )

    def fork(self, theirs: socket.socket) -> Forked:
        """A process that obeys the other end of `theirs`."""
        with self._lock:
            self._socket.settimeout(WARM_UP_S)
            socket.send_fds(self._socket, [b"f"], [theirs.fileno()])
            return Forked(int.from_bytes(_exactly(self._socket, 8), "big"))

    def close(self) -> None:
        """End it. Idempotent."""
        self._socket.close()
        self._process.kill()
        self._process.wait(10)

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Forked:
    """A process that is no child of this one; what `Popen` can, as far as peers need it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """0 when it has ended, else None."""
        return self._ended(0)

    def wait(self, timeout: float) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return 0

    def kill(self) -> None:
        """SIGKILL. Nothing when it has ended."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _ended(self, timeout: float) -> int | None:
        if self._pidfd >= 0:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                return None
            os.close(self._pidfd)
            self._pidfd = -1
        return 0


class PeerProcess:
    """A Python process with an `engine`. It ends with this object's block, or with the test's own process.

    `run(source, **values)` executes Python there, with `tent`, `np`, `engine` and whatever earlier sources
    defined, and answers the value of the last line if that is an expression. `before` is run before the
    engine is made (limits, for instance), `wrapper` is put before the command line, as in
    `("ip", "netns", "exec", "left")`. With a `nursery` it is forked there. Not thread-safe.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        before: str = "",
        wrapper: Sequence[str] = (),
        nursery: Nursery | None = None,
        start_timeout: float = START_TIMEOUT_S,
    ) -> None:
        self._socket, theirs = socket.socketpair()
        self.process: subprocess.Popen[bytes] | Forked
        with theirs:
            if nursery is not None:
                self.process = nursery.fork(theirs)
            else:
                self.process = subprocess.Popen(
                    [*wrapper, *_command(theirs, "serve")],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                )
        try:
            self.run(before + "\nimport os, tent_core as tent, numpy as np", timeout=start_timeout)
            self.run("engine = tent.Engine(config)", timeout=start_timeout, config=config)
            self.segment_name: str = self.run("engine.segment_name")
            self.pid: int = self.run("os.getpid()")
        except BaseException:
            self.kill()
            raise

    def run(self, source: str, timeout: float = CALL_TIMEOUT_S, **values: Any) -> Any:
        """Execute `source` there and wait. Raises PeerError with what it raised, TimeoutError, or EOFError if
        the process has ended."""
        self.begin(source, **values)
        return self.answer(timeout)

    def begin(self, source: str, **values: Any) -> None:
        """Execute `source` there and do not wait; call `answer` once for each `begin`, in order."""
        _send(self._socket, (source, values))

    def answer(self, timeout: float = CALL_TIMEOUT_S) -> Any:
        """The answer to the oldest `begin` that has none yet."""
        self._socket.settimeout(timeout)
        error, value = _receive(self._socket)
        if error is not None:
            raise PeerError(*error)
        return value

    def stop(self) -> None:
        """Stop all its threads, in whatever they do (SIGSTOP), and wait until they have stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(
            lambda: set(thread_states(self.pid)) == {"T"}, STOP_TIMEOUT_S, f"{self.pid} to stop"
        )

    def resume(self) -> None:
        """Let it go on (SIGCONT)."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it without a goodbye (SIGKILL), and wait for its end. Idempotent."""
        self.process.kill()  # before the socket closes: it would end in good order at that
        self._socket.close()
        self.process.wait(10)

    def close(self, timeout: float = 10.0) -> None:
        """Close the engine there and end the process; AssertionError if it does not end. Idempotent."""
        if self.process.poll() is None and self._socket.fileno() >= 0:
            with contextlib.suppress(EOFError):
                self.run("engine.close()", timeout=timeout)
        self._socket.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"process {self.process.pid} went on for {timeout:g} s after its engine closed"
            ) from None

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()


def thread_states(pid: int) -> str:
    """What the kernel says that the threads of a process do, a letter each as in proc(5): "T" is stopped."""
    found = ""
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            # The name, which may be anything, is in parentheses before it.
            found += path.read_text().rpartition(")")[2].split()[0]
    return found


def _command(theirs: socket.socket, what: str) -> list[str]:
    return [sys.executable, "-m", __name__, what, str(theirs.fileno())]


def _send(connection: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return pickle.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise EOFError("the other process has ended")
        data += piece
    return bytes(data)


def _execute(source: str, names: dict[str, Any]) -> Any:
    tree = ast.parse(source)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "<peer>", "exec"), names)
        return None
    del tree.body[-1]
    exec(compile(tree, "<peer>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<peer>", "eval"), names)


def _serve(connection: socket.socket) -> None:
    connection.set_inheritable(False)
    names: dict[str, Any] = {}
    while True:
        try:
            source, values = _receive(connection)
        except (EOFError, ConnectionError):
            return
        names.update(values)
        try:
            answer: Any = (None, _execute(source, names))
            pickle.dumps(answer)
        except Exception as error:
            answer = ((type(error).__name__, str(error), traceback.format_exc()), None)
        _send(connection, answer)


def _fork(connection: socket.socket) -> None:
    """Fork a process for each descriptor that comes, which serves it. Returns there as well."""
    # What an engine imports when it starts. Nothing of it may start a thread.
    import tent_core.config
    import tent_core.control.plane
    import tent_core.dispatch
    import tent_core.engine
    import tent_core.remote
    import tent_core.roster  # noqa: F401

    for name in sys.argv[3:]:
        importlib.import_module(name)
    connection.set_inheritable(False)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        except ConnectionError:
            return
        if not data:
            return
        with socket.socket(fileno=descriptors[0]) as theirs:
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                connection.close()
                _serve(theirs)
                return
        connection.sendall(pid.to_bytes(8, "big"))


if __name__ == "__main__":
    {"serve": _serve, "fork": _fork}[sys.argv[1]](socket.socket(fileno=int(sys.argv[2])))
