"""A connection to one live peer: what the engine asks of it, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, Protocol, TypeVar

from tent_core import host
from tent_core.control import goodbye, wire
from tent_core.control import tent_pb2 as pb
from tent_core.control.carrier import Carrier, Exchange
from tent_core.control.contract import (
    BOOTSTRAP_LIMIT,
    REASON_LIMIT,
    Checksum,
    ConnectionListener,
    ControlSettings,
    check_notification,
)
from tent_core.control.follow import Follower, said
from tent_core.control.goodbye import Goodbye
from tent_core.control.link import Link, LinkState
from tent_core.control.loop import ControlLoop
from tent_core.control.options import aio, grpc
from tent_core.control.outbox import Outbox, Rejected, Undelivered
from tent_core.control.wire import WireError
from tent_core.descriptor import HostIdentity, PeerKey, SegmentDescriptor
from tent_core.errors import (
    ClosedError,
    PeerDeparted,
    TentError,
    TransportError,
    UsageError,
    WaitTimeout,
)

T = TypeVar("T")


class Owner(Protocol):
    """Who keeps the connections of an engine."""

    def retire(self, connection: Connection) -> None:
        """It is not to be handed out any more."""
        ...

    def forget(self, connection: Connection) -> None:
        """Nothing of it is left."""
        ...

    def part(self, connection: Connection, work: Coroutine[Any, Any, None]) -> None:
        """Carry on with its end, in the background."""
        ...

    def unreachable(self, name: str, why: str) -> None:
        """Nobody answers at a peer's name."""
        ...


