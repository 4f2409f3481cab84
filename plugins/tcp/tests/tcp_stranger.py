"""A bare socket to a data port, which sends what a test wants."""

from __future__ import annotations

import socket
from contextlib import suppress

import numpy as np
from tcp_harness import OwnerProcess

from tent_core import address
from tent_core.transport import LocalBuffer
from tent_tcp.protocol import (
    ANSWER_SIZE,
    INCARNATION_SIZE,
    STREAM_SIZE,
    Attribute,
    Verdict,
    pack_hello,
    parse_answer,
    request_words,
)


def attribute_of(owner: OwnerProcess) -> Attribute:
    return Attribute.decode(owner.peer().segment.attributes["tcp"].payload)


class Stranger:
    """A socket to the data port, with or without the secret."""

    def __init__(self, owner: OwnerProcess | Attribute) -> None:
        self.attribute = owner if isinstance(owner, Attribute) else attribute_of(owner)
        self.socket = socket.create_connection(address.parse(self.attribute.address), timeout=10)

    def hello(self, secret: bytes | None = None) -> bytes:
        return pack_hello(
            secret or self.attribute.secret,
            "stranger:1",
            bytes(INCARNATION_SIZE),
            True,
            bytes(STREAM_SIZE),
        )

    def enter(self) -> Stranger:
        self.socket.sendall(self.hello())
        assert parse_answer(self.exactly(ANSWER_SIZE)).verdict is Verdict.OK
        return self

    def exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.socket.recv(size - len(data))
            assert piece, f"closed after {len(data)} of {size} bytes"
            data += piece
        return data

    def is_turned_away(self) -> bool:
        """Whether the other side closes the connection; what it says before does not matter."""
        with suppress(ConnectionError):
            while self.socket.recv(4096):
                pass
        return True

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def request(opcode: int, buffer: LocalBuffer, length: int | None = None) -> bytes:
    row = (buffer.id, buffer.generation, buffer.address, length or buffer.length)
    return np.array(request_words(opcode, 7, row), np.uint64).tobytes()
