"""Engines in processes of their own, driven line by line from a test, and stopped or killed as it says."""

from __future__ import annotations

import ast
import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

_LENGTH = struct.Struct(">Q")
START_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 30.0


class PeerError(Exception):
    """What a peer ran raised; `kind` is the name of the error's class, and the text has the traceback."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        self.kind = kind
        self.message = message
        super().__init__(f"{kind}: {message}\n{trace}")


class PeerProcess:
    """A Python process with an `engine`. It ends with this object's block, or with the test's own process.

    `run(source, **values)` executes Python there, with `tent`, `np`, `engine` and whatever earlier sources
    defined, and answers the value of the last line if that is an expression. `before` is run before the
    engine is made (limits, for instance), `wrapper` is put before the command line, as in
    `("ip", "netns", "exec", "left")`. Not thread-safe.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        before: str = "",
        wrapper: Sequence[str] = (),
        start_timeout: float = START_TIMEOUT_S,
    ) -> None:
        self._socket, theirs = socket.socketpair()
        command = [*wrapper, sys.executable, "-m", __name__, str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL
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
        """Stop all its threads, in whatever they do (SIGSTOP)."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on (SIGCONT)."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it without a goodbye (SIGKILL), and wait for its end. Idempotent."""
        self._socket.close()
        self.process.kill()
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


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
