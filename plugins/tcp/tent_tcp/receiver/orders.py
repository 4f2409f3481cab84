"""How engine and receiver talk: JSON in datagrams of a socket pair, with descriptors beside it.

The engine orders and the receiver answers each order under its number; in between it tells of events.
"""

from __future__ import annotations

import array
import json
import select
import socket
from collections import deque
from typing import Any

from tent_tcp.syscalls import NOW

MAX_ORDER = 64 << 10
MAX_DESCRIPTORS = 64
"""Descriptors beside one datagram; the kernel allows 253 (SCM_MAX_FD)."""
_MAX_EVENTS = 64


def encode(message: dict[str, Any]) -> bytes:
    """One datagram."""
    return json.dumps(message, separators=(",", ":")).encode()


def receive(link: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next datagram and its descriptors; None at the end of the link. Raises BlockingIOError, OSError."""
    room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
    data, ancillary, _, _ = link.recvmsg(MAX_ORDER, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    if not data:
        return None
    message: dict[str, Any] = json.loads(data)
    return message, descriptors.tolist()


class Outbox:
    """What the receiver says to its engine, without ever waiting for it.

    Answers are kept until they are taken. Events are dropped, and counted, when the engine does not listen.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._waiting: deque[bytes] = deque()
        self._dropped = 0

    def answer(self, number: int, **fields: Any) -> None:
        """Answer an order."""
        self._waiting.append(encode({"answer": number, **fields}))
        self.flush()

    def tell(self, event: str, **fields: Any) -> None:
        """Tell of an event."""
        if len(self._waiting) >= _MAX_EVENTS:
            self._dropped += 1
            return
        if self._dropped:
            fields["events_dropped"], self._dropped = self._dropped, 0
        self._waiting.append(encode({"event": event, **fields}))
        self.flush()

    def flush(self) -> int:
        """Send what can be sent: the epoll events to wait for on the link."""
        while self._waiting:
            try:
                self._link.send(self._waiting[0], NOW)
            except (BlockingIOError, InterruptedError):
                return select.EPOLLIN | select.EPOLLOUT
            except OSError:
                self._waiting.clear()  # the engine is gone, which its pidfd tells as well
                break
            self._waiting.popleft()
        return select.EPOLLIN
