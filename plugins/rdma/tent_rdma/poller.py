"""Threads that sleep until a device has something to say, and take it."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tent_rdma.nic import Nic
from tent_rdma.verbs import VerbsError


class Poller:
    """One thread for some NICs: completions, and events of the devices. `start` and `stop` once each."""

    def __init__(
        self, name: str, nics: Sequence[Nic], spin: float, broken: Callable[[Nic], None], log: Any
    ) -> None:
        """`spin`: seconds for which it looks for more before it sleeps; `broken(nic)`: its queue is lost."""
        self._nics = nics
        self._spin = spin
        self._broken = broken
        self._log = log
        self._stopping = False
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
        os.close(self._wake)
        return True

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        completions = {nic.channel.fileno(): nic for nic in self._nics}
        events = {nic.device.fileno(): nic for nic in self._nics}
        for fd in (*completions, *events):
            poll.register(fd, select.POLLIN)
        while not self._stopping:
            for fd, _ in poll.poll():
                nic = completions.get(fd) or events.get(fd)
                if nic is None:
                    continue  # woken to stop
                try:
                    if fd in completions:
                        nic.woken()
                        self._work_off(nic)
                    else:
                        event = nic.take_event()
                        self._log.info("rdma_event", nic=nic.name, event=event.value)
                except VerbsError as error:
                    self._log.error("rdma_device_failed", nic=nic.name, error=str(error))
                    poll.unregister(fd)  # or it would be readable for ever
                    self._broken(nic)

    def _work_off(self, nic: Nic) -> None:
        """Take completions until none came for a while, then have the next one wake this thread."""
        until = time.monotonic() + self._spin
        while not self._stopping:
            if nic.reap():
                until = time.monotonic() + self._spin
            elif time.monotonic() >= until:
                break
        if nic.busy:
            nic.arm()
