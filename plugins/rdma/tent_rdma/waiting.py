"""Transfers that are still to be posted, so that one that cannot be keeps up only those of its kind."""

from __future__ import annotations

import math
from collections import deque

from tent_rdma.transfer import Transfer

Kind = tuple[str, tuple[str, ...], frozenset[int]]
"""What decides which rails a transfer may use: pool, devices, rails that have failed it."""


class Waiting:
    """A queue for each kind; the kinds take turns. Not thread-safe: its owner has a lock."""

    def __init__(self) -> None:
        self._queues: dict[Kind, deque[Transfer]] = {}
        self._kinds: dict[Transfer, Kind] = {}

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def __contains__(self, transfer: Transfer) -> bool:
        return transfer in self._kinds

    def add(self, transfer: Transfer) -> None:
        """Behind all of its kind."""
        self._queue_for(transfer).append(transfer)

    def add_first(self, transfer: Transfer) -> None:
        """Before all of its kind; one that waits already comes to the front."""
        if transfer in self._kinds:
            self.discard(transfer)
        self._queue_for(transfer).appendleft(transfer)

    def heads(self) -> list[Transfer]:
        """The first of each kind, those whose turn it is first."""
        return [queue[0] for queue in self._queues.values()]

    def is_head(self, transfer: Transfer) -> bool:
        """Whether it is the first of its kind."""
        kind = self._kinds.get(transfer)
        return kind is not None and self._queues[kind][0] is transfer

    def served(self, transfer: Transfer) -> None:
        """The turn of its kind is over."""
        if len(self._queues) > 1:
            kind = self._kinds[transfer]
            self._queues[kind] = self._queues.pop(kind)

    def discard(self, transfer: Transfer) -> None:
        """It does not wait any more."""
        kind = self._kinds.pop(transfer, None)
        if kind is not None:
            queue = self._queues[kind]
            queue.remove(transfer)
            if not queue:
                del self._queues[kind]

    def all(self) -> list[Transfer]:
        """All of them, in their order within each kind."""
        return [transfer for queue in self._queues.values() for transfer in queue]

    def sort_again(self) -> None:
        """Rails were excluded: some may be of another kind now."""
        transfers = self.all()
        self._queues, self._kinds = {}, {}
        for transfer in transfers:
            self.add(transfer)

    def deadline(self) -> float:
        """The earliest, on the monotonic clock; infinite if there is none."""
        return min((transfer.work.deadline for transfer in self._kinds), default=math.inf)

    def _queue_for(self, transfer: Transfer) -> deque[Transfer]:
        kind = (transfer.pool, transfer.devices, frozenset(transfer.excluded))
        self._kinds[transfer] = kind
        return self._queues.setdefault(kind, deque())