class Connection:
    """A session with one live peer. Public methods may be called from any thread; those that wait say so.

    `listener` is that of whoever connected first: `connect` to the same engine, by this name or another,
    answers the same connection.
    """

    def __init__(
        self,
        owner: Owner,
        loop: ControlLoop,
        settings: ControlSettings,
        link: Link,
        channel: Any,
        stub: Any,
        key: PeerKey,
        session: int,
        process: HostIdentity,
        listener: ConnectionListener,
        log: Any,
        exchange: Exchange | None = None,
    ) -> None:
        self.key = key
        self.session = session
        self.listener = listener
        self._owner = owner
        self._loop = loop
        self._settings = settings
        self._link = link
        self._channel = channel
        self._stub = stub
        self._process = process
        self._log = log
        self._probing = False
        self._given_up: str | None = None
        self._closed = False
        self._dropped = False
        self._ending: asyncio.Future[None] | None = None
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._carrier = Carrier(key, exchange, loop, log)
        self._outbox = Outbox(key.name, self._deliver, loop.spawn, self._carrier.room)
        self._follower = Follower(
            loop,
            settings,
            link,
            stub,
            key,
            session,
            process.same_machine(host.identify()),
            self._adopted,
            self.depart,
            self._forgotten,
            self._asked_to_retire,
            log,
        )
        self._unwatch = loop.processes.watch(process, self._process_ended)
        self._following = loop.spawn(self._follower.run(), f"follow {key}")

    # ---------------------------------------------------------------- public

    @property
    def descriptor(self) -> SegmentDescriptor:
        """The newest snapshot known."""
        snapshot = self._follower.snapshot
        assert snapshot is not None  # a connection is handed out with its first snapshot
        return snapshot

    @property
    def departed(self) -> str | None:
        """Why the peer has departed, or None."""
        return self._link.reason

    @property
    def state(self) -> LinkState:
        """Whether the watch stream is up, is being brought back, or the peer has departed."""
        return self._link.state

    def acknowledge(self, version: int) -> None:
        """Tell the peer that all that `version` took away has been let go of. Returns at once."""
        self._loop.call(self._follower.acknowledge, version)

    def bootstrap(self, transport: str, number: int, payload: bytes, timeout: float) -> bytes:
        """Hand `payload` to a transport at the peer; its answer. Waits.

        Raises TransportError when it refuses, fails or does not answer in time, PeerDeparted.
        """
        _check_bootstrap(payload)
        return self._loop.run(self._bootstrap(transport, number, payload, timeout), timeout)

    def begin_bootstrap(
        self, transport: str, number: int, payload: bytes, timeout: float
    ) -> Future[bytes]:
        """The same without waiting; the future is resolved on the control thread, or never if that ends."""
        _check_bootstrap(payload)
        return self._loop.begin(self._bootstrap(transport, number, payload, timeout))

    def notify(self, name: str, payload: bytes, timeout: float) -> None:
        """Deliver a notification to the peer's engine, in the order of the calls. Waits until it is taken.

        Raises UsageError when name and payload are beyond NOTIFICATION_LIMIT, WaitTimeout, PeerDeparted.
        """
        check_notification(name, payload)
        self._loop.run(self._notify(name, bytes(payload), timeout), timeout)

    def announce(
        self,
        name: str,
        payload: bytes,
        within: float,
        failure: str | None = None,
        checksums: Sequence[Checksum] = (),
    ) -> Future[None]:
        """As `notify`, but returns at once: the future ends when the peer's engine has it, or with the error.

        It stands in one line with `notify`. `failure` says why the data that it announces has not all
        arrived; `checksums` are what that data has to be. Cancelling the future gives it up; it may be on
        its way then. `done` callbacks run on the control thread.
        """
        message = pb.Notification(name=name, payload=bytes(payload))
        if failure is not None:
            message.failure.reason = failure[:REASON_LIMIT]
        message.checksums.extend(map(wire.checksum_to, checksums))
        outcome: Future[None] = Future()
        if not self._loop.call(self._announce, message, self._loop.now() + within, outcome):
            outcome.set_exception(ClosedError(f"the connection to {self.key} was closed"))
        return outcome

    def refresh(self, timeout: float) -> SegmentDescriptor:
        """Ask for the newest snapshot; `listener.updated` has been called when it returns. Waits.

        Raises WaitTimeout, TransportError when the connection breaks, PeerDeparted.
        """
        return self._loop.run(self._refresh(timeout), timeout)

    def suspect(self, cause: Exception) -> None:
        """Something suggests that the peer is gone: ask it now. Returns at once."""
        self._loop.call(self._suspect, str(cause) or type(cause).__name__)

    def report_idle(self, seconds: float | None) -> None:
        """This side has had no use for the peer for so long, or has one (None). Returns at once.

        To be called now and then: the peer is told what has changed, and asks idle ones when it needs room.
        """
        since = None if seconds is None else self._loop.now() - seconds
        if self._follower.use.report(since):
            self._loop.call(self._follower.tell)

    def give_up(self, reason: str) -> None:
        """End all calls that wait for the peer, with PeerDeparted; a goodbye is all that is said from now on.

        Returns at once. For an owner that is to close it, but cannot before those calls have ended.
        """
        self._loop.call(self._give_up, reason)

    def close(self, reason: str = "the connection was closed", *, retired: bool = False) -> None:
        """Say goodbye: this side touches the peer's memory no more. Idempotent; no event follows.

        `retired`: the peer is let go of because nothing uses it, and this engine lives on.
        Waits for the answer at most `control.call_timeout_s`. If the peer cannot be reached it returns at
        once, and delivery goes on in the background.
        """
        if self._closed:
            return
        if self._loop.here:
            self._loop.spawn(self.end(reason, retired), f"close {self.key}")
        else:
            self._loop.run(self.end(reason, retired), self._settings.call_timeout_s)

    def __repr__(self) -> str:
        return f"<Connection to {self.key}: {self._link.state.value}, session {self.session:x}>"

    # ---------------------------------------------------------------- for the owner, on the control thread

    async def first_snapshot(self, within: float) -> None:
        """Wait for the first snapshot. Raises WaitTimeout, PeerDeparted."""
        try:
            async with asyncio.timeout(within):
                await self._or_departed(asyncio.shield(self._first))
        except TimeoutError:
            raise WaitTimeout(
                f"{self.key.name} did not send its descriptor within {within:.3g} s"
            ) from None

    def depart(self, reason: str, *, owes_goodbye: bool = True, unreachable: bool = False) -> None:
        """The peer has departed: once, whoever finds out first. `unreachable`: nobody answers at its name."""
        if not self._link.depart(reason, owes_goodbye=owes_goodbye):
            return
        if unreachable:
            self._owner.unreachable(self.key.name, f"peer {self.key} departed: {reason}")
        self._let_go(PeerDeparted(f"peer {self.key} departed: {reason}"))
        self._log.info("peer_lost", peer=str(self.key), reason=reason)
        if self._first.done():
            self._tell(self.listener.departed, reason)

    async def end(self, reason: str, retired: bool = False) -> None:
        """As `close`. Whoever comes while it is under way waits for the same end, goodbye included."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end(reason, retired))
        await asyncio.shield(self._ending)

    async def _end(self, reason: str, retired: bool) -> None:
        self._closed = True
        was_up = self._link.state is LinkState.UP
        self._link.depart("it was closed here")
        self._let_go(ClosedError(f"the connection to {self.key} was closed: {reason}"))
        timeout = self._settings.call_timeout_s
        last = Goodbye(self.session, reason, retired)
        if not self._link.owes_goodbye or (was_up and await goodbye.say(self._stub, last, timeout)):
            await self.drop()
        else:
            self._owner.part(self, self._part(last))

    async def drop(self) -> None:
        """Close the channel; nothing is left after that. Idempotent."""
        if self._dropped:
            return
        self._dropped = True
        await self._channel.close()
        self._owner.forget(self)
        # The connection of a channel ends with the last call that is referred to: without cycles that is now,
        # and not when the garbage collector comes by.
        self._following.cancel()
        del self._following, self._unwatch
        self._follower.release()
        self._outbox.release()
        self._carrier.release()

    # ---------------------------------------------------------------- departure

    def _process_ended(self) -> None:
        self.depart(f"its process {self._process.pid} ended", owes_goodbye=False)

    def _forgotten(self, forgotten: pb.Forgotten) -> None:
        if forgotten.incarnation == self.key.incarnation:
            self.depart(f"it has forgotten this session: {forgotten.reason}")
        else:
            self.depart("another incarnation answers under its name", owes_goodbye=False)

    def _give_up(self, reason: str) -> None:
        if self._link.reason is None and not self._closed:
            self._given_up = reason
            self._end_calls(PeerDeparted(f"peer {self.key} departed: {reason}"))

    def _end_calls(self, error: TentError) -> None:
        self._outbox.fail(error)
        if not self._gone.done():
            self._gone.set_result(None)

    def _let_go(self, error: TentError) -> None:
        """End all that goes on, but for the goodbye."""
        self._owner.retire(self)
        self._unwatch()
        self._end_calls(error)
        if asyncio.current_task() is not self._following:
            self._following.cancel()

    async def _part(self, last: Goodbye) -> None:
        try:
            await goodbye.keep_saying(
                self._loop,
                self._settings,
                self._stub,
                self.key,
                self._process,
                last,
            )
        finally:
            await self.drop()

    def _asked_to_retire(self) -> None:
        self._tell(self.listener.asked_to_retire)

    def _adopted(self, old: SegmentDescriptor | None, new: SegmentDescriptor) -> None:
        if not self._first.done():
            self._first.set_result(None)
        if old is not None:
            self._tell(self.listener.updated, old, new)

    # ---------------------------------------------------------------- calls

    async def _bootstrap(self, transport: str, number: int, payload: bytes, within: float) -> bytes:
        request = pb.BootstrapRequest(
            session=self.session,
            transport=transport,
            number=wire.transport_type(number),
            payload=payload,
        )
        try:
            response = await self._ask(self._stub.Bootstrap, request, within)
        except aio.AioRpcError as error:
            raise TransportError(
                f"bootstrap of {transport} with {self.key}: {said(error)}"
            ) from None
        if response.HasField("payload"):
            return bytes(response.payload)
        raise TransportError(
            f"bootstrap of {transport} at {self.key} failed there: {response.error}"
        )

    async def _notify(self, name: str, payload: bytes, within: float) -> None:
        self._check()
        await self._outbox.put(name, payload, within)

    def _announce(self, message: pb.Notification, deadline: float, outcome: Future[None]) -> None:
        try:
            self._check()
        except TentError as error:
            if not outcome.done():
                outcome.set_exception(error)
            return
        self._outbox.post(message, deadline, outcome)

    async def _deliver(
        self, notes: list[pb.Notification], deadline: float
    ) -> pb.NotifyResponse.Taken:
        request = pb.NotifyRequest(session=self.session, notifications=notes)
        if self._carrier.is_open:
            self._check()
            left = max(0.001, deadline - self._loop.now())
            carried = await self._or_departed(self._carrier.carry(request, left))
            if carried is not None:
                self._check_remembered(carried)
                return carried.taken
        timeout = min(self._settings.call_timeout_s, max(0.001, deadline - self._loop.now()))
        try:
            response: pb.NotifyResponse = await self._ask(self._stub.Notify, request, timeout)
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise Rejected(error.details()) from None
            raise Undelivered(said(error)) from None
        return response.taken

    async def _refresh(self, within: float) -> SegmentDescriptor:
        self._check()
        base = self.descriptor
        request = pb.GetSegmentRequest(
            session=self.session, holds_snapshot=True, version=base.version
        )
        assembler = wire.Assembler(self.key)
        call = self._stub.GetSegment(request, timeout=within, wait_for_ready=True)
        try:
            while (message := await self._or_departed(call.read())) is not aio.EOF:
                if message.HasField("forgotten"):
                    self._forgotten(message.forgotten)
                    self._check()
                elif message.HasField("fragment") and (
                    new := assembler.feed(message.fragment, base)
                ):
                    self._follower.adopt(new)
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise WaitTimeout(
                    f"segment {self.key.name} did not answer within {within:.3g} s"
                ) from None
            raise TransportError(f"a fresh descriptor of {self.key}: {said(error)}") from None
        except WireError as error:
            self.depart(f"it sent what is no descriptor: {error}")
            self._check()
        finally:
            call.cancel()
        return self.descriptor

    def _suspect(self, cause: str) -> None:
        if self._link.state is LinkState.UP and not self._probing and self._given_up is None:
            self._probing = True
            self._loop.spawn(self._probe(cause), f"probe {self.key}")

    async def _probe(self, cause: str) -> None:
        try:
            await self._refresh(self._settings.keepalive_timeout_s)
        except TentError as error:
            if self._link.state is LinkState.UP:
                self._follower.cut(f"{cause}; and asked whether it is there: {error}")
        finally:
            self._probing = False

    async def _ask(self, method: Any, request: Any, within: float) -> Any:
        """A call whose answer may be that the session is forgotten. Raises AioRpcError, PeerDeparted."""
        self._check()
        response = await self._or_departed(method(request, timeout=within, wait_for_ready=True))
        self._check_remembered(response)
        return response

    def _check_remembered(self, response: Any) -> None:
        if response.HasField("forgotten"):
            self._forgotten(response.forgotten)
            self._check()

    async def _or_departed(self, work: Awaitable[T]) -> T:
        """`work`, or PeerDeparted as soon as the peer has departed."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._gone), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            task.cancel()
            del task  # else what it raised would refer to itself
        self._raise_gone()

    def _check(self) -> None:
        if self._link.reason is not None or self._given_up is not None:
            self._raise_gone()

    def _raise_gone(self) -> NoReturn:
        if self._closed:
            raise ClosedError(f"the connection to {self.key} was closed")
        raise PeerDeparted(f"peer {self.key} departed: {self._link.reason or self._given_up}")

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            call(*arguments)
        except Exception as error:
            self._log.error("connection_listener_raised", call=call.__name__, exc_info=error)


def _check_bootstrap(payload: bytes) -> None:
    if len(payload) > BOOTSTRAP_LIMIT:
        raise UsageError(f"a bootstrap payload of {len(payload)} bytes is beyond {BOOTSTRAP_LIMIT}")
