"""Threads that compute are noticed, and that they have ended as well."""

from __future__ import annotations

import threading

from tent_core.gil import GilWatch
from tent_core.testing import wait_until


def test_a_thread_that_computes_is_noticed_and_its_end_as_well() -> None:
    watch = GilWatch()
    wait_until(lambda: not watch.contended())
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    wait_until(watch.contended)
    stop.set()
    thread.join()
    wait_until(lambda: not watch.contended())
