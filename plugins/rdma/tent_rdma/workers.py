"""Threads for what waits: for a peer, for a queue pair to drain, for a verb that may be stuck."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

IDLE_S = 10.0
"""After which a thread without work ends."""

Call = Callable[[], None]


class Workers:
    """Some threads, made when there is work for them. Thread-safe; its lock is a leaf.

    They are daemons: those of an executor are waited for at the end of the interpreter, however long a call
    of theirs is stuck.
    """

    def __init__(self, name: str, most: int, log: Any) -> None:
        """`most`: threads at the same time."""
        self._name = name
        self._most = most
        self._log = log
        self._changed = threading.Condition()
        self._calls: deque[Call] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._stopped = False

    def submit(self, call: Call) -> bool:
        """Have a thread make a call; False once they are stopped. What it raises is logged."""
        with self._changed:
            if self._stopped:
                return False
            self._calls.append(call)
            if len(self._calls) > self._idle and len(self._threads) < self._most:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.add(thread)
                try:
                    thread.start()
                except (
                    RuntimeError
                ):  # no more threads to be had: those that are there will come to it
                    self._threads.discard(thread)
                    if not self._threads:
                        self._calls.pop()
                        return False
            else:
                self._changed.notify()
        return True

    def stop(self, timeout: float) -> bool:
        """Drop what has not begun and end the threads; whether all have ended within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._stopped = True
            self._calls.clear()
            threads = list(self._threads)
            self._changed.notify_all()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in threads)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._calls or self._stopped, IDLE_S)
                self._idle -= 1
                if self._stopped or not self._calls:
                    self._threads.discard(threading.current_thread())
                    return
                call = self._calls.popleft()
            try:
                call()
            except Exception as error:
                self._log.error("rdma_worker_failed", error=repr(error))


def within(seconds: float, name: str, call: Call) -> bool:
    """Make a call that a verb may hold up; whether it has ended in time. It goes on if it has not.

    Whatever it raises is raised here, if it is in time.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(max(seconds, 0))
    if thread.is_alive():
        return False
    if raised:
        raise raised[0]
    return True
