"""Goodbyes: said once to a peer that answers, and for longer to one on this machine that may be stopped."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

from tent_core import address, host
from tent_core.control import probe
from tent_core.control import tent_pb2 as pb
from tent_core.control.contract import ControlSettings
from tent_core.control.follow import FIRST_PAUSE_S
from tent_core.control.loop import ControlLoop
from tent_core.control.options import aio
from tent_core.descriptor import HostIdentity, PeerKey

UNWATCHED_S = 600.0
"""How long a goodbye is repeated to a peer on this machine whose process cannot be watched from here."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Why a session ends. `retired`: the engine lives on, and comes back when it needs the peer."""

    session: int
    reason: str
    retired: bool


async def say(stub: Any, goodbye: Goodbye, within: float) -> bool:
    """Whether the peer has heard it (or knows nothing of the session)."""
    request = pb.GoodbyeRequest(
        session=goodbye.session, reason=goodbye.reason[:500], retired=goodbye.retired
    )
    try:
        await stub.Goodbye(request, timeout=within)
    except aio.AioRpcError:
        return False
    return True


async def keep_saying(
    loop: ControlLoop,
    settings: ControlSettings,
    stub: Any,
    key: PeerKey,
    process: HostIdentity,
    goodbye: Goodbye,
) -> None:
    """Deliver a goodbye that could not be delivered at once.

    Once more to a peer on another machine: it counts nobody there among those who may touch its memory. To
    one on this machine for as long as its process lives and listens: it may be stopped, and would wait for
    this side at every revocation once it goes on.
    """
    own = host.identify()
    ended = asyncio.Event()
    unwatch = loop.processes.watch(process, ended.set)
    gives_up = float("inf") if host.same_pids(own, process) else loop.now() + UNWATCHED_S
    pause = FIRST_PAUSE_S
    try:
        while not await say(stub, goodbye, settings.call_timeout_s):
            if not process.same_machine(own) or loop.now() > gives_up:
                return
            # Its engine is gone when nobody listens there any more.
            if await probe.is_refused(address.parse(key.name), settings.call_timeout_s):
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), pause)
                return
            pause = min(2 * pause, settings.reconnect_max_s)
    finally:
        unwatch()
