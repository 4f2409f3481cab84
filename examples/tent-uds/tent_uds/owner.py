"""The owner's side: checks each frame against what is registered at that moment, and copies.

All of it runs in the loop's thread. Between the look at a buffer and the copy there is no `await`, so nobody
touches what has been taken out of `buffers` by that thread.
"""

from __future__ import annotations

import asyncio
import ctypes
import secrets

from tent_core.transport import LocalBuffer
from tent_core.types import Opcode, Permission

from .wire import ANSWER, FRAME, HELLO, PIECE, Frame

HELLO_S, STALL_S = 5.0, 30.0


class Owner:
    """Serves the streams that peers open. One task for each."""

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(16)
        self.buffers: dict[int, LocalBuffer] = {}
        self.accepted: dict[asyncio.Task[None], bytes] = {}

    async def hang_up(self, incarnation: bytes | None) -> None:
        """End the streams of that peer, or of all."""
        gone = [t for t, who in self.accepted.items() if incarnation in (None, who)]
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        await asyncio.sleep(0)  # a turn of the loop, in which sockets are closed

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one stream until it ends."""
        task = asyncio.current_task()
        assert task is not None
        self.accepted[task] = b""
        try:
            async with asyncio.timeout(HELLO_S):
                secret, incarnation = HELLO.unpack(await reader.readexactly(HELLO.size))
            if not secrets.compare_digest(secret, self.secret):
                return
            self.accepted[task] = incarnation
            while True:
                frame = FRAME.unpack(await reader.readexactly(FRAME.size))
                async with asyncio.timeout(STALL_S):
                    await self._answer(frame, reader, writer)
                    await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # the peer sees its stream end
        finally:
            del self.accepted[task]
            writer.transport.abort()

    async def _answer(
        self, frame: Frame, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        opcode, number, generation, address, length = frame
        if length > PIECE:
            raise EOFError("no peer of this version sends that")
        data = await reader.readexactly(length) if opcode == Opcode.WRITE else b""
        reason = self._objection(opcode, number, generation, address, length).encode()
        if not reason and opcode == Opcode.WRITE:
            ctypes.memmove(address, data, length)
        body = reason or (b"" if opcode == Opcode.WRITE else ctypes.string_at(address, length))
        writer.write(ANSWER.pack(bool(reason), len(body)) + body)

    def _objection(
        self, opcode: int, number: int, generation: int, address: int, length: int
    ) -> str:
        b = self.buffers.get(number)
        needed = (
            Permission.GLOBAL_READ_WRITE if opcode == Opcode.WRITE else Permission.GLOBAL_READ_ONLY
        )
        if b is None or b.generation != generation:
            return f"buffer {number} of generation {generation} is not registered (any more)"
        if b.permission < needed:
            return f"buffer {b.name!r} is {b.permission.name}"
        if address < b.address or length > b.address + b.length - address:
            return f"a request leaves buffer {b.name!r} of {b.length} bytes"
        return ""
