"""The control plane of one engine, as its other threads use it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from tent_core import address, host
from tent_core.control import listen
from tent_core.control.carrier import Exchange
from tent_core.control.client import ControlClient
from tent_core.control.connection import Connection
from tent_core.control.contract import (
    ConnectionListener,
    ControlHandler,
    ControlSettings,
    Notification,
    PeerSettings,
    SessionInfo,
    SessionState,
)
from tent_core.control.loop import (
    acquire,
    capacity,
    in_forked_child,
    raise_descriptor_limit,
    release,
)
from tent_core.control.pressure import ANSWER_S, Pressure
from tent_core.control.server import ControlServer
from tent_core.control.sessions import Sessions
from tent_core.control.wire import WireError
from tent_core.descriptor import PeerKey
from tent_core.errors import ClosedError, TentError, TransportError, UsageError
from tent_core.segments import LocalSegment

__all__ = [
    "Connection",
    "ConnectionListener",
    "ControlHandler",
    "ControlPlane",
    "Notification",
    "SessionInfo",
    "SessionState",
]

START_S = 10.0

NOTIFIED_S = 1.0
"""How long a transport that brings a message waits for its answer; a second more if the thread is stuck."""


class ControlPlane:
    """Thread-safe. Calls that wait are for any thread but the control thread, and keep their deadline.

    After a fork the child can use neither this one nor a new one: every call raises ClosedError.
    """

    def __init__(self, control: ControlSettings, peers: PeerSettings, log: Any) -> None:
        self._settings = control
        self._loop = acquire(log)
        room = capacity(raise_descriptor_limit(), peers.max)
        self.most_peers = room.peers
        """How many peers this engine keeps each way: `peers.max`, or what the limit of descriptors allows."""
        sessions = Sessions(
            host.identify(),
            peers.grace_s,
            room.peers,
            room.limit,
            lambda: secrets.randbits(64),
        )
        self._server = ControlServer(
            self._loop, control, sessions, Pressure(room.waiting), log, self._peer_connected
        )
        self._client = ControlClient(
            self._loop, control, peers, log, self._server.other_incarnation
        )
        self._bound: address.Address | None = None
        self._advertised: address.Address | None = None
        self._serving = False
        self._stopped = False

    # ---------------------------------------------------------------- life

    def bind(self, timeout: float) -> str:
        """Listen at `control.listen`; answers the segment name: what is advertised is what was bound.

        Raises TentError when the port is taken or the address is none of this machine's; the plane is
        stopped then.
        """
        self._check()
        try:
            wanted = listen.resolve(self._settings.listen)
            self._bound = self._loop.run(self._server.bind(wanted), timeout)
            self._advertised = listen.advertised(self._settings.advertise, self._bound)
        except BaseException:
            self.stop(timeout)
            raise
        return str(self._advertised)

    @property
    def here(self) -> bool:
        """Whether the caller is the control thread, where nothing may wait."""
        return self._loop.here

    @property
    def listen_host(self) -> str:
        """The IP address listened on; may be a wildcard. After `bind`."""
        return self._require(self._bound).host

    @property
    def advertised_host(self) -> str:
        """The host that peers are told. After `bind`."""
        return self._require(self._advertised).host

    def serve(
        self, local: LocalSegment, handler: ControlHandler, exchange: Exchange | None = None
    ) -> None:
        """Begin to answer peers with `local`, whose name is what `bind` answered, and allow `connect`.

        `exchange` is tried first for notifications. It must return at once.
        """
        self._check()
        self._client.serve(local, exchange)
        self._loop.run(self._server.serve(local, handler), START_S)
        self._serving = True

    def leave(self, timeout: float) -> None:
        """Say goodbye to every peer that this engine opened, all at once, within about `timeout` seconds.

        Peers that opened this engine are still answered. Idempotent.
        """
        if not self._stopped and not in_forked_child():
            self._loop.run(self._client.stop("its engine was closed", timeout), timeout)

    def stop(self, timeout: float) -> None:
        """Say goodbye to everybody and end, within about `timeout` seconds. Idempotent.

        Neither handler nor listeners are called any more once it has returned.
        """
        if self._stopped or in_forked_child():
            return
        self._stopped = True
        try:
            self._loop.run(self._stop(timeout), timeout)
        finally:
            release(self._loop)

    async def _stop(self, within: float) -> None:
        reason = "its engine was closed"
        await self._client.stop(reason, within / 2)
        await self._server.stop(reason, within / 2)

    # ---------------------------------------------------------------- peers that this engine opens

    def connect(self, name: str, timeout: float, listener: ConnectionListener) -> Connection:
        """The connection to the engine that answers at `name`: a live one, or a new one with a snapshot.

        Many callers at once make one. A live one, also one found under another name of its engine, keeps
        the listener that it has: compare `Connection.listener`. Raises UnknownSegment when nobody answers,
        PeerRefused with the reason when the engine there refuses, AddressError for a malformed name.
        """
        self._check()
        return self._loop.run(
            self._client.open(str(address.parse(name)), timeout, listener), timeout
        )

    def every(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call()` on the control thread every so many seconds until `stop`. It must not block."""
        self._check()
        self._loop.run(_soon(self._client.every, seconds, call), START_S)

    # ---------------------------------------------------------------- peers that opened this engine

    def sessions(self) -> list[SessionInfo]:
        """All sessions of peers, also of those that have departed and may still touch memory."""
        self._check()
        return self._loop.run(_soon(self._server.sessions), START_S)

    def relieve(self) -> bool:
        """Ask the peer that is idle longest, of those that opened this engine, to retire; whether it has.

        Waits for that, ANSWER_S at the most, and for the release of what was kept for it."""
        self._check()
        return self._loop.run(
            self._server.relieve(None, self._loop.now() + ANSWER_S), ANSWER_S + START_S
        )

    def unacknowledged(
        self, version: int, concerned: Callable[[SessionInfo], bool]
    ) -> list[SessionInfo]:
        """Sessions that have not acknowledged `version` or a later one, and may still touch our memory.

        A peer on this machine that has departed without goodbye is among them while its process lives.
        `concerned` is called in this thread.
        """
        return self._behind(version, concerned)[1]

    def wait_acknowledged(
        self, version: int, concerned: Callable[[SessionInfo], bool], timeout: float
    ) -> list[SessionInfo]:
        """Wait until `unacknowledged` is empty, at most `timeout` seconds; answers what is left."""
        deadline = time.monotonic() + timeout
        while True:
            mark, behind = self._behind(version, concerned)
            left = deadline - time.monotonic()
            if not behind or left <= 0:
                return behind
            self._loop.run(self._server.changed(mark, left), left)

    def _behind(
        self, version: int, concerned: Callable[[SessionInfo], bool]
    ) -> tuple[int, list[SessionInfo]]:
        self._check()
        mark, behind = self._loop.run(_soon(self._server.unacknowledged, version), START_S)
        return mark, [info for info in behind if concerned(info)]

    def notified(self, peer: PeerKey, message: bytes) -> bytes:
        """Take what a peer's `exchange` was given; the answer to carry back. Waits, about NOTIFIED_S at most.

        Raises TransportError for what is no message of that peer, and once the plane is stopped.
        """
        if not self._serving or self._stopped:
            raise TransportError(f"the engine takes no notifications from {peer}: it is not open")
        try:
            return self._loop.run(self._server.carried(peer, message), NOTIFIED_S)
        except WireError as error:
            raise TransportError(f"a malformed message from {peer}: {error}") from None
        except TentError as error:
            raise TransportError(f"a message from {peer} was not taken: {error}") from None

    # ---------------------------------------------------------------- within

    def _peer_connected(self, key: Any) -> None:
        self._client.other_incarnation(key)

    def _check(self) -> None:
        if self._stopped:
            raise ClosedError("the control plane of this engine was stopped")

    @staticmethod
    def _require(found: address.Address | None) -> address.Address:
        if found is None:
            raise UsageError("the control plane is not bound yet")
        return found


async def _soon(call: Callable[..., Any], *arguments: object) -> Any:
    return call(*arguments)
