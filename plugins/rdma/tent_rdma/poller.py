"""Threads that sleep until a device has something to say, and take it."""

from __future__ import annotations

import errno
import math
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tent_rdma.nic import Nic
from tent_rdma.notice_queue import NoticeQueue
from tent_rdma.verbs import VerbsError

ROUNDS = 16
"""How often completions are looked for before descriptors are looked at again."""

LONGEST_S = 3600.0
"""For which it sleeps at a time where a call is due."""


class Poller:
    """One thread for some NICs: completions, events of the devices, and calls at their time.

    `start` and `stop` once each; `at`, `watch` and `forget` from any thread.
    """

    def __init__(self, name: str, nics: Sequence[Nic], spin: float, log: Any) -> None:
        """`spin`: seconds for which it looks for more before it sleeps."""
        self._nics = nics
        self._spin = spin
        self._log = log
        self._stopping = False
        self._lock = threading.Lock()
        self._watched: dict[int, NoticeQueue] = {}
        """By descriptor; changed by `watch`, and otherwise in the thread alone."""
        self._epoll = select.epoll()
        self._calls: dict[object, tuple[float, Callable[[], None]]] = {}
        self._wakes = math.inf
        """When it wakes by itself."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """End the thread; whether it has ended in time. Closes its descriptor then."""
        self._stopping = True
        if self._thread.ident is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
        with self._lock:
            os.close(self._wake)
            self._wake = -1
        for queue in list(self._watched.values()):
            self._guarded(partial(self._drop, queue))
        self._epoll.close()
        return True

    def watch(self, queue: NoticeQueue) -> None:
        """Call `queue.woken()` in the thread whenever it is readable, until `forget`."""
        self._watched[queue.fileno()] = queue
        self._epoll.register(queue.fileno(), select.EPOLLIN)

    def forget(self, queue: NoticeQueue) -> None:
        """Watch it no more, then close it: in the thread, which may be using it, or when that has ended."""
        self.at(queue, 0.0, partial(self._drop, queue))

    def _drop(self, queue: NoticeQueue) -> None:
        if self._watched.pop(queue.fileno(), None) is queue:
            self._epoll.unregister(queue.fileno())
            queue.close()

    def at(self, owner: object, when: float, call: Callable[[], None]) -> None:
        """Make a call in the thread once time.monotonic() is `when`; never if that is infinite. Of each owner
        the last one counts."""
        with self._lock:
            self._calls.pop(owner, None)
            if when < math.inf:
                self._calls[owner] = (when, call)
                if when < self._wakes and self._wake >= 0:
                    os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        poll = self._epoll
        poll.register(self._wake, select.EPOLLIN)
        completions = {nic.channel.fileno(): nic for nic in self._nics}
        events = {nic.device.fileno(): nic for nic in self._nics}
        for fd in (*completions, *events):
            poll.register(fd, select.EPOLLIN)
        awake: set[Nic] = set()
        until = 0.0
        while not self._stopping:
            for fd, _ in poll.poll(0 if awake else self._sleep()):
                try:
                    if fd in completions:
                        completions[fd].woken()
                        awake.add(completions[fd])
                        until = time.monotonic() + self._spin
                    elif fd in events:
                        nic = events[fd]
                        event = nic.take_event()
                        self._log.info("rdma_event", nic=nic.name, what=event.value)
                        self._guarded(partial(nic.tell, event))
                    elif fd in self._watched:
                        self._guarded(self._watched[fd].woken)
                    elif fd == self._wake:
                        os.eventfd_read(fd)
                except VerbsError as error:
                    if error.errno == errno.EAGAIN:
                        continue  # it was nothing after all
                    poll.unregister(fd)  # or it would be readable for ever
                    nic = completions.get(fd) or events[fd]
                    self._guarded(partial(nic.lost, error))
            self._make_calls()
            if awake and not self._look(awake):
                if time.monotonic() < until:
                    continue
                for nic in awake:
                    if nic.busy:
                        self._guarded(nic.arm)
                awake.clear()
            elif awake:
                until = time.monotonic() + self._spin

    def _look(self, awake: set[Nic]) -> bool:
        """Take completions of NICs in turn; whether there may be more."""
        for _ in range(ROUNDS):
            found = [nic for nic in awake if self._guarded(nic.reap)]
            if not found:
                return False
        return True

    def _sleep(self) -> float | None:
        """Seconds until the next call is due."""
        with self._lock:
            self._wakes = min((when for when, _ in self._calls.values()), default=math.inf)
            if self._wakes == math.inf:
                return None
            return min(max(self._wakes - time.monotonic(), 0), LONGEST_S)

    def _make_calls(self) -> None:
        if self._calls:
            now = time.monotonic()
            with self._lock:
                self._wakes = -math.inf  # it will look again before it sleeps
                due = [owner for owner, (when, _) in self._calls.items() if when <= now]
                calls = [self._calls.pop(owner)[1] for owner in due]
            for call in calls:
                self._guarded(call)

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """Make a call that ends in code of others: whatever is wrong there, this thread serves all peers."""
        try:
            return call()
        except Exception as error:
            self._log.error("rdma_poller_failed", error=repr(error))
            return None
