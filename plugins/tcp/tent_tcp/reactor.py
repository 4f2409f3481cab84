"""One thread that waits for many descriptors, and runs what others hand to it."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

TICK_S = 0.1

Handler = Callable[[int], None]
"""Called in the reactor's thread with the epoll events of its descriptor. It must not block."""


class Reactor:
    """An epoll loop in a thread of its own. `call` and `stop` are for any thread, the rest for handlers.

    A handler that raises is logged and its descriptor is watched no more.
    """

    def __init__(self, name: str, log: Any) -> None:
        self.name = name
        self._log = log
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._handlers: dict[int, Handler] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._tickers: list[Callable[[float], bool]] = []
        self._stopping = False
        self._started = threading.Event()
        self._lock = threading.Lock()  # that nothing wakes a descriptor that was closed
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> int:
        """Start the thread; its kernel id."""
        self._thread.start()
        self._started.wait()
        task = self._thread.native_id
        assert task is not None
        return task

    def call(self, function: Callable[[], None]) -> bool:
        """Run `function` in the reactor's thread, in the order of the calls. False: it has stopped."""
        with self._lock:
            if self._stopping:
                return False
            self._calls.append(function)
            os.eventfd_write(self._wake, 1)
        return True

    def watch(self, descriptor: int, events: int, handler: Handler) -> None:
        """Call `handler` when any of `events` is ready, or change what an earlier call said."""
        if descriptor in self._handlers:
            self._epoll.modify(descriptor, events)
        else:
            self._epoll.register(descriptor, events)
        self._handlers[descriptor] = handler

    def forget(self, descriptor: int) -> None:
        """Watch it no more; before it is closed."""
        if self._handlers.pop(descriptor, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(descriptor)

    def every_tick(self, ticker: Callable[[float], bool]) -> None:
        """Call `ticker(now)` ten times a second, for as long as it answers True."""
        self._tickers.append(ticker)

    def stop(self, timeout: float) -> bool:
        """Run what was handed over, then end the thread; whether it ended within `timeout` seconds.

        From the thread itself it only begins the end, and answers True. Idempotent.
        """
        with self._lock:
            if not self._stopping:
                self._stopping = True
                os.eventfd_write(self._wake, 1)
        if self._thread.ident is None:
            self._close()  # it never ran
        elif threading.current_thread() is not self._thread:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def _close(self) -> None:
        with self._lock:
            self._stopping = True
            if self._wake >= 0:
                self._epoll.close()
                os.close(self._wake)
                self._wake = -1

    def _run(self) -> None:
        self._started.set()
        try:
            self._loop()
        finally:
            self._close()

    def _loop(self) -> None:
        next_tick = 0.0
        while True:
            events = self._epoll.poll(TICK_S if self._tickers else -1)
            for descriptor, ready in events:
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                    continue
                handler = self._handlers.get(descriptor)
                if handler is not None:
                    try:
                        handler(ready)
                    except Exception as error:
                        self._log.error("tcp_handler_raised", error=repr(error), exc_info=True)
                        self.forget(descriptor)
            stopping = self._stopping
            while self._calls:
                self._guarded(self._calls.popleft())
            now = time.monotonic()
            if self._tickers and now >= next_tick:
                next_tick = now + TICK_S
                self._tickers = [t for t in self._tickers if self._ticks(t, now)]
            if stopping:
                return

    def _guarded(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            self._log.error("tcp_call_raised", error=repr(error), exc_info=True)

    def _ticks(self, ticker: Callable[[float], bool], now: float) -> bool:
        try:
            return ticker(now)
        except Exception as error:
            self._log.error("tcp_ticker_raised", error=repr(error), exc_info=True)
            return False
