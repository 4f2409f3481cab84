"""How a stream to a receiver is made: connected, introduced, welcomed."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tent_tcp.patience import Patience, StreamFailed
from tent_tcp.protocol import ANSWER_SIZE, STREAM_SIZE, Malformed, Verdict, parse_answer
from tent_tcp.streams import Stream
from tent_tcp.tuning import tune, tune_for_one_machine

Endpoints = Sequence[tuple[socket.AddressFamily, Any]]
"""Socket addresses to try in turn, as socket.getaddrinfo has them."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a peer's receiver is, and how to introduce oneself. Made from one published attribute.

    `hello` makes a hello for a stream of a given identity, `buffer` is the size of both socket buffers, 0 for
    the kernel's own choice.
    """

    attribute: bytes
    endpoints: Endpoints
    hello: Callable[[bytes], bytes]
    same_machine: bool
    buffer: int


class Dialing:
    """A connection in the making, step by step: connected, hello sent, welcomed. Never waits.

    `events` is what to wait for on `descriptor`, both of which change from step to step.
    """

    def __init__(self, target: Target, stall_s: float) -> None:
        """Begin with the first address. Raises StreamFailed."""
        self._left = deque(target.endpoints)
        self._target = target
        self._stall_s = stall_s
        self._socket: socket.socket | None = None
        self._connected = False
        self._welcome = bytearray()
        self._identity = b""
        self.events = select.EPOLLOUT
        self._next("there is no address to connect to")

    @property
    def descriptor(self) -> int:
        """The socket of the current attempt."""
        assert self._socket is not None
        return self._socket.fileno()

    def advance(self) -> Stream | None:
        """Go on after `events`; the stream when it is ready. Raises StreamFailed; `close` is then done."""
        assert self._socket is not None
        try:
            if not self._connected:
                error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    self._next(f"{self.where}: {os.strerror(error)}")
                    return None
                self._connected = True
                self._identity = secrets.token_bytes(STREAM_SIZE)
                hello = self._target.hello(self._identity)
                self._socket.send(hello, socket.MSG_NOSIGNAL)  # a new socket has room for far more
                self.events = select.EPOLLIN
                return None
            data = self._socket.recv(ANSWER_SIZE - len(self._welcome))
        except (BlockingIOError, InterruptedError):
            return None
        except ConnectionResetError:
            data = b""
        except OSError as error:
            self._next(f"{self.where}: {error.strerror}")
            return None
        if not data:
            where = self.where
            self.close()
            raise StreamFailed(
                f"{where} closed the connection at the hello: what listens there is not the receiver of "
                "this peer any more, or all its streams are in use"
            )
        self._welcome += data
        if len(self._welcome) < ANSWER_SIZE:
            return None
        where = self.where
        try:
            welcome = parse_answer(self._welcome)
        except Malformed as error:
            self.close()
            raise StreamFailed(f"{where} is no receiver: {error}") from None
        if welcome.verdict is not Verdict.OK:
            self.close()
            raise StreamFailed(f"{where} does not want this stream ({welcome.verdict.name})")
        made, self._socket = self._socket, None
        return Stream(made, where, self._identity)

    def close(self) -> None:
        """Give up. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _next(self, why: str) -> None:
        """Try the next address; `why` is what was wrong with this one."""
        self.close()
        while self._left:
            family, address = self._left.popleft()
            try:
                self._socket = self._begin(family, address)
            except OSError as error:
                why = f"{format_address(address)}: {error.strerror}"
                self.close()
                continue
            self._connected, self.events = False, select.EPOLLOUT
            self._welcome.clear()
            return
        raise StreamFailed(f"no connection to {why}")

    def _begin(self, family: socket.AddressFamily, address: Any) -> socket.socket:
        made = self._socket = socket.socket(family, socket.SOCK_STREAM)
        made.setblocking(False)
        tune(made, self._stall_s, self._target.buffer)
        if self._target.same_machine:
            tune_for_one_machine(made)
        self._address = address
        with contextlib.suppress(BlockingIOError):
            made.connect(address)
        return made

    @property
    def where(self) -> str:
        """The address of the current attempt, as text."""
        return format_address(self._address)


def dial(dialing: Dialing, patience: Patience) -> Stream:
    """Make a stream, waiting for it. Raises StreamFailed."""
    began = time.monotonic()
    try:
        while True:
            poll = select.poll()
            poll.register(dialing.descriptor, dialing.events)
            if poll.poll(patience.check(began) * 1000):
                stream = dialing.advance()
                if stream is not None:
                    return stream
    finally:
        dialing.close()


def format_address(address: Any) -> str:
    """A socket address as text."""
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
