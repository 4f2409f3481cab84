"""Notifications to one peer that a transport carries instead of gRPC: when, and when not for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from google.protobuf.message import DecodeError

from tent_core.control import tent_pb2 as pb
from tent_core.control.loop import ControlLoop
from tent_core.control.outbox import BATCH_BYTES
from tent_core.descriptor import PeerKey
from tent_core.errors import TransportError
from tent_core.transport import EXCHANGE_LIMIT

Exchange = Callable[[PeerKey, bytes], Future[bytes | None]]
"""Hand a message to a transport; the peer's answer, or None where no transport has a channel to it now."""

LONGEST_S = 0.25
"""How long an answer may take: so much is a notification delayed when a channel dies under it."""

NOT_NOW_S = 0.1
"""After so long it is asked again whether there is a channel."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""How long a channel that failed is left alone: twice as long each time, until it works."""

_WRAPPING = 16
"""More than the bytes of a NotifyRequest around its notifications."""


class Carrier:
    """Tries a transport first. For the control thread; with `exchange` None there is nothing to try.

    It may be tried and gRPC used after it for the same notifications: session and sequence numbers let the
    receiver drop what comes twice, also much later.
    """

    def __init__(self, key: PeerKey, exchange: Exchange | None, loop: ControlLoop, log: Any):
        self._key = key
        self._exchange = exchange
        self._loop = loop
        self._log = log
        self._closed_until = 0.0
        self._pause = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a transport is to be tried now."""
        return self._exchange is not None and self._loop.now() >= self._closed_until

    def room(self) -> int:
        """Bytes of notifications that the next delivery may have."""
        return EXCHANGE_LIMIT - _WRAPPING if self.is_open else BATCH_BYTES

    async def carry(self, request: pb.NotifyRequest, within: float) -> pb.NotifyResponse | None:
        """The peer's answer by way of a transport, or None: then gRPC has to carry it.

        Takes at most LONGEST_S or half of `within` seconds, whichever is less.
        """
        if self._exchange is None or not self.is_open:
            return None
        message = request.SerializeToString()
        if len(message) > EXCHANGE_LIMIT:
            return None
        try:
            future = asyncio.wrap_future(self._exchange(self._key, message))
            future.add_done_callback(_look_at)
            # Shielded: a transport may be about to answer, and must not find its future cancelled.
            answer = await asyncio.wait_for(asyncio.shield(future), min(LONGEST_S, within / 2))
            if answer is None:
                self._closed_until = self._loop.now() + NOT_NOW_S
                return None
            response = pb.NotifyResponse.FromString(answer)
            if response.WhichOneof("outcome") is None:
                raise TransportError("an answer that says nothing")
        except TimeoutError:
            self._failed(f"no answer within {min(LONGEST_S, within / 2):.3g} s")
        except DecodeError as error:
            self._failed(f"an answer that cannot be read: {error}")
        except Exception as error:  # whatever a plugin raises
            self._failed(str(error) or repr(error))
        else:
            self._pause = 0.0
            return response
        return None

    def release(self) -> None:
        """Try nothing any more."""
        self._exchange = None

    def _failed(self, why: str) -> None:
        self._pause = min(2 * self._pause or FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._closed_until = self._loop.now() + self._pause
        self._log.info(
            "notification_not_carried", peer=str(self._key), reason=why, pause_s=self._pause
        )


def _look_at(future: asyncio.Future[bytes | None]) -> None:
    """What failed after nobody waited any more is not to be reported as lost."""
    if not future.cancelled():
        future.exception()
