"""The runtime pushed on step by step: time that stands still until a test moves it, and queues without a
thread. Where everything else is done in the test's thread too, a run is the same each time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from tent_core.alarm import Alarm
from tent_core.dispatch import Drive
from tent_core.serial import SerialQueue


class StepAlarm(Alarm):
    """Time that `advance` moves; its calls are made in the thread that does, those of one time in the order
    in which they were asked for.

    It is also the clock of mock transports that are declared with it. `start` is the first time; sums of
    multiples of 1/1024 s are exact, so that what is to happen at the same time does.
    """

    def __init__(self, start: float = 1024.0) -> None:
        super().__init__("tent-steps")
        self._time = start
        self.now = lambda: self._time

    def _start(self) -> None:
        """No thread."""

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Make `call` in `seconds`, for mock transports."""
        self.at(self._time + seconds, call)

    def stop(self) -> None:
        """Nothing: others live on this time too."""

    def advance(self, seconds: float) -> None:
        """Let time pass, and make the calls that fall due."""
        until = self._time + seconds
        while (entry := self._next_until(until)) is not None:
            entry()

    def _next_until(self, until: float) -> Callable[[], None] | None:
        with self._changed:
            while self._heap and self._heap[0][0] <= until:
                when, _, handle = heapq.heappop(self._heap)
                if handle.call is not None:
                    self._time = max(self._time, when)
                    return handle.call
            self._time = max(self._time, until)
            return None


class StepQueue(SerialQueue):
    """Calls wait until a test makes them with `help`. Those that are left are made by `close`."""

    def _start(self) -> None:
        """No thread."""

    def run(self, most: int | None = None) -> int:
        """Make the calls that wait, and those that they queue, up to `most`; answers how many there were."""
        made = 0
        while (most is None or made < most) and self.help():
            made += 1
        return made

    def close(self, timeout: float) -> bool:
        """Make what is left, and take no more."""
        super().close(timeout)
        self.run()
        return True


def steps(start: float = 1024.0) -> tuple[Drive, StepAlarm, StepQueue]:
    """A drive that only moves when told to, its alarm, and its queue of what has to be carried on.

    What may wait (a peer that is woken, resources that others let go of) keeps its thread.
    """
    alarm, progress = StepAlarm(start), StepQueue("tent-progress")
    return Drive(alarm, progress, SerialQueue("tent-patient")), alarm, progress
