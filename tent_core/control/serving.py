"""The gRPC server of one engine at its address, made anew when gRPC's own comes to an end by accident.

grpc.aio decodes the path of every request in the one task that accepts them (seen in grpcio 1.85): a path
that is not UTF-8 ends that task and closes the port, for everybody and for good. Sessions are ours and not
gRPC's, so a new server at the same address goes on with them: peers connect again, within their grace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tent_core.address import Address
from tent_core.control.listen import why_not_bound
from tent_core.control.loop import ControlLoop
from tent_core.control.options import Options, aio
from tent_core.errors import TentError
from tent_core.log import RateLimited

_RETRY_S = 0.01
_EXPECTED_S = 1.0
"""A port that has not been closed by then is worth a line in the log."""

_GRACE_S = 0.1
"""What calls that still run get when their server has come to an end."""


class Serving:
    """Listens at one address until it is stopped. All methods are for the control thread.

    `interrupted` is called when the server has come to an end by accident, before the next one is made: what
    waits for something on a connection shall end.
    """

    def __init__(
        self,
        loop: ControlLoop,
        options: Options,
        handlers: Any,
        log: Any,
        interrupted: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._options = options
        self._handlers = handlers
        self._log = log
        self._failures = RateLimited(log)
        self._interrupted = interrupted
        self._server: Any = None
        self._bound: Address
        self._stopping = False
        self._restart: asyncio.Task[None] | None = None

    async def bind(self, wanted: Address) -> Address:
        """Listen at `wanted`, which is an IP address; answers what was bound. Raises TentError."""
        server = aio.server(options=self._options)
        try:
            port = server.add_insecure_port(str(wanted))
        except RuntimeError:
            port = 0
        if port == 0:
            await server.stop(0)
            raise TentError(f"cannot listen on {wanted}: {why_not_bound(wanted)}")
        server.add_generic_rpc_handlers((self._handlers,))
        self._server = server
        self._bound = Address(wanted.host, port)
        return self._bound

    async def start(self) -> None:
        """Begin to answer; `bind` comes first."""
        before = asyncio.all_tasks()
        await self._server.start()
        for task in _named("_server_main_loop", asyncio.all_tasks() - before):
            task.add_done_callback(self._accepting_ended)

    async def stop(self, within: float) -> None:
        """Accept nothing more, let calls end for `within` seconds, and cut them then. Idempotent."""
        self._stopping = True
        if self._restart is not None:
            await asyncio.wait((self._restart,), timeout=within)
        if self._server is not None:
            await self._server.stop(within)
        self._failures.flush()

    def _accepting_ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None or self._stopping:
            return
        # gRPC's own handler has begun a shutdown that fails with the same error; it has been seen.
        for shutdown in _named("shutdown", asyncio.all_tasks()):
            shutdown.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._failures.warning(
            "control_server_restarts", address=str(self._bound), cause=repr(error)
        )
        self._restart = self._loop.spawn(self._start_again(), "restart of the control server")

    async def _start_again(self) -> None:
        ended, self._server = self._server, None
        self._interrupted()
        # gRPC has begun to close the port; what still runs there is not waited for.
        expected = self._loop.now() + _EXPECTED_S
        while self._server is None and not self._stopping:
            try:
                await self.bind(self._bound)
            except TentError as error:
                if self._loop.now() > expected:
                    self._failures.warning("control_server_not_restarted", reason=str(error))
                await asyncio.sleep(_RETRY_S)
        if not self._stopping:
            await self.start()
        await ended.stop(_GRACE_S)


def _named(name: str, tasks: set[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    """Those of gRPC's tasks that run the method `name` of its server."""
    wanted = f"AioServer.{name}"
    return [t for t in tasks if getattr(t.get_coro(), "__qualname__", "") == wanted]
