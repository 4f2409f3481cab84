"""A process that answers at a handshake port, as the library's own thread does: without the interpreter lock.

Run as a script with the descriptors of the listening socket and of one to its owner, and the owner's pid.
The owner says in lines of JSON what to answer, each of which is acknowledged; it ends when the owner does.
While the owner is stopped (SIGSTOP) nobody is answered, as no thread of the owner would.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys

_LONGEST = 1 << 16
_STOPPED_S = 0.02


class Responder:
    """One loop over the owner, the port, and whoever has connected to it."""

    def __init__(self, listener: socket.socket, owner: socket.socket, pid: int) -> None:
        self._listener = listener
        self._owner = owner
        self._status = f"/proc/{pid}/stat"
        self._answers: dict[str, object] = {}
        self._selector = selectors.DefaultSelector()
        self._accepting = False
        self._received: dict[socket.socket, bytes] = {}
        self._waiting: list[tuple[socket.socket, bytes]] = []
        listener.setblocking(False)
        self._selector.register(owner, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the owner has gone."""
        orders = b""
        while True:
            for key, _ in self._selector.select(_STOPPED_S if self._waiting else None):
                if key.fileobj is self._owner:
                    data = self._owner.recv(_LONGEST)
                    if not data:
                        self._listener.close()  # before the owner hears that this has ended
                        return
                    *lines, orders = (orders + data).split(b"\n")
                    for line in lines:
                        self._obey(json.loads(line))
                        self._owner.sendall(b"\n")
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj)
            if self._waiting and not self._stopped():
                waiting, self._waiting = self._waiting, []
                for connection, line in waiting:
                    self._answer(connection, line)

    def _obey(self, order: dict[str, object]) -> None:
        accepting = bool(order.pop("accept", self._accepting))
        if accepting and not self._accepting:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif self._accepting and not accepting:
            self._selector.unregister(self._listener)
        self._accepting = accepting
        self._answers.update(order)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        self._received[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_LONGEST)
        except OSError:
            data = b""
        received = self._received[connection] + data
        if not data or len(received) > _LONGEST:
            self._drop(connection)
        elif received.endswith(b"\n"):
            self._received[connection] = b""
            self._waiting.append((connection, received))
        else:
            self._received[connection] = received

    def _answer(self, connection: socket.socket, line: bytes) -> None:
        try:
            answer = self._answers[json.loads(line)["ask"]]
            connection.settimeout(5.0)
            connection.sendall(json.dumps(answer).encode() + b"\n")
        except (OSError, ValueError, KeyError, TypeError):
            pass  # anybody may send anything here
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        if self._received.pop(connection, None) is not None:
            self._selector.unregister(connection)
            connection.close()

    def _stopped(self) -> bool:
        try:
            with open(self._status, "rb") as status:
                return status.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        except OSError:
            return False


if __name__ == "__main__":
    # It stands for a thread of the library, so that it is no child of the process that it serves.
    if os.fork():
        os._exit(0)
    Responder(
        socket.socket(fileno=int(sys.argv[1])),
        socket.socket(fileno=int(sys.argv[2])),
        int(sys.argv[3]),
    ).run()
