"""Polling with a deadline, for what a test cannot be told of."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], timeout: float = 10.0, what: str = "", interval: float = 0.002
) -> T:
    """The first true answer of `condition`. AssertionError, with the last answer, after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(
                f"not within {timeout:g} s: {what or 'the condition'}; it last was {answer!r}"
            )
        time.sleep(interval)
    return answer
