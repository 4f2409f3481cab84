"""What the system tests share: configurations, how often to repeat, programs for other processes."""

from __future__ import annotations

import os
import time
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tent_core.testing import Held, holding, wait_until

FULL = os.environ.get("TENT_TEST_FULL") == "1"
PATTERN = 0xEE
"""What an owner fills its memory with after it took it back; no peer in these tests ever writes this byte."""

Bytes = NDArray[np.uint8]
N = TypeVar("N", int, float)


def often(normally: N, full: N) -> N:
    """How many rounds, or seconds: `full` with TENT_TEST_FULL=1."""
    return full if FULL else normally


def only(*transports: str, **sections: Any) -> dict[str, Any]:
    """A configuration with these transports and no other, in this order of preference."""
    return {
        "transports": {name: {"enable": True} for name in transports},
        "policy": [{"name": "-".join(transports), "transports": list(transports)}],
        "log": {"level": "error"},
        **sections,
    }


def program(name: str) -> str:
    """The source of `programs/NAME.py`, for `PeerProcess.run`."""
    return program_path(name).read_text()


def program_path(name: str) -> Path:
    """The file `programs/NAME.py`."""
    return Path(__file__).with_name("programs") / f"{name}.py"


def changed_bytes(memory: Bytes, seconds: float) -> int:
    """Fill `memory` with PATTERN and look at it for `seconds`: how many bytes anybody changed meanwhile."""
    memory[:] = PATTERN
    end = time.monotonic() + seconds
    while True:
        changed = int(np.count_nonzero(memory != PATTERN))
        if changed or time.monotonic() > end:
            return changed


def held_by_family() -> Held:
    """What this process and its children (such as the receivers of tcp) hold together, but for gRPC's pool of
    threads, which grows and shrinks with load."""
    own = holding()
    everybody = [own, *map(holding, own.children)]

    def together(field: str) -> tuple[Any, ...]:
        found = chain.from_iterable(getattr(held, field) for held in everybody)
        return tuple(sorted(thing for thing in found if thing != "event_engine"))

    return Held(**{field.name: together(field.name) for field in fields(Held)})


def soon_no_more_than(before: Held, timeout: float = 10.0) -> None:
    """Wait until nothing is held beyond `before`, but for threads that an engine makes once, when it first
    needs them; AssertionError with what still is."""
    beyond: list[str] = []

    def released() -> bool:
        now = held_by_family()
        once = {f"threads: {t}" for t in now.threads if now.threads.count(t) == 1}
        beyond[:] = [thing for thing in now.beyond(before) if thing not in once]
        return not beyond

    try:
        wait_until(released, timeout)
    except AssertionError:
        raise AssertionError("still held: " + "; ".join(beyond)) from None
