"""The transport: one thread runs an asyncio loop that serves peers (`owner.py`) and carries work to them.

Its sockets have abstract names: they end with the process, however that dies, and leave no file behind. Such
names belong to a network namespace, so peers of another one are no candidates.

Everything but `submit` happens in that loop, so there is nothing else to lock.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import socket
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any

from tent_core.descriptor import PeerKey
from tent_core.errors import TransportError, TransportUnavailable, Unreachable
from tent_core.transport import Endpoint, LocalBuffer, Peer, Transport, TransportContext
from tent_core.types import Opcode
from tent_core.work import Requests, Work

from .owner import Owner
from .wire import ANSWER, ATTRIBUTE, FRAME, HELLO, PIECE, Frame

NAME = "uds"
CONNECT_S, CALL_S = 10.0, 5.0
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def socket_name(token: bytes) -> str:
    """An abstract name: it begins with a zero byte."""
    return f"\0tent-uds-{token.hex()}"


def network_namespace() -> int:
    """The inode of this process's network namespace."""
    return os.stat("/proc/self/ns/net").st_ino


class UdsTransport(Transport):
    """One thread and one listening socket, however many peers."""

    def __init__(self) -> None:
        self.endpoints: set[UdsEndpoint] = set()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._owner = Owner()
        self._server: asyncio.Server | None = None

    def start(self, context: TransportContext) -> None:
        self._context = context
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self.loop.run_forever, name=f"tent-{NAME}-loop", daemon=True
        )
        self._thread.start()
        token = secrets.token_bytes(16)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(socket_name(token))
        except OSError as error:
            listener.close()
            raise TransportUnavailable(f"cannot make a Unix-domain socket: {error}") from error
        serving = asyncio.start_unix_server(self._owner.serve, sock=listener, limit=4 * PIECE)
        self._server = self.run(serving)
        context.publish(ATTRIBUTE.pack(self._owner.secret, token, network_namespace()))

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float = CALL_S) -> Any:
        """The result of a coroutine in the loop's thread. Raises TransportError after `timeout` seconds."""
        assert self.loop is not None
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout)
        except TimeoutError as error:
            future.cancel()
            raise TransportError(f"{NAME} did not get round to it in {timeout:g} s") from error

    def add_buffers(self, buffers: Sequence[LocalBuffer]) -> Sequence[bytes | None]:
        self._owner.buffers.update((buffer.id, buffer) for buffer in buffers)
        return [b"" for _ in buffers]

    def connect(self, peer: Peer) -> Endpoint:
        found = peer.segment.attributes.get(NAME)
        if found is None or len(found.payload) != ATTRIBUTE.size:
            raise Unreachable(f"peer {peer.key} does not serve this version of {NAME}")
        secret, token, namespace = ATTRIBUTE.unpack(found.payload)
        if not self._context.host.same_machine(peer.segment.host):
            raise Unreachable(f"peer {peer.key} is on another machine")
        if namespace != network_namespace():
            raise Unreachable(f"peer {peer.key} is in another network namespace")
        hello = HELLO.pack(secret, self._context.key.incarnation)
        endpoint = UdsEndpoint(self, peer, socket_name(token), hello)
        self.endpoints.add(endpoint)
        return endpoint

    def remove_buffer(self, buffer: LocalBuffer, timeout: float) -> None:
        async def forget() -> None:
            if self._owner.buffers.get(buffer.id) is buffer:
                del self._owner.buffers[buffer.id]

        self.run(forget(), timeout)

    def release(self, peer: PeerKey, reason: str) -> None:
        self.run(self._owner.hang_up(peer.incarnation))

    def stop(self) -> None:
        if self.loop is None:
            return
        for endpoint in list(self.endpoints):
            endpoint.close("the engine stops")
        self._context.publish(None)
        if self._server is not None:
            self.loop.call_soon_threadsafe(self._server.close)
        self.run(self._owner.hang_up(None))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(1.0)
        self.loop.close()
        self.loop = None

    def holdings(self) -> Mapping[str, int]:
        return {
            "threads": int(self.loop is not None),
            "accepted_streams": len(self._owner.accepted),
        }


