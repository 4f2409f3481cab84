"""The watch stream of a connection: brought up, brought back, and read for as long as the peer is there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from tent_core import address
from tent_core.control import probe, wire
from tent_core.control import tent_pb2 as pb
from tent_core.control.contract import ControlSettings
from tent_core.control.link import Link, LinkState
from tent_core.control.loop import ControlLoop
from tent_core.control.options import aio, grpc
from tent_core.control.use import Use
from tent_core.control.wire import WireError
from tent_core.descriptor import PeerKey, SegmentDescriptor

FIRST_PAUSE_S = 0.05
"""Before the first attempt to bring a connection back; doubled up to `control.reconnect_max_s`."""

_NOT_RUNNING = (aio.AioRpcError, aio.UsageError, asyncio.InvalidStateError)
"""What writing to a stream raises that has ended."""


class Follower:
    """Follows one session and holds the newest snapshot; `here`: with a peer on this machine. For the control
    thread.

    `adopted(old, new)` is called with each newer snapshot (old is None at the first), `departed(reason,
    owes_goodbye=..., unreachable=...)` when the stream shows that the peer has departed, `forgotten(message)`
    when the peer knows no such session, `retire()` when it asks this side to let go of it. All but the first
    may come from `run`; its task ends after the second and the third. `use` is what the peer is told of
    this side's use of it: report to it, then `tell`.
    """

    def __init__(
        self,
        loop: ControlLoop,
        settings: ControlSettings,
        link: Link,
        stub: Any,
        key: PeerKey,
        session: int,
        here: bool,
        adopted: Callable[[SegmentDescriptor | None, SegmentDescriptor], None],
        departed: Callable[..., None],
        forgotten: Callable[[pb.Forgotten], None],
        retire: Callable[[], None],
        log: Any,
    ) -> None:
        self._loop = loop
        self._settings = settings
        self._link = link
        self._stub = stub
        self._key = key
        self._address = address.parse(key.name)
        self._here = here
        self._session = session
        self._adopted = adopted
        self._departed = departed
        self._forgotten = forgotten
        self._retire = retire
        self._log = log
        self.snapshot: SegmentDescriptor | None = None
        self.use = Use()
        self._acknowledged: int | None = None
        self._to_tell = asyncio.Event()
        self._call: Any = None
        self._cut = ""

    def adopt(self, new: SegmentDescriptor) -> None:
        """Take `new` for the newest snapshot if it is."""
        old = self.snapshot
        if old is None or new.version > old.version:
            self.snapshot = new
            self._adopted(old, new)

    def acknowledge(self, version: int) -> None:
        """Have `version` acknowledged, now or when the stream is back."""
        if self._acknowledged is None or version > self._acknowledged:
            self._acknowledged = version
            self._to_tell.set()

    def tell(self) -> None:
        """Have what `use` says told, now or when the stream is back."""
        self._to_tell.set()

    def cut(self, cause: str) -> None:
        """The stream is up and yet dead: give it up and bring it back."""
        if self._call is not None:
            self._cut = cause
            self._call.cancel()

    def release(self) -> None:
        """Refer to nothing but the last snapshot; `run` has ended or been cancelled."""
        self._call = self._stub = None
        self._adopted = self._departed = self._forgotten = self._retire = _ignored

    async def run(self) -> None:
        """Keep the stream up until the peer has departed."""
        pause = FIRST_PAUSE_S
        while self._link.state is not LinkState.DEPARTED:
            self._cut = ""
            try:
                ended = await self._follow()
            except WireError as error:
                self._departed(f"it sent what is no descriptor: {error}")
                return
            cause = self._cut or ended
            if self._link.state is LinkState.UP:
                pause = FIRST_PAUSE_S
                self._log.info("peer_connection_broke", peer=str(self._key), cause=cause)
            now = self._loop.now()
            self._link.broken(now, cause)
            if overdue := self._link.overdue(now):
                self._departed(overdue, unreachable=True)
                return
            refused = self._here and await probe.is_refused(self._address, pause)
            if gone := self._link.refused(now, refused):
                self._departed(gone, owes_goodbye=False)
                return
            await asyncio.sleep(min(pause, max(0.0, self._link.ends - now)))
            pause = min(2 * pause, self._settings.reconnect_max_s)

    async def _follow(self) -> str:
        """One stream, from hello to its end; answers why it ended. Raises WireError."""
        call = self._call = self._stub.Watch()
        writer: asyncio.Task[None] | None = None
        limit = min(self._settings.call_timeout_s, max(0.01, self._link.ends - self._loop.now()))
        try:
            told = self._acknowledged, self.use.since
            if not await self._greet(call, self._hello(), limit):
                return "it does not welcome the watch stream"
            self._link.up()
            writer = self._loop.spawn(self._write(call, told), f"tell {self._key}")
            await self._read(call)
            return "it ended the watch stream"
        except TimeoutError:
            return "it does not answer"
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                self._departed(f"it finds what this side says malformed: {error.details()}")
            return said(error)
        except (aio.UsageError, asyncio.InvalidStateError):
            return "the watch stream ended while it was written to"
        except asyncio.CancelledError:
            if not self._cut:
                raise
            return self._cut
        finally:
            call.cancel()
            if writer is not None:
                writer.cancel()

    def _hello(self) -> pb.WatchRequest:
        held = self.snapshot
        hello = pb.WatchRequest.Hello(
            holds_snapshot=held is not None, version=0 if held is None else held.version
        )
        return pb.WatchRequest(
            session=self._session,
            acknowledged=self._acknowledged,
            hello=hello,
            use=self._use_since(self.use.since),
        )

    def _use_since(self, since: float | None) -> pb.WatchRequest.Use:
        idle_s = 0.0 if since is None else max(0.0, self._loop.now() - since)
        return pb.WatchRequest.Use(idle=since is not None, idle_ms=round(1000 * idle_s))

    async def _greet(self, call: Any, hello: pb.WatchRequest, within: float) -> bool:
        """Whether the peer welcomes the stream. Raises TimeoutError."""
        limit = asyncio.timeout(within)
        try:
            async with limit:
                await call.write(hello)
                message = await call.read()
        finally:
            del limit  # it refers to the task, whose cancellation would refer to it
        if message is aio.EOF:
            return False
        self._heed(message)
        return bool(message.HasField("welcome"))

    async def _read(self, call: Any) -> None:
        """Take in what the peer says until it ends the stream, or has departed."""
        assembler = wire.Assembler(self._key)
        streamed = self.snapshot
        while self._link.state is LinkState.UP and (message := await call.read()) is not aio.EOF:
            if message.HasField("fragment"):
                new = assembler.feed(message.fragment, streamed)
                if new is not None:
                    streamed = new
                    self.adopt(new)
            else:
                self._heed(message)

    def _heed(self, message: pb.WatchResponse) -> None:
        # What a newer version says besides is skipped.
        if message.HasField("farewell"):
            self._departed(f"it said goodbye: {message.farewell.reason}", owes_goodbye=False)
        elif message.HasField("forgotten"):
            self._forgotten(message.forgotten)
        elif message.HasField("retire"):
            self._retire()

    async def _write(self, call: Any, told: tuple[int | None, float | None]) -> None:
        """Send acknowledgements and reports of use, the newest only, while the stream is up."""
        with contextlib.suppress(*_NOT_RUNNING):
            while True:
                self._to_tell.clear()
                now = self._acknowledged, self.use.since
                if now == told:
                    await self._to_tell.wait()
                    continue
                message = pb.WatchRequest(session=self._session)
                if now[0] is not None and now[0] != told[0]:
                    message.acknowledged = now[0]
                if now[1] != told[1]:
                    message.use.CopyFrom(self._use_since(now[1]))
                told = now
                await call.write(message)


def _ignored(*_: object, **__: object) -> None:
    """Stands for those who are not told any more."""


def said(error: Any) -> str:
    """What a failed call said, in one line."""
    return f"{error.details() or 'no reason given'} ({error.code().name})"
