"""The document in which a running engine tells of itself and its peers, and who gathers it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from tent_core.control.contract import INSPECT_LIMIT
from tent_core.errors import ClosedError
from tent_core.serial import SerialQueue


def document(
    facts: Mapping[str, Any], peers: Iterable[Mapping[str, Any]], most: int = INSPECT_LIMIT
) -> bytes:
    """JSON of `facts`, with `peers`: as many of them as fit into `most` bytes, and how many are left out."""
    rows = list(peers)
    left = most - len(_json({**facts, "peers": [], "peers_left_out": len(rows)}))
    fitting = 0
    for row in rows:
        left -= len(_json(row)) + len(", ")
        if left < 0:
            break
        fitting += 1
    return _json({**facts, "peers": rows[:fitting], "peers_left_out": len(rows) - fitting})


def _json(value: object) -> bytes:
    # Transports say what they hold in words of their own: what is no JSON is shown as text.
    return json.dumps(value, default=str).encode()


class Inspector:
    """Gathers in a thread of its own, once for all who ask meanwhile: many cost little. Thread-safe."""

    def __init__(self, gather: Callable[[], bytes]) -> None:
        self._gather = gather
        self._queue = SerialQueue("tent-inspect")
        self._lock = threading.Lock()
        self._current: Future[bytes] | None = None

    def ask(self) -> Future[bytes]:
        """The document, soon; a future of the caller's own."""
        answer: Future[bytes] = Future()
        with self._lock:
            current = self._current
            if current is None or current.done():
                try:
                    current = self._current = self._queue.submit(self._gather)
                except ClosedError as error:
                    answer.set_exception(error)
                    return answer
        current.add_done_callback(lambda done: _hand_on(done, answer))
        return answer

    def close(self, timeout: float = 0.1) -> None:
        """Gather no more."""
        self._queue.close(timeout)


def _hand_on(done: Future[bytes], answer: Future[bytes]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    error = done.exception()
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(done.result())
