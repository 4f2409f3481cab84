"""The one thread that stands for this process: peers name it to the kernel, and it sees processes end.

process_vm_readv(2) takes a thread id as well as a process id. exec ends every thread but the one that calls
it, before it replaces the address space, and that one gets the id of the main thread. So a call that names
the keeper, which is not the main thread and never calls exec, finds the old address space or nobody (ESRCH),
whereas one that names the process can find the new program: no check before the call closes that gap.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import Any

from tent_core.errors import TransportUnavailable
from tent_shm.page import IdentityPage

START_TIMEOUT_S = 5.0


class Keeper:
    """Claims the identity page, and watches pidfds. Thread-safe."""

    def __init__(self, page: IdentityPage, log: Any) -> None:
        self._page = page
        self._log = log
        self._lock = threading.Lock()
        self._watched: dict[int, Callable[[], None]] = {}
        self._epoll = select.epoll()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._stop, select.EPOLLIN)
        self._ready = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="tent-shm-keeper", daemon=True)

    def start(self) -> int:
        """Start the thread and answer its id, which peers use. Raises TransportUnavailable."""
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT_S):
            raise TransportUnavailable(f"a thread did not start within {START_TIMEOUT_S:g} s")
        if self._failure is not None:
            raise TransportUnavailable(f"this system has no robust futexes: {self._failure}")
        assert self._thread.native_id is not None
        return self._thread.native_id

    def watch(self, pidfd: int, ended: Callable[[], None]) -> None:
        """Call `ended` once, in the keeper's thread, when `pidfd` becomes readable. It must not block."""
        with self._lock:
            self._epoll.register(pidfd, select.EPOLLIN)
            self._watched[pidfd] = ended

    def unwatch(self, pidfd: int) -> None:
        """Stop watching; the caller may close the descriptor then."""
        with self._lock:
            if self._watched.pop(pidfd, None) is not None:
                self._epoll.unregister(pidfd)

    def stop(self, timeout: float) -> bool:
        """End the thread; whether it has ended within `timeout` seconds. Then everything is given back."""
        if self._thread.is_alive():
            os.eventfd_write(self._stop, 1)
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
        self._epoll.close()
        os.close(self._stop)
        return True

    def _run(self) -> None:
        try:
            self._page.claim()
        except (OSError, NotImplementedError) as error:
            self._failure = error
        self._ready.set()
        while self._failure is None:
            for descriptor, _ in self._epoll.poll():
                if descriptor == self._stop:
                    self._page.disclaim()
                    return
                self._ended(descriptor)

    def _ended(self, pidfd: int) -> None:
        with self._lock:
            # The event may be of a descriptor that was closed since, and whose number another has now.
            if pidfd not in self._watched or not _readable(pidfd):
                return
            ended = self._watched.pop(pidfd)
            self._epoll.unregister(pidfd)
        try:
            ended()
        except Exception as error:  # the thread stands for this process: nothing may end it
            self._log.error("shm_departure_not_handled", error=repr(error))


def _readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
