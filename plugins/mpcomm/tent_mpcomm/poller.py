"""The thread that finds the end of transfers for which nobody waits: one for an engine."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

from tent_mpcomm.transfers import Posting

_FIRST_PAUSE_S = 20e-6


class Pace:
    """How long to pause before looking again: not at all for a while, then longer each time to a bound."""

    __slots__ = ("_longest", "_pause", "_spin", "_until")

    def __init__(self, spin_s: float, longest_s: float) -> None:
        self._spin, self._longest = spin_s, longest_s
        self.moved()

    def moved(self) -> None:
        """Something has ended, so that more may soon."""
        self._until = time.monotonic() + self._spin
        self._pause = min(_FIRST_PAUSE_S, self._longest)

    def next(self) -> float:
        """Seconds to pause; 0 lets others run and goes on."""
        if time.monotonic() < self._until:
            return 0.0
        pause, self._pause = self._pause, min(2 * self._pause, self._longest)
        return pause


class Poller:
    """Drives postings in turn, each by a bounded step, and sleeps while there are none."""

    def __init__(self, spin_s: float, longest_s: float, log: Any) -> None:
        self._spin, self._longest = spin_s, longest_s
        self._log = log
        self._arrivals: queue.SimpleQueue[Posting | None] = queue.SimpleQueue()
        self._postings: list[Posting] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tent-mpcomm-poller", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def add(self, posting: Posting) -> None:
        """Drive it from now on; nobody else does. From any thread."""
        self._arrivals.put(posting)

    def wake(self) -> None:
        """Look now: some were given up."""
        self._arrivals.put(None)

    def stop(self, timeout: float) -> list[Posting] | None:
        """End the thread, and answer what it still drove; None if it did not end in time."""
        self._stopping = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return None
        while not self._arrivals.empty():
            if (posting := self._arrivals.get()) is not None:
                self._postings.append(posting)
        return self._postings

    def _run(self) -> None:
        pace = Pace(self._spin, self._longest)
        while not self._stopping:
            moved = False
            for posting in self._postings:
                try:
                    moved = posting.step() or moved
                except Exception as error:  # of a callback of ours or of the application
                    self._log.error("mpcomm_poller_raised", error=repr(error))
                    moved = True  # it may be over
            if moved:
                self._postings = [p for p in self._postings if not p.over]
                pace.moved()
            self._take(None if not self._postings else 0.0 if moved else pace.next())

    def _take(self, timeout: float | None) -> None:
        """Take what has arrived; if nothing has, wait for it so long (None: until something does)."""
        try:
            if timeout == 0.0:
                time.sleep(0)
                arrived = self._arrivals.get_nowait()
            else:
                arrived = self._arrivals.get(timeout=timeout)
            while True:
                if arrived is not None:
                    self._postings.append(arrived)
                arrived = self._arrivals.get_nowait()
        except queue.Empty:
            return
