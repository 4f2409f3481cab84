"""Threads that compute are noticed, and that they have ended as well."""

from __future__ import annotations

from tent_core.gil import GilWatch
from tent_core.testing import wait_until
from tent_core.testing.computing import computing


def test_a_thread_that_computes_is_noticed_and_its_end_as_well() -> None:
    watch = GilWatch()
    wait_until(lambda: not watch.contended())
    with computing():
        wait_until(watch.contended)
    wait_until(lambda: not watch.contended())
