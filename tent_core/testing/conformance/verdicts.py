"""What a failing test of the suite says: not only that bytes differ, but what the transport did wrong."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

LATE_S = 1.0
"""So long is waited, when bytes are missing, to see whether they come after the report."""

Bytes = NDArray[np.uint8]


def assert_arrived(memory: Bytes, before: Bytes, expected: Bytes, what: str) -> None:
    """`memory` holds what is `expected` of it, after a transfer was reported as completed.

    `before` is what it held before, so that bytes which nobody asked for can be told from those that did not
    arrive. Raises AssertionError that names the fault.
    """
    found = memory.copy()
    if np.array_equal(found, expected):
        return
    wrong = np.flatnonzero(found != expected)
    stray = wrong[expected[wrong] == before[wrong]]
    if 2 * len(stray) > len(wrong):  # of random bytes, some are by chance as they were
        wanted = np.flatnonzero(expected != before)
        where = "past the end of" if len(wanted) and stray[0] > wanted[-1] else "outside"
        raise AssertionError(
            f"{what}: {len(stray)} bytes were written {where} what was asked for, the first at offset "
            f"{stray[0]} of {len(found)}"
        )
    until = time.monotonic() + LATE_S
    while time.monotonic() < until:
        if np.array_equal(memory, expected):
            raise AssertionError(
                f"{what}: it was acknowledged before its bytes were there: {len(wrong)} of them came later"
            )
        time.sleep(0.01)
    raise AssertionError(
        f"{what}: {len(wrong)} bytes are wrong or did not arrive, the first at offset {wrong[0]} of "
        f"{len(found)}, although the transfer was reported as completed"
    )


def assert_untouched(memory: Bytes, expected: Bytes, what: str) -> None:
    """`memory` is as it was. Raises AssertionError that begins with `what` has happened otherwise."""
    wrong = np.flatnonzero(memory != expected)
    if len(wrong):
        raise AssertionError(f"{what}: {len(wrong)} bytes changed, the first at offset {wrong[0]}")


@contextmanager
def must_fail(
    errors: type[BaseException] | tuple[type[BaseException], ...],
    otherwise: str,
    match: str | None = None,
) -> Iterator[None]:
    """The block raises one of `errors`. AssertionError `otherwise` if nothing is raised."""
    try:
        yield
    except errors as error:
        if match is not None and not re.search(match, str(error)):
            raise AssertionError(f"{error!r} does not name {match!r}") from error
    else:
        raise AssertionError(f"{otherwise}: nothing was raised")
