"""Tells when processes on this machine end, within milliseconds and without asking them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from tent_core import host
from tent_core.descriptor import HostIdentity

POLL_S = 0.25
"""How often a process is looked at that cannot be watched by a descriptor."""


@dataclass(eq=False)
class _Watched:
    descriptor: int | None
    callbacks: list[Callable[[], None]] = field(default_factory=list)


class ProcessWatcher:
    """Watches processes for all engines of this process, one descriptor each. For the control thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._watched: dict[HostIdentity, _Watched] = {}
        self._poll: asyncio.TimerHandle | None = None

    def watch(self, process: HostIdentity, ended: Callable[[], None]) -> Callable[[], None]:
        """Call `ended()` once, on the control thread, when `process` ends; at once, soon, if it has.

        Returns a function that ends the watching. A process whose pid means nothing here is not watched,
        nor is this one.
        """
        if process == host.identify() or not host.same_pids(host.identify(), process):
            return lambda: None
        watched = self._watched.get(process)
        if watched is None:
            try:
                descriptor = host.open_process(process)
            except ProcessLookupError:
                handle = self._loop.call_soon(ended)
                return handle.cancel
            except OSError:
                descriptor = None  # out of descriptors: looked at now and then instead
            watched = self._watched[process] = _Watched(descriptor)
            if descriptor is None:
                self._poll_later()
            else:
                self._loop.add_reader(descriptor, self._ended, process)
        watched.callbacks.append(ended)

        def end() -> None:
            if ended in watched.callbacks:
                watched.callbacks.remove(ended)
                if not watched.callbacks:
                    self._drop(process, watched)

        return end

    def close(self) -> None:
        """Stop watching everything."""
        for process, watched in list(self._watched.items()):
            self._drop(process, watched)
        if self._poll is not None:
            self._poll.cancel()
            self._poll = None

    def _ended(self, process: HostIdentity) -> None:
        watched = self._watched.get(process)
        if watched is None:
            return
        callbacks = tuple(watched.callbacks)
        watched.callbacks.clear()
        self._drop(process, watched)
        for callback in callbacks:
            callback()

    def _drop(self, process: HostIdentity, watched: _Watched) -> None:
        if self._watched.get(process) is watched:
            del self._watched[process]
        if watched.descriptor is not None:
            self._loop.remove_reader(watched.descriptor)
            os.close(watched.descriptor)
            watched.descriptor = None

    def _poll_later(self) -> None:
        if self._poll is None:
            self._poll = self._loop.call_later(POLL_S, self._look)

    def _look(self) -> None:
        self._poll = None
        polled = [p for p, w in self._watched.items() if w.descriptor is None]
        for process in polled:
            if host.has_ended(process):
                self._ended(process)
        if any(w.descriptor is None for w in self._watched.values()):
            self._poll_later()
