"""One control thread per process: an asyncio loop that the control planes of all its engines share."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import resource
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from tent_core.control.options import aio
from tent_core.control.processes import ProcessWatcher
from tent_core.errors import ClosedError, UsageError, WaitTimeout

T = TypeVar("T")

START_S = 10.0
STOP_S = 5.0
_MARGIN_S = 1.0
"""What a call gets beyond its own deadline before the control thread counts as stuck."""

_RESERVED_DESCRIPTORS = 64
_DESCRIPTORS_PER_PEER = 3  # a connection each way, and a pidfd
_MOST_WAITING = 256
_WAITING_SHARE = 8  # one of so many descriptors that are left is for a newcomer that waits

_lock = threading.Lock()
_current: ControlLoop | None = None
_started = False
_forked = False


def in_forked_child() -> bool:
    """Whether this process was forked from one that had started an engine."""
    return _forked


def refuse_in_forked_child() -> None:
    """Raise ClosedError in a child forked after its parent had started an engine: gRPC would hang there."""
    if _forked:
        raise ClosedError(
            "this process was forked from one that had started an engine, and engines do not survive a "
            'fork: start processes with multiprocessing.get_context("spawn"), or fork before the first engine'
        )


def acquire(log: Any) -> ControlLoop:
    """The control loop of this process, started if it does not run; every call needs one `release`."""
    global _current, _started
    refuse_in_forked_child()
    with _lock:
        if _current is None:
            raise_descriptor_limit()
            _started = True
            _current = ControlLoop(log)
        _current.users += 1
        return _current


def release(loop: ControlLoop) -> None:
    """Give the control loop back; the last one stops its thread, within STOP_S."""
    global _current
    if _forked:
        return
    with _lock:
        loop.users -= 1
        if loop.users > 0:
            return
        if _current is loop:
            _current = None
    loop.stop()


class ControlLoop:
    """A daemonic thread that runs an asyncio loop. Control-plane state is touched on this thread alone."""

    def __init__(self, log: Any) -> None:
        self.users = 0
        self._log = log
        self._ready = threading.Event()
        self._loop = asyncio.SelectorEventLoop()
        self._loop.set_exception_handler(self._on_error)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.processes = ProcessWatcher(self._loop)
        self._thread = threading.Thread(target=self._main, name="tent-control", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_S):
            raise WaitTimeout(f"the control thread did not start within {START_S:g} s")

    @property
    def here(self) -> bool:
        """Whether the caller is the control thread."""
        return threading.current_thread() is self._thread

    def now(self) -> float:
        """The loop's monotonic clock, in seconds; from any thread."""
        return self._loop.time()

    def run(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Carry out `work` on the control thread and wait for it, from any other thread.

        `work` keeps its own deadline; a control thread that has not answered a second after `timeout`
        raises WaitTimeout.
        """
        if self.here:
            work.close()
            raise UsageError("a call that waits was made on the control thread: use another thread")
        future = self.begin(work)
        try:
            return future.result(timeout + _MARGIN_S)
        except concurrent.futures.CancelledError:
            raise ClosedError(
                "the control thread ended meanwhile: its last engine was closed"
            ) from None
        except TimeoutError:
            if future.done():
                return future.result(0)
            raise WaitTimeout(
                f"the control thread did not answer within {timeout + _MARGIN_S:g} s"
            ) from None
        finally:
            future.cancel()
            del future  # else what it raised would refer to itself

    def begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Carry out `work` on the control thread, from any thread. Raises ClosedError after its end; a future
        that it did not live to resolve stays open."""
        try:
            refuse_in_forked_child()
            if self._loop.is_closed():
                raise ClosedError("the control thread has ended: its last engine was closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except BaseException:
            work.close()
            raise

    def call(self, work: Callable[..., object], *args: object) -> bool:
        """Carry out `work(*args)` on the control thread, soon, from any thread, in the order of the calls.

        False after its end: it will not be."""
        if _forked or self._loop.is_closed():
            return False
        try:
            self._loop.call_soon_threadsafe(work, *args)
        except RuntimeError:  # closed meanwhile
            return False
        return True

    def at(self, when: float, work: Callable[[], object]) -> asyncio.TimerHandle:
        """Carry out `work()` at `when` on the loop's clock. For the control thread."""
        return self._loop.call_at(when, work)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task that is owned by the loop; what it raises is logged. For the control thread."""
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def stop(self) -> None:
        """Cancel what still runs and end the thread, within STOP_S."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        if not self.here:
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                self._log.error("control_thread_stuck", waited_s=STOP_S)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._start())
            self._ready.set()
            self._loop.run_forever()
            self._loop.run_until_complete(self._finish())
        finally:
            self.processes.close()
            asyncio.set_event_loop(None)
            self._loop.close()

    async def _start(self) -> None:
        aio.init_grpc_aio()

    async def _finish(self) -> None:
        for task in self._tasks:
            task.cancel()
        # What gRPC still has to do ends by itself, and complains on stderr when it is cancelled.
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            _, late = await asyncio.wait(others, timeout=STOP_S / 4)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=STOP_S / 4)
        await self._loop.shutdown_asyncgens()
        aio.shutdown_grpc_aio()

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("control_task_failed", task=task.get_name(), exc_info=error)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # gRPC's poller tries a read that may find nothing when several loops share it: not an error.
        if not isinstance(context.get("exception"), BlockingIOError):
            self._log.error(
                "control_loop_error",
                message=context.get("message"),
                exc_info=context.get("exception"),
            )


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of descriptors to its hard one; returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _most_descriptors() if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a sandbox refuses: the limit stays what it was
        return soft
    return wanted


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many peers an engine keeps each way, how many more may wait for room, and what limits them."""

    peers: int
    waiting: int
    limit: str


def capacity(limit: int, maximum: int) -> Capacity:
    """What fits under `limit` descriptors (at EMFILE gRPC accepts nobody), with at most `maximum` peers."""
    left = limit - _RESERVED_DESCRIPTORS
    waiting = max(1, min(_MOST_WAITING, left // _WAITING_SHARE))
    fitting = max(1, (left - waiting) // _DESCRIPTORS_PER_PEER)
    if maximum <= fitting:
        return Capacity(maximum, waiting, "peers.max")
    return Capacity(fitting, waiting, f"the limit of {limit} descriptors")


def _most_descriptors() -> int:
    with open("/proc/sys/fs/nr_open") as file:
        return int(file.read())


def _after_fork_in_child() -> None:
    global _forked, _lock
    _forked = _forked or _started
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
