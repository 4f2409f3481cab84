"""The gRPC server of one engine: sessions of peers, their watch streams, and what they ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from tent_core import address, host
from tent_core.address import Address
from tent_core.control import tent_pb2 as pb
from tent_core.control import wire
from tent_core.control.contract import (
    BOOTSTRAP_LIMIT,
    NOTIFICATION_LIMIT,
    PROTOCOL,
    REASON_LIMIT,
    RELEASE_S,
    ControlHandler,
    ControlSettings,
    Notification,
    SessionInfo,
)
from tent_core.control.loop import ControlLoop
from tent_core.control.nearby import is_nearby
from tent_core.control.options import aio, grpc, server_options
from tent_core.control.pressure import ANSWER_S, Place, Pressure
from tent_core.control.rpc import Malformed, Refused, handlers
from tent_core.control.serving import Serving
from tent_core.control.sessions import Departed, Event, Full, Gone, Opened, Sessions
from tent_core.control.watching import WatchStream
from tent_core.control.wire import WireError
from tent_core.descriptor import PeerKey, SegmentDescriptor
from tent_core.errors import TentError
from tent_core.log import RateLimited
from tent_core.scarcity import lacks_resources
from tent_core.segments import LocalSegment

T = TypeVar("T")

_CANCELLED_S = 0.2
"""What calls that still run get when the server stops."""


async def _ended(releases: list[Future[None]]) -> None:
    """Wait until departed peers have been released, at most RELEASE_S."""
    if releases:
        await asyncio.wait(
            [asyncio.wrap_future(release) for release in releases], timeout=RELEASE_S
        )


class ControlServer:
    """Answers peers. All methods are for the control thread, and nothing else touches its state."""

    def __init__(
        self,
        loop: ControlLoop,
        settings: ControlSettings,
        sessions: Sessions,
        pressure: Pressure,
        log: Any,
        appeared: Callable[[PeerKey], None],
    ) -> None:
        self._loop = loop
        self._settings = settings
        self._sessions = sessions
        self._pressure = pressure
        self._releases: list[Future[None]] = []
        """Those of departed peers that may still go on."""
        self._log = log
        self._refusals = RateLimited(log, by=())
        self._appeared = appeared
        self._host = host.identify()
        self._serving = Serving(
            loop, server_options(settings), handlers(self, self._log), log, self._end_streams
        )
        self._local: LocalSegment
        self._handler: ControlHandler
        self._unwatch: Callable[[], None] = lambda: None
        self._closing: str | None = None
        self._streams: dict[int, WatchStream] = {}
        self._sent: dict[int, SegmentDescriptor] = {}
        self._processes: dict[int, Callable[[], None]] = {}
        self._updates = wire.Updates()
        self._timer: asyncio.TimerHandle | None = None
        self._generation = 0
        self._waiters: set[asyncio.Future[None]] = set()
        self._verifying: dict[int, tuple[int, Future[str | None]]] = {}
        """By session, the notification whose data is being compared, and the outcome until it is taken."""

    # ---------------------------------------------------------------- life

    async def bind(self, wanted: Address) -> Address:
        """Listen at `wanted`, which is an IP address; answers what was bound. Raises TentError."""
        return await self._serving.bind(wanted)

    async def serve(self, local: LocalSegment, handler: ControlHandler) -> None:
        """Begin to answer peers."""
        self._local = local
        self._handler = handler
        self._unwatch = local.watch(self._republish)
        await self._serving.start()

    async def stop(self, reason: str, within: float) -> None:
        """Say farewell to everybody and end, within `within` seconds. No handler is called any more."""
        self._closing = reason
        self._changed()  # who waits for room waits no longer
        self._refusals.flush()
        self._unwatch()
        if self._timer is not None:
            self._timer.cancel()
        for session, stream in list(self._streams.items()):
            stream.end(self._farewell(session))
        # Streams end by themselves once the farewell is out; the rest is cut when the time is over.
        await self._serving.stop(max(_CANCELLED_S, within - _CANCELLED_S))
        for end in self._processes.values():
            end()
        self._processes.clear()
        self._changed()

    # ---------------------------------------------------------------- asked by the engine

    def sessions(self) -> list[SessionInfo]:
        """All sessions, holders included."""
        return self._sessions.all()

    def unacknowledged(self, version: int) -> tuple[int, list[SessionInfo]]:
        """Who has not let go of what `version` took away, and a mark for `changed`."""
        return self._generation, self._sessions.unacknowledged(version)

    async def changed(self, mark: int, within: float) -> None:
        """Wait until sessions have changed since `mark` was given, at most `within` seconds."""
        if self._generation == mark:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            await asyncio.wait((waiter,), timeout=within)
            self._waiters.discard(waiter)

    def other_incarnation(self, key: PeerKey) -> None:
        """`key` answers under its name: another incarnation of it that has a session here has departed."""
        self._carry_out(self._sessions.other_incarnation(key))

    # ---------------------------------------------------------------- calls

    async def connect(self, request: pb.ConnectRequest, context: Any) -> pb.ConnectResponse:
        local = self._local.snapshot
        response = pb.ConnectResponse(
            name=local.name, incarnation=local.incarnation, host=wire.host_to(self._host)
        )
        key = wire.key_from(request.name, request.incarnation)
        transports = wire.transports_from(request.transports)
        caller = wire.host_from(request.host)
        if refusal := self._refusal(request, key, local):
            response.refused.reason = refusal
            return response
        if request.target != local.name:
            response.other_name.SetInParent()
            return response
        self._appeared(key)
        connect = partial(
            self._sessions.connect,
            key=key,
            nonce=request.nonce,
            host=caller,
            transports=transports,
        )
        admitted = await self._admit(key, context.time_remaining(), connect)
        if isinstance(admitted, int):
            response.accepted.session = admitted
        else:
            response.refused.reason = admitted
            self._refusals.warning("peer_refused", peer=str(key), reason=admitted)
        return response

    async def _admit(
        self,
        key: PeerKey,
        within: float | None,
        connect: Callable[[float], tuple[int, list[Event]]],
    ) -> int | str:
        """A session for `key`, for which it waits in line when there is no room; or why it got none."""
        place: Place | None = None
        came = self._loop.now()
        try:
            while True:
                mark, now = self._generation, self._loop.now()
                if self._closing is not None:
                    return f"it is closing: {self._closing}"
                if self._pressure.is_next(place) or self._sessions.knows(key.name):
                    try:
                        session, events = connect(now)
                    except Full as full:
                        self._carry_out(full.events)
                    else:
                        await _ended(self._carry_out(events))
                        return session
                if place is None:
                    place = self._pressure.arrive(now, within)
                    self._ask_to_retire(now)
                if place is None:
                    return f"{self._sessions.full()}; {len(self._pressure)} others wait already"
                if now >= place.until:
                    return f"{self._sessions.full()}; nobody made room within {now - came:.1f} s"
                if self._pressure.is_next(place):
                    self._ask_to_retire(now)
                await self.changed(mark, min(place.until - now, ANSWER_S))
        finally:
            if place is not None:
                self._pressure.leave(place)
                self._changed()  # it is another one's turn

    def _ask_to_retire(self, now: float) -> None:
        for session in self._pressure.ask(now, self._sessions.idle()):
            stream = self._streams.get(session)
            if stream is not None:
                stream.retire = True
                stream.wake.set()

    async def relieve(self, sparing: int | None, until: float) -> bool:
        """Ask the peer that is idle longest to retire, so that what is kept for it here becomes free; whether
        it has, in ANSWER_S and before `until`."""
        idle = self._sessions.idle()
        if sparing is not None:
            idle.pop(sparing, None)
        longest = min(idle, key=lambda session: (idle[session], session), default=None)
        stream = None if longest is None else self._streams.get(longest)
        if longest is None or stream is None:
            return False
        stream.retire = True
        stream.wake.set()
        until = min(until, self._loop.now() + ANSWER_S)
        while longest in self._streams:
            left = until - self._loop.now()
            if left <= 0:
                return False
            await self.changed(self._generation, left)
        await _ended([release for release in self._releases if not release.done()])
        return True

    def _refusal(
        self, request: pb.ConnectRequest, key: PeerKey, local: SegmentDescriptor
    ) -> str | None:
        if self._closing is not None:
            return f"it is closing: {self._closing}"
        if request.protocol != PROTOCOL:
            return f"it speaks version {PROTOCOL} of the protocol, the caller version {request.protocol}"
        if key.name == local.name and key.incarnation != local.incarnation:
            return f"the caller advertises {key.name}, the address that it called: set its control.advertise"
        theirs, ours = request.host.boot_id, self._host.boot_id
        if theirs and ours and theirs != ours:
            for whose, name in (("the caller", key.name), ("the engine called", local.name)):
                if address.is_loopback(address.parse(name).host):
                    return (
                        f"{whose} advertises {name}, which no other machine can reach, and the two are on "
                        "different machines: set its control.listen or control.advertise to a real address"
                    )
        return None

    async def watch(self, _requests: Any, context: Any) -> None:
        try:
            hello = await asyncio.wait_for(context.read(), self._settings.call_timeout_s)
        except TimeoutError:
            raise WireError("a watch stream that does not begin") from None
        if hello is aio.EOF or isinstance(hello, Malformed) or not hello.HasField("hello"):
            raise WireError("a watch stream that does not begin with a hello")
        session = hello.session
        if self._sessions.get(session) is None:
            await context.write(self._forgotten_watch(session))
            return
        if self._closing is not None:
            await context.write(self._farewell(session))
            return
        self._take(session, hello)
        replaced = self._streams.get(session)
        if replaced is not None:
            replaced.end(None)
        stream = self._streams[session] = WatchStream()
        self._sessions.watching(session)
        self._rearm()
        reader = self._loop.spawn(self._read(session, stream, context), f"read {session:x}")
        try:
            await context.write(
                pb.WatchResponse(session=session, welcome=pb.WatchResponse.Welcome())
            )
            await self._publish(session, stream, self._held(session, hello.hello), context)
        finally:
            stream.close()
            reader.cancel()
            if self._streams.get(session) is stream:
                del self._streams[session]
                self._sessions.lost(self._loop.now(), session)
                self._rearm()
        if stream.mistake is not None:
            raise WireError(stream.mistake)

    async def get_segment(self, request: pb.GetSegmentRequest, context: Any) -> None:
        if self._sessions.get(request.session) is None:
            await context.write(pb.GetSegmentResponse(forgotten=self._forgotten(request.session)))
            return
        newest = self._local.snapshot
        if request.holds_snapshot and request.version == newest.version:
            unchanged = pb.GetSegmentResponse.Unchanged()
            await context.write(pb.GetSegmentResponse(unchanged=unchanged))
            return
        self._sessions.sent(request.session, newest.version)
        base = self._held(request.session, request)
        for fragment in self._updates.fragments(base, newest):
            await context.write(pb.GetSegmentResponse(fragment=fragment))

    async def bootstrap(self, request: pb.BootstrapRequest, context: Any) -> pb.BootstrapResponse:
        info = self._sessions.get(request.session)
        if info is None:
            return pb.BootstrapResponse(forgotten=self._forgotten(request.session))
        if len(request.payload) > BOOTSTRAP_LIMIT or request.number < 0:
            raise WireError(
                f"a bootstrap of {len(request.payload)} bytes for transport {request.number}"
            )
        left = context.time_remaining()
        timeout = self._settings.call_timeout_s if left is None else left
        until = self._loop.now() + timeout

        async def ask() -> bytes:
            future = self._handler.bootstrap(
                info.key, request.transport, int(request.number), request.payload
            )
            left = max(until - self._loop.now(), 0)
            return await asyncio.wait_for(asyncio.wrap_future(future), left)

        try:
            try:
                answer = await ask()
            except TentError as error:
                if not lacks_resources(error) or not await self.relieve(request.session, until):
                    raise
                answer = await ask()
        except TimeoutError:
            return pb.BootstrapResponse(error=f"no answer within {timeout:.3g} s")
        except Exception as error:
            if not isinstance(error, TentError | NotImplementedError):
                self._log.error("bootstrap_failed", transport=request.transport, exc_info=error)
            return pb.BootstrapResponse(error=f"{type(error).__name__}: {error}")
        if len(answer) > BOOTSTRAP_LIMIT:
            return pb.BootstrapResponse(
                error=f"an answer of {len(answer)} bytes, beyond {BOOTSTRAP_LIMIT}"
            )
        return pb.BootstrapResponse(payload=answer)

    async def notify(self, request: pb.NotifyRequest, context: Any) -> pb.NotifyResponse:
        info = self._sessions.get(request.session)
        if info is None:
            return pb.NotifyResponse(forgotten=self._forgotten(request.session))
        last = 0
        for note in request.notifications:
            size = len(note.name.encode()) + len(note.payload)
            if size > NOTIFICATION_LIMIT or note.sequence <= last:
                raise WireError(f"notification {note.sequence} after {last}, of {size} bytes")
            wire.check_checksums(note.checksums)
            last = note.sequence
        full = False
        for note in request.notifications:
            if note.sequence <= self._sessions.notified(request.session):
                continue  # sent again because its answer was lost
            taken = Notification(info.key, note.name, note.payload, note.sequence)
            if note.HasField("failure"):
                taken = replace(
                    taken,
                    error=f"the sender could not move it: {note.failure.reason[:REASON_LIMIT]}",
                )
            elif note.checksums:
                wrong = await self._verify(request.session, note)
                if self._sessions.get(request.session) is None:
                    return pb.NotifyResponse(forgotten=self._forgotten(request.session))
                if note.sequence <= self._sessions.notified(request.session):
                    continue  # another call, which waited for the same, was first
                taken = replace(taken, error=wrong, verified=wrong is None)
            if not self._handler.notification(taken):
                full = True
                break
            self._sessions.take_notification(request.session, note.sequence)
            self._verifying.pop(request.session, None)
        through = self._sessions.notified(request.session)
        return pb.NotifyResponse(taken=pb.NotifyResponse.Taken(through=through, full=full))

    async def _verify(self, session: int, note: pb.Notification) -> str | None:
        """What is wrong with the data that `note` announces; compared once, however often it is sent."""
        sequence, verdict = self._verifying.get(session, (0, None))
        if verdict is None or sequence != note.sequence:
            verdict = self._handler.verify(wire.checksums_from(note.checksums))
            self._verifying[session] = (note.sequence, verdict)
        return await asyncio.shield(asyncio.wrap_future(verdict))

    async def carried(self, peer: PeerKey, message: bytes) -> bytes:
        """Answer a `notify` that a transport has brought from `peer`. Raises WireError for what is none."""
        try:
            request = pb.NotifyRequest.FromString(message)
        except (DecodeError, UnicodeDecodeError) as error:
            raise WireError(f"bytes that are no NotifyRequest: {error}") from None
        info = self._sessions.get(request.session)
        if info is not None and info.key != peer:
            raise WireError(f"it names a session of {info.key}")
        response = await self.notify(request, None)
        return response.SerializeToString()

    async def goodbye(self, request: pb.GoodbyeRequest, context: Any) -> pb.GoodbyeResponse:
        known, events = self._sessions.goodbye(
            request.session, request.reason[:1000], retired=request.retired
        )
        await _ended(self._carry_out(events))
        return pb.GoodbyeResponse(known=known)

    async def inspect(self, request: pb.InspectRequest, context: Any) -> pb.InspectResponse:
        if not is_nearby(context.peer()):
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                "an engine may be inspected from its own machine only, and this call comes from "
                f"{context.peer()}",
            )
        left = context.time_remaining()
        timeout = self._settings.call_timeout_s if left is None else left
        try:
            document = await asyncio.wait_for(asyncio.wrap_future(self._handler.inspect()), timeout)
        except TimeoutError:
            raise Refused(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"the engine has not gathered it within {timeout:.3g} s",
            ) from None
        except TentError as error:
            raise Refused(grpc.StatusCode.UNAVAILABLE, str(error)) from None
        return pb.InspectResponse(document=document)

    # ---------------------------------------------------------------- watch streams

    async def _publish(
        self, session: int, stream: WatchStream, held: SegmentDescriptor | None, context: Any
    ) -> None:
        """Send what the peer lacks, again and again, until the stream ends."""
        while not stream.ended:
            stream.wake.clear()
            if stream.retire:
                stream.retire = False
                retire = pb.WatchResponse.Retire()
                await context.write(pb.WatchResponse(session=session, retire=retire))
                continue
            newest = self._local.snapshot
            if held is None or newest.version != held.version:
                self._sessions.sent(session, newest.version)
                self._sent[session] = newest
                for fragment in self._updates.fragments(held, newest):
                    await context.write(pb.WatchResponse(session=session, fragment=fragment))
                held = newest
                continue
            await stream.wake.wait()
        if stream.last is not None:
            await context.write(stream.last)

    async def _read(self, session: int, stream: WatchStream, context: Any) -> None:
        """Take what the peer says until it ends the stream or makes a mistake."""
        try:
            while (message := await context.read()) is not aio.EOF:
                if (
                    isinstance(message, Malformed)
                    or message.session != session
                    or message.HasField("hello")
                ):
                    raise WireError("a message on a watch stream that is not of its session")
                self._take(session, message)
        except WireError as error:
            stream.mistake = str(error)
        finally:
            stream.end(stream.last)

    def _take(self, session: int, message: pb.WatchRequest) -> None:
        if message.HasField("acknowledged"):
            self._acknowledge(session, message.acknowledged)
        if message.HasField("use"):
            use = message.use
            idle_s = use.idle_ms / 1000 if use.idle else None
            self._sessions.report(self._loop.now(), session, idle_s)
            if len(self._pressure):
                self._changed()  # it may be asked to retire

    def _acknowledge(self, session: int, version: int) -> None:
        if version > self._local.snapshot.version:
            raise WireError(f"an acknowledgement of version {version}, which does not exist yet")
        self._sessions.acknowledge(session, version)
        self._changed()

    def _held(self, session: int, request: Any) -> SegmentDescriptor | None:
        """The snapshot that the peer holds, if it is the one last sent to it."""
        sent = self._sent.get(session)
        return sent if sent and request.holds_snapshot and request.version == sent.version else None

    def _end_streams(self) -> None:
        for stream in self._streams.values():
            stream.end(None)

    def _republish(self, _: SegmentDescriptor) -> None:
        self._loop.call(self._wake_all)

    def _wake_all(self) -> None:
        for stream in self._streams.values():
            stream.wake.set()

    # ---------------------------------------------------------------- what sessions decide

    def _carry_out(self, events: list[Event]) -> list[Future[None]]:
        """Do what was decided; answers what ends when departed peers have been released."""
        releases: list[Future[None]] = []
        for event in events:
            match event:
                case Opened(info):
                    self._processes[info.session] = self._loop.processes.watch(
                        info.host, partial(self._process_ended, info.session)
                    )
                    self._tell(self._handler.session_opened, info)
                case Departed(info, reason):
                    self._sent.pop(info.session, None)
                    self._verifying.pop(info.session, None)
                    stream = self._streams.pop(info.session, None)
                    if stream is not None:
                        stream.end(self._forgotten_watch(info.session))
                    self._log.info("session_departed", peer=str(info.key), reason=reason)
                    told = self._tell(self._handler.session_departed, info, reason)
                    releases.extend(told or ())
                    self._releases = [r for r in self._releases if not r.done()] + releases
                case Gone(session):
                    self._processes.pop(session, lambda: None)()
        if events:
            self._changed()
            self._rearm()
        return releases

    def _tell(self, call: Callable[..., T], *arguments: object) -> T | None:
        if self._closing is None:
            try:
                return call(*arguments)
            except Exception as error:
                self._log.error("control_handler_raised", call=call.__name__, exc_info=error)
        return None

    def _process_ended(self, session: int) -> None:
        self._carry_out(self._sessions.process_ended(session))

    def _tick(self) -> None:
        self._timer = None
        self._carry_out(self._sessions.tick(self._loop.now()))
        self._rearm()

    def _rearm(self) -> None:
        """Have `_tick` called when the next grace ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        when = self._sessions.next_tick()
        if when is not None and self._closing is None:
            self._timer = self._loop.at(when, self._tick)

    def _changed(self) -> None:
        self._generation += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _forgotten(self, session: int) -> pb.Forgotten:
        reason = self._sessions.why_departed(session) or "it knows no such session"
        return pb.Forgotten(incarnation=self._local.snapshot.incarnation, reason=reason)

    def _forgotten_watch(self, session: int) -> pb.WatchResponse:
        return pb.WatchResponse(session=session, forgotten=self._forgotten(session))

    def _farewell(self, session: int) -> pb.WatchResponse:
        farewell = pb.WatchResponse.Farewell(reason=self._closing or "")
        return pb.WatchResponse(session=session, farewell=farewell)
