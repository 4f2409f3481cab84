"""What a hostile peer sends: random bytes, and valid bytes of both ports with some of them changed."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator

import grpc
import numpy as np

from tent_core import address
from tent_core.control import tent_pb2 as pb
from tent_core.control import tent_pb2_grpc, wire
from tent_core.control.contract import PROTOCOL
from tent_core.descriptor import SegmentDescriptor
from tent_core.host import identify
from tent_core.types import Opcode
from tent_tcp import protocol

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
Place = tuple[str, int]
_AT_ONCE = struct.pack("ii", 1, 0)  # struct linger: closing resets the connection


def control_port(segment: SegmentDescriptor) -> Place:
    """Where the control plane of an engine listens."""
    return tuple(address.parse(segment.name))


def data_port(segment: SegmentDescriptor) -> Place:
    """Where the tcp transport of an engine listens."""
    return tuple(address.parse(_tcp(segment).address))


def throw(place: Place, data: bytes, dice: random.Random) -> None:
    """Send `data` on a connection of its own, and end that in one way or another."""
    with _connection(place) as stream, contextlib.suppress(OSError):
        if dice.random() < 0.3:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        stream.sendall(data)
        if dice.random() < 0.1:
            stream.shutdown(socket.SHUT_WR)
            stream.settimeout(0.05)
            stream.recv(4096)


def _connection(place: Place) -> socket.socket:
    """A new connection; a port that is closed for a moment is tried again. TimeoutError after ten seconds."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        with contextlib.suppress(ConnectionError):
            return socket.create_connection(place, timeout=10)
        time.sleep(0.01)
    raise TimeoutError(f"nobody listens at {place}")


def noise(dice: random.Random, beginnings: tuple[bytes, ...]) -> bytes:
    """Random bytes, often after something that makes the receiver read on."""
    return dice.choice((b"", *beginnings)) + dice.randbytes(dice.randrange(1, 300))


def mutated(valid: bytes, dice: random.Random) -> bytes:
    """`valid` with one to four bytes changed, left out or added, or cut short."""
    data = bytearray(valid)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data))
        match dice.randrange(4):
            case 0:
                data[at] = dice.randrange(256)
            case 1:
                data[at] ^= 1 << dice.randrange(8)
            case 2:
                del data[at]
            case 3:
                data.insert(at, dice.randrange(256))
    return bytes(data[: dice.randrange(1, len(data))] if dice.random() < 0.2 else data)


def data_session(segment: SegmentDescriptor, buffer: str) -> bytes:
    """A valid session on the data port: hello, a write of two blocks to `buffer`, a read of it."""
    target = next(b for b in segment.buffers.values() if b.name == buffer)
    hello = protocol.pack_hello(_tcp(segment).secret, "127.0.0.1:9", bytes(16), True, bytes(16))
    remote = np.array([[target.address, 64], [target.address + 4096, 64]], np.uint64)
    ids = np.full(2, target.id, np.int32)
    requests = [
        protocol.build_request(opcode, number, 128, ids, target.generation, remote).tobytes()
        for number, opcode in enumerate((Opcode.WRITE, Opcode.READ))
    ]
    return hello + requests[0] + bytes(range(128)) + requests[1]


def control_session(segment: SegmentDescriptor) -> bytes:
    """What a client sends to the control port while it connects, notifies and says goodbye."""
    with (
        _recorded(control_port(segment)) as (port, sent),
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = tent_pb2_grpc.ControlStub(channel)
        who = {"name": "127.0.0.1:9", "incarnation": bytes(16), "host": wire.host_to(identify())}
        request = pb.ConnectRequest(protocol=PROTOCOL, target=segment.name, nonce=7, **who)
        session = stub.Connect(request, timeout=10).accepted.session
        assert session
        note = pb.Notification(sequence=1, name="hostile", payload=b"x" * 50)
        stub.Notify(pb.NotifyRequest(session=session, notifications=[note]), timeout=10)
        stub.Goodbye(pb.GoodbyeRequest(session=session, reason="done"), timeout=10)
    return bytes(sent)


def _tcp(segment: SegmentDescriptor) -> protocol.Attribute:
    return protocol.Attribute.decode(segment.attributes["tcp"].payload)


@contextlib.contextmanager
def _recorded(place: Place) -> Iterator[tuple[int, bytearray]]:
    """A port that passes one connection on to `place`, and what its client has sent."""
    sent = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            client, _ = server.accept()
            with client, socket.create_connection(place) as behind:
                back = threading.Thread(target=_pass_on, args=(behind, client, bytearray()))
                back.start()
                _pass_on(client, behind, sent)
                back.join(10)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1], sent
        thread.join(10)


def _pass_on(source: socket.socket, sink: socket.socket, copy: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            copy += data
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