class UdsEndpoint(Endpoint):
    """One stream to one peer, made at the first work and anew after a failure; works take turns on it."""

    def __init__(self, transport: UdsTransport, peer: Peer, name: str, hello: bytes) -> None:
        self._transport, self._peer = transport, peer
        self._name, self._hello = name, hello
        self._turn = asyncio.Lock()
        self._stream: Stream | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = ""
        self._gate = threading.Lock()  # between `submit` and `close`, for no longer than they take

    def submit(self, work: Work) -> None:
        with self._gate:
            if self._closed:
                raise TransportError(f"the endpoint for {self._peer.key} is closed: {self._closed}")
            assert self._transport.loop is not None
            self._transport.loop.call_soon_threadsafe(self._begin, work)

    def close(self, reason: str) -> None:
        with self._gate:
            if self._closed:
                return
            self._closed = reason
        self._transport.endpoints.discard(self)
        self._transport.run(self._end())

    def holdings(self) -> Mapping[str, int]:
        return {"streams": int(self._stream is not None)}

    async def _end(self) -> None:
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._drop()
        await asyncio.sleep(0)

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream[1].transport.abort()
        self._stream = None

    def _begin(self, work: Work) -> None:
        task = asyncio.get_running_loop().create_task(self._carry(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, work: Work) -> None:
        """Report each request of the work once, whatever happens."""
        done, begun = (
            [0],
            False,
        )  # how many requests have been reported; whether bytes may be on their way
        cause: Exception = TransportError(f"the endpoint for {self._peer.key} was closed")
        try:
            async with asyncio.timeout_at(work.deadline), self._turn:
                if self._stream is None:
                    async with asyncio.timeout(CONNECT_S):
                        self._stream = await asyncio.open_unix_connection(
                            self._name, limit=4 * PIECE
                        )
                    self._stream[1].write(self._hello)
                begun, stream = True, self._stream
                try:
                    await asyncio.gather(
                        self._send(work.requests, stream), self._receive(work, stream, done)
                    )
                except BaseException:
                    self._drop()  # what is half-sent must not be taken for the next request
                    raise
                return
        except asyncio.CancelledError:
            pass
        except TimeoutError:
            cause = TransportError(f"{self._peer.key} did not answer in time")
        except (OSError, EOFError) as error:
            cause = TransportError(f"the stream to {self._peer.key} broke: {error}")
            self._peer.suspect(cause)
        # Of a WRITE the owner may still be reading what has been sent: such bytes are not fenced.
        fenced = not begun or work.requests.opcode is Opcode.READ
        work.fail(cause, done[0], fenced=fenced)

    async def _send(self, requests: Requests, stream: Stream) -> None:
        for frames in _frames(requests):
            for local, frame in frames:
                body = ctypes.string_at(local, frame[-1]) if frame[0] == Opcode.WRITE else b""
                stream[1].write(FRAME.pack(*frame) + body)
                await stream[1].drain()

    async def _receive(self, work: Work, stream: Stream, done: list[int]) -> None:
        """Answers come in the order of the frames; a request is reported when its last one has come."""
        for frames in _frames(work.requests):
            reason = b""
            for local, frame in frames:
                refused, size = ANSWER.unpack(await stream[0].readexactly(ANSWER.size))
                data = await stream[0].readexactly(size)
                if refused:
                    reason = data
                elif frame[0] == Opcode.READ:
                    ctypes.memmove(local, data, size)
            if reason:
                work.fail(TransportError(reason.decode(errors="replace")), done[0], done[0] + 1)
            else:
                work.complete(done[0], done[0] + 1)
            done[0] += 1


def _frames(requests: Requests) -> Iterator[list[tuple[int, Frame]]]:
    """For each request its frames: the local address, and what goes into the header."""
    op, rows = (
        int(requests.opcode),
        zip(requests.local.tolist(), requests.remote.tolist(), strict=True),
    )
    for ((local, length), (remote, _)), number in zip(
        rows, requests.remote_ids.tolist(), strict=True
    ):
        generation, starts = requests.remote_generations[number], range(0, length, PIECE)
        yield [
            (local + at, (op, number, generation, remote + at, min(PIECE, length - at)))
            for at in starts
        ]
