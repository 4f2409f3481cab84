"""The engine for asyncio: what blocks in `Engine` is a coroutine here. Batches can be awaited as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tent_core.control.contract import Notification
from tent_core.errors import ClosedError
from tent_core.memory import Buffer

if TYPE_CHECKING:
    from tent_core.engine import Engine
    from tent_core.remote import Segment

T = TypeVar("T")


class AsyncEngine:
    """A view of an engine whose calls never block the event loop; each runs in the loop's thread pool.

    Transfers need no view: `await segment.submit(...)` and `await prepared.post()` work as they are.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(None, call)

    async def open_segment(self, name: str, timeout: float | None = None) -> Segment:
        """See `Engine.open_segment`."""
        return await self._in_thread(lambda: self._engine.open_segment(name, timeout))

    async def register(self, obj: Any, **options: Any) -> Buffer:
        """See `Engine.register`."""
        return await self._in_thread(lambda: self._engine.register(obj, **options))

    async def allocate(self, size: int, location: str = "cpu:0", **options: Any) -> Buffer:
        """See `Engine.allocate`."""
        return await self._in_thread(lambda: self._engine.allocate(size, location, **options))

    async def unregister(self, buffer: Buffer, timeout: float | None = None) -> None:
        """See `Engine.unregister`."""
        await self._in_thread(lambda: self._engine.unregister(buffer, timeout))

    async def notify(
        self, segment: Segment, name: str, payload: bytes = b"", timeout: float | None = None
    ) -> None:
        """See `Segment.notify`."""
        await self._in_thread(lambda: segment.notify(name, payload, timeout))

    async def next_notification(self, timeout: float | None = None) -> Notification:
        """See `Engine.next_notification`. Cancelling the coroutine does not take a notification away."""
        arrived = asyncio.Event()
        loop = asyncio.get_running_loop()
        inbox = self._engine.inbox

        def wake() -> None:
            loop.call_soon_threadsafe(arrived.set)

        forget = inbox.on_arrival(wake)
        try:
            async with asyncio.timeout(timeout):
                while (note := inbox.try_take()) is None:
                    await arrived.wait()
                    arrived.clear()
                return note
        except TimeoutError:
            return inbox.take(0.0)
        finally:
            forget()

    async def notifications(self) -> AsyncIterator[Notification]:
        """Iterate over notifications as they arrive, until the engine closes."""
        while True:
            try:
                yield await self.next_notification()
            except ClosedError:
                return

    async def close(self, timeout: float | None = None) -> None:
        """See `Engine.close`."""
        await self._in_thread(lambda: self._engine.close(timeout))

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
