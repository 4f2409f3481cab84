"""The transport: one thread runs an asyncio loop that serves peers (`owner.py`) and carries work to them.

Everything but `submit` happens in that loop, so there is nothing else to lock.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any

from tent_core.descriptor import PeerKey
from tent_core.errors import TransportError, TransportUnavailable, Unreachable
from tent_core.transport import Endpoint, LocalBuffer, Peer, Transport, TransportContext
from tent_core.types import Opcode, Status
from tent_core.work import Requests, Work

from .owner import Owner
from .wire import ANSWER, ATTRIBUTE, FRAME, HELLO, PIECE, Frame

NAME = "newname"
CONNECT_S, CALL_S = 10.0, 5.0
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class NewnameTransport(Transport):
    """One thread and one listening socket, however many peers."""

    def __init__(self) -> None:
        self.endpoints: set[NewnameEndpoint] = set()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._owner = Owner()
        self._server: asyncio.Server | None = None

    def start(self, context: TransportContext) -> None:
        host, port = context.listen_host, context.settings.port
        self._context = context
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self.loop.run_forever, name=f"tent-{NAME}-loop", daemon=True
        )
        self._thread.start()
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise TransportUnavailable(f"cannot listen on {host} port {port}: {error}") from error
        self._server = self.run(
            asyncio.start_server(self._owner.serve, sock=listener, limit=4 * PIECE)
        )
        where = ATTRIBUTE.pack(self._owner.secret, listener.getsockname()[1])
        context.publish(where + context.advertise_host.encode())

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
        if found is None or len(found.payload) <= ATTRIBUTE.size:
            raise Unreachable(f"peer {peer.key} does not serve this version of {NAME}")
        secret, port = ATTRIBUTE.unpack_from(found.payload)
        host = found.payload[ATTRIBUTE.size :].decode(errors="replace").strip("[]")
        hello = HELLO.pack(secret, self._context.key.incarnation)
        endpoint = NewnameEndpoint(self, peer, host, port, hello)
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


class NewnameEndpoint(Endpoint):
    """One stream to one peer, made at the first work and anew after a failure; works take turns on it."""

    def __init__(
        self, transport: NewnameTransport, peer: Peer, host: str, port: int, hello: bytes
    ) -> None:
        self._transport, self._peer = transport, peer
        self._where, self._hello = (host, port), hello
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
        done = [0]  # how many requests have been reported
        begun = False  # whether bytes may be on their way
        cause: Exception = TransportError(f"the endpoint for {self._peer.key} was closed")
        status = Status.FAILED
        try:
            async with asyncio.timeout_at(work.deadline), self._turn:
                if self._stream is None:
                    async with asyncio.timeout(CONNECT_S):
                        self._stream = await asyncio.open_connection(*self._where, limit=4 * PIECE)
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
            if time.monotonic() >= work.deadline:
                status = Status.TIMEOUT
        except (OSError, EOFError) as error:
            cause = TransportError(f"the stream to {self._peer.key} broke: {error}")
            self._peer.suspect(cause)
        # Of a WRITE the owner may still be reading what has been sent: such bytes are not fenced.
        fenced = not begun or work.requests.opcode is Opcode.READ
        work.fail(cause, done[0], fenced=fenced, status=status)

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
