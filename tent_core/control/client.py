"""The connections of one engine to peers whose segments it opened: one per peer."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from tent_core import address, host
from tent_core.control import probe, wire
from tent_core.control import tent_pb2 as pb
from tent_core.control.carrier import Exchange
from tent_core.control.connection import Connection
from tent_core.control.contract import PROTOCOL, ConnectionListener, ControlSettings, PeerSettings
from tent_core.control.follow import FIRST_PAUSE_S, said
from tent_core.control.link import Link
from tent_core.control.loop import ControlLoop
from tent_core.control.options import aio, client_options, grpc, target
from tent_core.control.silence import Silence
from tent_core.control.tent_pb2_grpc import ControlStub
from tent_core.control.wire import WireError
from tent_core.descriptor import PeerKey
from tent_core.errors import (
    ClosedError,
    PeerDeparted,
    PeerRefused,
    TentError,
    TransportError,
    UnknownSegment,
    WaitTimeout,
)
from tent_core.segments import LocalSegment

_LATER_S = 0.25
_CANCELLED_S = 0.2
"""What connections get to close when the time for saying goodbye is over."""

PROBE_S = 1.0
"""How long a look for an engine may take."""

LOOK_S = 0.1
"""How long a caller waits for one before he fails: enough for an engine, and for a port that is closed."""

_PROBES_AT_ONCE = 16
"""So many looks are under way at once, at most: each costs a descriptor."""


class ControlClient:
    """Makes connections and owns them to their end. For the control thread.

    `answered(key)` is called when an engine has answered under its name.
    """

    def __init__(
        self,
        loop: ControlLoop,
        settings: ControlSettings,
        peers: PeerSettings,
        log: Any,
        answered: Callable[[PeerKey], None],
    ) -> None:
        self._loop = loop
        self._settings = settings
        self._grace_s = peers.grace_s
        self._log = log
        self._answered = answered
        self._local: LocalSegment | None = None
        self._exchange: Exchange | None = None
        self._closing = False
        self._live: dict[str, Connection] = {}
        self._all: set[Connection] = set()
        self._opening: dict[str, asyncio.Task[Connection]] = {}
        self._partings: set[asyncio.Task[None]] = set()
        self._silence = Silence(FIRST_PAUSE_S, settings.reconnect_max_s)
        self._probers: dict[str, asyncio.Task[None]] = {}
        self._looks: dict[str, asyncio.Task[bool]] = {}
        self._probing = asyncio.Semaphore(_PROBES_AT_ONCE)
        self._periodic: list[asyncio.Task[None]] = []

    def serve(self, local: LocalSegment, exchange: Exchange | None) -> None:
        """Whose connections these are, and what carries notifications before gRPC is tried."""
        self._local = local
        self._exchange = exchange

    async def open(self, name: str, within: float, listener: ConnectionListener) -> Connection:
        """The live connection to the engine that answers at `name`, made if there is none (single flight).

        A name that is known to be silent fails at once, unless a short look finds that it is back.
        """
        live = self._live.get(name)
        if live is not None:
            return live
        task = self._opening.get(name)
        if task is None and (silent := self._silence.asked(self._loop.now(), name)):
            if not await self._is_back(name):
                raise UnknownSegment(silent)
            task = self._opening.get(name)
        if task is None:
            work = self._dial(name, within, listener)
            task = self._opening[name] = asyncio.get_running_loop().create_task(work)
            task.add_done_callback(self._opened)
        return await self._outcome(task, name, within)

    def other_incarnation(self, key: PeerKey) -> None:
        """`key` lives: a connection to another incarnation under its name has departed."""
        connection = self._live.get(key.name)
        if connection is not None and connection.key != key:
            connection.depart(
                f"another incarnation appeared under its name: {key}", owes_goodbye=False
            )

    def retire(self, connection: Connection) -> None:
        """A connection is not to be handed out any more."""
        if self._live.get(connection.key.name) is connection:
            del self._live[connection.key.name]

    def forget(self, connection: Connection) -> None:
        """Nothing of a connection is left."""
        self._all.discard(connection)

    def unreachable(self, name: str, why: str) -> None:
        """Nobody answers at `name`: let calls for it fail at once, and look for it."""
        if self._closing:
            return
        pushed_out = self._silence.failed(self._loop.now(), name, why)
        if pushed_out in self._probers:
            self._probers.pop(pushed_out).cancel()
        if name not in self._probers:
            self._probers[name] = self._loop.spawn(self._look_for(name), f"look for {name}")

    async def _is_back(self, name: str) -> bool:
        """Look for a silent name out of turn; callers at the same time share one look."""
        look = self._looks.get(name)
        if look is None:
            if not self._silence.may_look(self._loop.now(), name):
                return False
            look = self._looks[name] = self._loop.spawn(self._look(name, LOOK_S), f"look at {name}")
            look.add_done_callback(lambda _: self._looks.pop(name, None))
        await asyncio.wait((look,), timeout=LOOK_S + _LATER_S)
        return look.done() and not look.cancelled() and look.result()

    async def _look(self, name: str, within: float) -> bool:
        async with self._probing:
            back = await probe.answers(address.parse(name), within)
        if back:
            self._silence.answered(name)
            self._log.info("peer_answers_again", peer=name)
        return back

    async def _look_for(self, name: str) -> None:
        try:
            while (pause := self._silence.pause(self._loop.now(), name)) is not None:
                await asyncio.sleep(pause)
                await self._look(name, PROBE_S)
        finally:
            if self._probers.get(name) is asyncio.current_task():
                del self._probers[name]

    def every(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call()` every so many seconds until `stop`."""

        async def again() -> None:
            while True:
                await asyncio.sleep(seconds)
                try:
                    call()
                except Exception as error:
                    self._log.error("periodic_call_raised", call=call.__name__, exc_info=error)

        self._periodic.append(self._loop.spawn(again(), f"every {seconds:g} s"))

    def part(self, connection: Connection, work: Coroutine[Any, Any, None]) -> None:
        """Own the end of a connection that takes longer."""
        task = self._loop.spawn(work, f"part {connection.key}")
        self._partings.add(task)
        task.add_done_callback(self._partings.discard)

    async def stop(self, reason: str, within: float) -> None:
        """Say goodbye to everybody, all at once, within about `within` seconds."""
        self._closing = True
        deadline = self._loop.now() + within
        for task in (
            *set(self._opening.values()),
            *self._periodic,
            *self._probers.values(),
            *self._looks.values(),
        ):
            task.cancel()
        ends = [asyncio.ensure_future(connection.end(reason)) for connection in self._all]
        await _all_until(ends, deadline)
        await _all_until(list(self._partings), deadline)
        left = [task for task in (*ends, *self._partings) if not task.done()]
        for unfinished in left:
            unfinished.cancel()
        drops = [asyncio.ensure_future(connection.drop()) for connection in self._all]
        await _all_until([*left, *drops], self._loop.now() + _CANCELLED_S)

    async def _outcome(
        self, task: asyncio.Task[Connection], name: str, within: float
    ) -> Connection:
        # A little longer than the task gives itself: it knows better what failed.
        done, _ = await asyncio.wait((task,), timeout=within + _LATER_S)
        if not done:
            raise UnknownSegment(f"no engine answers at {name} within {within:.3g} s")
        if task.cancelled():
            raise ClosedError(f"the engine was closed while it connected to {name}")
        return task.result()

    def _opened(self, task: asyncio.Task[Connection]) -> None:
        for name in [name for name, opening in self._opening.items() if opening is task]:
            del self._opening[name]
        if not task.cancelled():
            task.exception()  # who waits for it has seen it

    async def _dial(self, name: str, within: float, listener: ConnectionListener) -> Connection:
        deadline = self._loop.now() + within
        channel = aio.insecure_channel(
            target(address.parse(name)), options=client_options(self._settings)
        )
        connection: Connection | None = None
        try:
            nonce = secrets.randbits(64)
            response = await self._connect(channel, name, name, nonce, within)
            if response.HasField("other_name"):
                known = response.name
                if (live := self._live.get(known)) is not None:
                    return live
                left = max(0.01, deadline - self._loop.now())
                if (opening := self._opening.get(known)) is not None:
                    return await self._outcome(opening, known, left)
                task = asyncio.current_task()
                assert task is not None
                self._opening[known] = task
                response = await self._connect(channel, name, known, nonce, left)
            connection = self._adopt(channel, name, response, listener)
        finally:
            if connection is None:
                await channel.close()
        try:
            await connection.first_snapshot(max(0.01, deadline - self._loop.now()))
        except BaseException as error:
            self.part(connection, connection.end("it could not be opened"))
            if isinstance(error, WaitTimeout | PeerDeparted):
                raise UnknownSegment(f"segment {name} cannot be opened: {error}") from None
            raise
        if connection.departed is not None:  # between the snapshot and now
            self.part(connection, connection.end("it could not be opened"))
            raise UnknownSegment(f"segment {name} cannot be opened: {connection.departed}")
        self._live[connection.key.name] = connection
        return connection

    async def _connect(
        self, channel: Any, name: str, target: str, nonce: int, within: float
    ) -> pb.ConnectResponse:
        if self._local is None or self._closing:
            raise ClosedError("the engine is not open: nothing can be opened with it")
        local = self._local.snapshot
        request = pb.ConnectRequest(
            protocol=PROTOCOL,
            target=target,
            name=local.name,
            incarnation=local.incarnation,
            host=wire.host_to(host.identify()),
            transports=wire.transports_to(local.transports),
            nonce=nonce,
        )
        try:
            response: pb.ConnectResponse = await _stub(channel).Connect(request, timeout=within)
        except aio.AioRpcError as error:
            nobody = _nobody(name, error, within)
            if error.code() in _SILENT and nobody.__cause__ is None:
                self.unreachable(name, str(nobody))
            raise nobody from nobody.__cause__
        if response.HasField("refused"):
            raise PeerRefused(f"the engine at {name} refused: {response.refused.reason}")
        return response

    def _adopt(
        self, channel: Any, name: str, response: pb.ConnectResponse, listener: ConnectionListener
    ) -> Connection:
        try:
            key = wire.key_from(response.name, response.incarnation)
        except WireError as error:
            raise UnknownSegment(f"what answers at {name} is no engine: it says {error}") from None
        session = response.accepted.session
        if not session:
            raise UnknownSegment(f"what answers at {name} is no engine: it opened no session")
        self._answered(key)
        self.other_incarnation(key)
        connection = Connection(
            self,
            self._loop,
            self._settings,
            Link(self._loop.now(), self._grace_s),
            channel,
            _stub(channel),
            key,
            session,
            wire.host_from(response.host),
            listener,
            self._log,
            self._exchange,
        )
        self._all.add(connection)
        return connection


async def _all_until(tasks: list[Any], deadline: float) -> None:
    if tasks:
        left = deadline - asyncio.get_running_loop().time()
        await asyncio.wait(tasks, timeout=max(0.01, left))


def _stub(channel: Any) -> Any:
    return ControlStub(channel)  # type: ignore[no-untyped-call]


_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def _nobody(name: str, error: Any, timeout: float) -> TentError:
    """The error to raise; its cause is an OSError when this side lacks descriptors."""
    code = error.code()
    if code is grpc.StatusCode.UNAVAILABLE and os.strerror(errno.EMFILE) in said(error):
        lacking = TransportError(
            f"no descriptor is left to connect to {name}: raise the limit (ulimit -n)"
        )
        lacking.__cause__ = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return lacking
    if code is grpc.StatusCode.UNAVAILABLE:
        return UnknownSegment(f"no engine answers at {name}: {said(error)}; is it running there?")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnknownSegment(f"no engine answers at {name} within {timeout:.3g} s")
    return UnknownSegment(f"what answers at {name} is no engine of this version: {said(error)}")
