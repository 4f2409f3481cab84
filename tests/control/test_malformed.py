"""Whatever comes in at the port, the engine answers or drops it, and a good peer notices nothing."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MappingProxyType

import pytest
from control_harness import HANG_S, Side, buffer, side, wait_until

from tent_core.control import tent_pb2 as pb
from tent_core.control.contract import NOTIFICATION_LIMIT
from tent_core.control.options import grpc
from tent_core.descriptor import Attribute

RANDOM_STRINGS = 4000
RANDOM_MESSAGES = 3000
MUTATIONS = 3000


@contextlib.contextmanager
def good_peer(it: Side) -> Iterator[Callable[[], int]]:
    """A peer that is served all the while; calls its check at the end."""
    served: list[int] = []
    failed: list[BaseException] = []
    over = threading.Event()
    with side() as peer:
        connection = peer.connect(it.name)

        def use() -> None:
            try:
                while not over.is_set():
                    connection.notify("good", b"", HANG_S)
                    served.append(1)
                    over.wait(0.01)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=use)
        thread.start()
        try:
            yield lambda: len(served)
        finally:
            over.set()
            thread.join(HANG_S)
        assert failed == []
        version = it.publish(buffer(1))
        assert connection.refresh(HANG_S).version == version
        assert it.handler.departed == []
    assert len(served) > 3
    assert {n.name for n in it.handler.notes} == {"good"}


def test_random_bytes_on_the_port_harm_nobody() -> None:
    random_ = random.Random(1)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    with side() as it, good_peer(it):
        address = ("127.0.0.1", it.plane._bound.port)
        for i in range(RANDOM_STRINGS):
            with socket.create_connection(address, 10) as raw, contextlib.suppress(OSError):
                # Without a reset at the end the machine runs out of ports in TIME_WAIT.
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                junk = random_.randbytes(random_.randrange(200))
                raw.sendall(preface + junk if i % 3 == 0 else junk)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2 (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def call_of(path: bytes) -> bytes:
    """The bytes of a connection that calls the method at `path`."""
    names = {":method": b"POST", ":scheme": b"http", ":path": path, ":authority": b"a",
             "te": b"trailers", "content-type": b"application/grpc"}  # fmt: skip
    fields = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value
        for name, value in names.items()
    )
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 5, 1, fields)


def test_a_path_that_is_no_text_costs_the_server_a_moment_and_no_peer_anything() -> None:
    with side() as it:
        with good_peer(it) as served:
            for path in (b"/tent.v1.Control/\xdc", b"\xff", b"/none/\xc3"):
                with socket.create_connection(("127.0.0.1", it.plane._bound.port), 10) as raw:
                    raw.sendall(call_of(path))
                    with contextlib.suppress(ConnectionError):
                        while raw.recv(4096):
                            pass
                before = served()
                wait_until(lambda old=before: served() > old + 1, HANG_S, "the good peer to go on")
        with side() as newcomer:
            newcomer.connect(it.name).notify("new", b"", HANG_S)


METHODS = {
    "Connect": pb.ConnectRequest(
        protocol=1, target="{name}", name="10.0.0.1:5", incarnation=b"x" * 16, nonce=1,
        host=pb.Host(boot_id="b", pid=3), transports=[pb.Transport(name="tcp", number=7)],
    ),
    "Watch": pb.WatchRequest(session=5, hello=pb.WatchRequest.Hello(version=3)),
    "GetSegment": pb.GetSegmentRequest(session=5, holds_snapshot=True, version=1),
    "Bootstrap": pb.BootstrapRequest(session=5, transport="tcp", number=7, payload=b"abc"),
    "Notify": pb.NotifyRequest(session=5, notifications=[pb.Notification(sequence=1, name="n")]),
    "Goodbye": pb.GoodbyeRequest(session=5, reason="r"),
}  # fmt: skip

ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # a watch stream that is accepted goes on
}


class Caller:
    """Sends bytes as messages of a method, and says with which status they were answered."""

    def __init__(self, name: str) -> None:
        self.channel = grpc.insecure_channel(name)

    def send(self, method: str, data: bytes) -> grpc.StatusCode:
        path = f"/tent.v1.Control/{method}"
        try:
            if method == "Watch":
                for _ in self.channel.stream_stream(path)(iter([data]), timeout=2):
                    pass
            elif method == "GetSegment":
                for _ in self.channel.unary_stream(path)(data, timeout=2):
                    pass
            else:
                self.channel.unary_unary(path)(data, timeout=10)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()


def test_random_messages_of_every_method_are_answered_and_harm_nobody() -> None:
    random_ = random.Random(2)
    with side() as it, good_peer(it), Caller(it.name) as caller:
        codes = {
            caller.send(random_.choice(list(METHODS)), random_.randbytes(random_.randrange(60)))
            for _ in range(RANDOM_MESSAGES)
        }
    assert codes <= ALLOWED
    assert grpc.StatusCode.INVALID_ARGUMENT in codes


def test_mutations_of_valid_messages_are_answered_and_harm_nobody() -> None:
    random_ = random.Random(3)
    with side() as it, good_peer(it), Caller(it.name) as caller:
        codes = set()
        for _ in range(MUTATIONS):
            method = random_.choice(list(METHODS))
            data = bytearray(METHODS[method].SerializeToString().replace(b"{name}", b"127.0."))
            for _ in range(random_.randrange(1, 4)):
                at = random_.randrange(len(data))
                match random_.randrange(3):
                    case 0:
                        data[at] = random_.randrange(256)
                    case 1:
                        del data[at]
                    case _:
                        data.insert(at, random_.randrange(256))
            codes.add(caller.send(method, bytes(data)))
    assert codes <= ALLOWED


def session(caller: Caller, it: Side) -> int:
    request = METHODS["Connect"]
    request = pb.ConnectRequest.FromString(request.SerializeToString())
    request.target = it.name
    request.host.boot_id = ""
    stub = caller.channel.unary_unary("/tent.v1.Control/Connect")
    return pb.ConnectResponse.FromString(
        stub(request.SerializeToString(), timeout=10)
    ).accepted.session


def note(sequence: int, size: int = 0) -> pb.Notification:
    return pb.Notification(sequence=sequence, name="n", payload=bytes(size))


def summed(offsets: list[int], lengths: list[int]) -> pb.Notification:
    checksum = pb.Checksum(buffer=1, offsets=offsets, lengths=lengths)
    return pb.Notification(sequence=1, name="n", checksums=[checksum])


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("Connect", pb.ConnectRequest(protocol=1, name="no port", incarnation=b"x" * 16)),
        ("Connect", pb.ConnectRequest(protocol=1, name="h:1", incarnation=b"short")),
        ("Connect", pb.ConnectRequest(name="h:1", incarnation=b"x" * 16, transports=[pb.Transport()])),
        ("Watch", pb.WatchRequest(session=5)),
        ("Notify", pb.NotifyRequest(session=5, notifications=[note(0)])),
        ("Notify", pb.NotifyRequest(session=5, notifications=[note(2), note(2)])),
        ("Notify", pb.NotifyRequest(session=5, notifications=[note(1, NOTIFICATION_LIMIT)])),
        ("Notify", pb.NotifyRequest(session=5, notifications=[summed([1], [])])),
        ("Notify", pb.NotifyRequest(session=5, notifications=[summed([], [])])),
        ("Notify", pb.NotifyRequest(session=5, notifications=[summed([1] * 16_385, [1] * 16_385)])),
        ("Bootstrap", pb.BootstrapRequest(session=5, payload=bytes(2 << 20))),
        ("Bootstrap", pb.BootstrapRequest(session=5, number=-1)),
    ],
)  # fmt: skip
def test_a_message_that_breaks_the_contract_is_an_invalid_argument_and_changes_nothing(
    method: str, message: object
) -> None:
    with side() as it, Caller(it.name) as caller:
        if getattr(message, "session", 0):
            message.session = session(caller, it)
        before = it.plane.sessions()
        assert caller.send(method, message.SerializeToString()) is grpc.StatusCode.INVALID_ARGUMENT
        assert it.plane.sessions() == before
        assert it.handler.notes == []


def test_a_notification_that_comes_twice_is_taken_once() -> None:
    with side() as it, Caller(it.name) as caller:
        number = session(caller, it)
        for notes in ([note(1)], [note(1), note(2)], [note(2), note(5)], [note(4)]):
            message = pb.NotifyRequest(session=number, notifications=notes).SerializeToString()
            assert caller.send("Notify", message) is grpc.StatusCode.OK
        assert [n.sequence for n in it.handler.notes] == [1, 2, 5]


def test_a_watch_stream_that_breaks_the_contract_ends_and_its_session_may_come_back() -> None:
    with side() as it, Caller(it.name) as caller:
        number = session(caller, it)
        hello = pb.WatchRequest(session=number, hello=pb.WatchRequest.Hello()).SerializeToString()
        other = pb.WatchRequest(session=number + 1, acknowledged=1).SerializeToString()
        stub = caller.channel.stream_stream("/tent.v1.Control/Watch")
        for second in (
            other,
            hello,
            b"\xff",
            pb.WatchRequest(session=number, acknowledged=99).SerializeToString(),
        ):
            with pytest.raises(grpc.RpcError) as error:
                for _ in stub(iter([hello, second]), timeout=10):
                    pass
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert [i.session for i in it.plane.sessions()] == [number]


def test_a_watcher_that_does_not_read_is_let_go_of_when_its_session_ends() -> None:
    with side() as it, Caller(it.name) as caller:
        huge = Attribute(7, "tcp", bytes(32 << 20))
        it.local.update(lambda old: replace(old, attributes=MappingProxyType({"tcp": huge})))
        number = session(caller, it)
        hello = pb.WatchRequest(session=number, hello=pb.WatchRequest.Hello()).SerializeToString()
        over = threading.Event()

        def say() -> Iterator[bytes]:
            yield hello
            over.wait(HANG_S)

        stream = caller.channel.stream_stream("/tent.v1.Control/Watch")(say(), timeout=HANG_S)
        wait_until(lambda: it.plane._server._streams)
        goodbye = pb.GoodbyeRequest(session=number).SerializeToString()
        assert caller.send("Goodbye", goodbye) is grpc.StatusCode.OK
        wait_until(lambda: not any("read " in task.get_name() for task in it.plane._loop._tasks))
        over.set()
        stream.cancel()


def test_a_message_of_a_newer_version_is_understood_as_far_as_it_is_known() -> None:
    newer = b"\xf2\x3f\x03new"
    with side() as it, Caller(it.name) as caller:
        number = session(caller, it)
        notify = (
            pb.NotifyRequest(session=number, notifications=[note(1)]).SerializeToString() + newer
        )
        assert caller.send("Notify", notify) is grpc.StatusCode.OK
        assert len(it.handler.notes) == 1
