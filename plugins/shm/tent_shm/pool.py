"""The threads that copy when the submitting one may not wait, or when several are faster than one."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

Job = Callable[[], None]


class Pool:
    """A fixed number of threads with one queue. A job looks after its own errors."""

    def __init__(self, threads: int, log: Any) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._log = log
        self._threads = [
            threading.Thread(target=self._run, name=f"tent-shm-copy-{i}", daemon=True)
            for i in range(threads)
        ]

    def __len__(self) -> int:
        return len(self._threads)

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Let some thread do `job`, after those before it."""
        self._jobs.put(job)

    def stop(self, timeout: float) -> bool:
        """End the threads after what is queued; whether all have ended within `timeout` seconds."""
        started = [thread for thread in self._threads if thread.is_alive()]
        for _ in started:
            self._jobs.put(None)
        deadline = time.monotonic() + timeout
        for thread in started:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in started)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                self._log.error("shm_copy_raised", error=repr(error))
            del job  # or an idle thread would keep alive what its last job held
