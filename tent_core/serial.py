"""One daemon thread that makes calls in order: a plugin that is stuck in one harms only itself."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from tent_core.errors import ClosedError

T = TypeVar("T")
_Job = Callable[[], None]


class SerialQueue:
    """Calls run one at a time, in the order of `submit`, in one thread that starts with the first.

    The thread is a daemon: a call that never returns cannot hold up the end of the process. Thread-safe.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._busy_since: float | None = None

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call; its outcome comes by the future. Raises ClosedError after `close`."""
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._name} has been stopped and takes no more calls")
            if self._thread is None:
                self._start()
            self._jobs.put(job)
        return future

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def help(self) -> bool:
        """Make the oldest call that waits, in the calling thread; False if none does. Such a call may overlap
        with the thread's own: only for a queue whose calls do not mind."""
        try:
            job = self._jobs.get_nowait()
        except queue.Empty:
            return False
        if job is None:
            self._jobs.put(None)  # the end is the thread's own
            return False
        job()
        return True

    @property
    def inside(self) -> bool:
        """Whether the calling thread is the one that runs the calls."""
        return threading.current_thread() is self._thread

    def busy_for(self) -> float:
        """Seconds that the present call has been running; 0 when idle."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self, timeout: float) -> bool:
        """Take no more calls, end after those that are queued; False if that took longer than `timeout`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
            thread = self._thread
        if thread is None or self.inside:
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._busy_since = time.monotonic()
            job()
            self._busy_since = None
