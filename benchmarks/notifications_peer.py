"""What the processes of `notifications.py` do: one takes notifications, the others send them."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import numpy as np

import tent_core as tent

BLOCK = 4096
SLOTS = 16
PATIENCE_S = 120.0


class Receiver:
    """Writes down every notification as the application gets it."""

    def __init__(self, engine: tent.Engine, senders: int) -> None:
        self._engine = engine
        self.taken: list[list[tuple[int, str, bool, bool]]] = [[] for _ in range(senders)]
        """Per sender: sequence number, name, whether it is well, whether its data was verified."""
        self.buffers = [
            engine.allocate(SLOTS * BLOCK, name=f"of-{number}") for number in range(senders)
        ]
        self.at: float | None = None
        threading.Thread(target=self._take, daemon=True).start()

    def count(self) -> int:
        """How many have been taken."""
        return sum(map(len, self.taken))

    def _take(self) -> None:
        for note in self._engine.notifications():
            self.taken[note.payload[0]].append((note.sequence, note.name, note.ok, note.verified))
            self.at = time.monotonic()


class Sender:
    """Sends plain notifications one after the other, and batches that notify, several at a time."""

    def __init__(self, engine: tent.Engine, owner: str, number: int) -> None:
        self._payload = bytes([number])
        self._segment = engine.open_segment(owner, timeout=PATIENCE_S)
        self._remote = self._segment.buffer(f"of-{number}")
        self._source = engine.allocate(SLOTS * BLOCK)
        self.ended: list[str] = []
        """Names of the batches that ended well, in that order."""
        self.failed: list[str] = []
        """Names of batches whose data could not be moved, once for each time: they were sent again."""
        self.plain = 0
        self.errors: list[str] = []
        self._threads: list[threading.Thread] = []

    def start(self, plain: int, batches: int) -> None:
        """Send so many of each."""
        for work, count in ((self._plain, plain), (self._batches, batches)):
            thread = threading.Thread(target=self._guarded, args=(work, count), daemon=True)
            thread.start()
            self._threads.append(thread)

    def busy(self) -> bool:
        """Whether it has not sent all yet."""
        return any(thread.is_alive() for thread in self._threads)

    def report(self) -> dict[str, Any]:
        """What was sent, as the sender knows it."""
        return {
            "plain": self.plain,
            "ended": self.ended,
            "failed": self.failed,
            "errors": self.errors,
        }

    def _guarded(self, work: Any, count: int) -> None:
        try:
            work(count)
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    def _plain(self, count: int) -> None:
        for i in range(count):
            self._segment.notify(f"p{i}", self._payload, timeout=PATIENCE_S)
            self.plain += 1

    def _batches(self, count: int) -> None:
        slots = deque(range(SLOTS))
        waiting = deque(range(count))
        again: deque[tuple[int, int]] = deque()
        """Whose data failed: late bytes of them do no harm as long as they stay in their slot."""
        under_way: deque[tuple[int, int, tent.Batch]] = deque()
        while waiting or again or under_way:
            while again or (slots and waiting):
                number, slot = again.popleft() if again else (waiting.popleft(), slots.popleft())
                under_way.append((number, slot, self._submit(number, slot)))
            number, slot, batch = under_way.popleft()
            batch.wait(PATIENCE_S, check=False)
            if batch.notify_error is not None:
                raise batch.notify_error
            if (batch.status == tent.Status.COMPLETED).all():
                slots.append(slot)
            else:
                again.append((number, slot))

    def _submit(self, number: int, slot: int) -> tent.Batch:
        offset = slot * BLOCK
        self._source.array[offset : offset + BLOCK] = np.frombuffer(
            number.to_bytes(8, "little") * (BLOCK // 8), np.uint8
        )
        name = f"b{number}"
        batch = self._segment.submit(
            "write",
            self._source,
            [offset],
            self._remote,
            [offset],
            BLOCK,
            notify=(name, self._payload),
            integrity="crc32c",
            timeout=PATIENCE_S,
        )

        def ended(batch: tent.Batch) -> None:
            well = (batch.status == tent.Status.COMPLETED).all()
            (self.ended if well else self.failed).append(name)

        batch.add_done_callback(ended)
        return batch
