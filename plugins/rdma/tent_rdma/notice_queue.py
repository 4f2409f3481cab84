"""Where notification queue pairs complete: few completion queues for many channels, always armed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from tent_rdma.slots import SLOTS
from tent_rdma.verbs import Completion, Device

CHANNEL_COMPLETIONS = 2 * SLOTS
"""What one channel can have outstanding: each of its slots once. A queue that overflows is lost."""

CHANNELS = 32
"""Channels that share a queue."""

_BATCH = 64


class Receiver(Protocol):
    """Whose completions come here."""

    def completed(self, completion: Completion) -> None: ...


class NoticeQueue:
    """A completion queue with room for some channels. One thread calls `woken`; the rest is thread-safe."""

    def __init__(self, device: Device, channels: int) -> None:
        """Raises VerbsError, and then nothing is left."""
        self.free = channels
        """Channels that still fit; its `NoticeQueues` counts."""
        self.channels = channels
        self._receivers: dict[int, Receiver] = {}
        self.channel = device.channel()
        try:
            # Room for one more: what a queue pair completed may still lie here when another has its place.
            depth = (channels + 1) * CHANNEL_COMPLETIONS
            self.queue = device.completion_queue(depth, self.channel)
            try:
                self.queue.arm()
            except BaseException:
                self.queue.close()
                raise
        except BaseException:
            self.channel.close()
            raise

    def fileno(self) -> int:
        """Readable when something has completed."""
        return self.channel.fileno()

    def add(self, number: int, receiver: Receiver) -> None:
        """Completions of the queue pair of that number are for `receiver` from now on."""
        self._receivers[number] = receiver

    def discard(self, number: int, receiver: Receiver) -> None:
        """The queue pair is no more; its number may be another's already."""
        if self._receivers.get(number) is receiver:
            del self._receivers[number]

    def woken(self) -> int:
        """It is readable: take the event, arm it again, hand out all that has completed; how many.

        Raises VerbsError when the queue is lost.
        """
        self.channel.take(self.queue)
        self.queue.arm()
        count = 0
        while completions := self.queue.poll(_BATCH):
            for completion in completions:
                receiver = self._receivers.get(completion.queue_pair)
                if receiver is not None:  # else its queue pair was destroyed meanwhile
                    receiver.completed(completion)
            count += len(completions)
        return count

    def close(self) -> None:
        """Close both. Idempotent; raises VerbsError, and then it may be asked again."""
        self.queue.close()
        self.channel.close()


class NoticeQueues:
    """The queues of one NIC, made when the first channel needs one. Thread-safe; its lock is a leaf.

    `watch(queue)` has a poller wait for a new one. `forget(queue)` is called when no channel uses one any
    more: have it unwatched, then close it. Both are called with no lock held.
    """

    def __init__(
        self,
        device: Device,
        watch: Callable[[NoticeQueue], None],
        forget: Callable[[NoticeQueue], None],
    ) -> None:
        self._device = device
        self._watch = watch
        self._forget = forget
        most = device.limits.max_completions // CHANNEL_COMPLETIONS - 1
        self._channels = max(1, min(CHANNELS, most))
        self._lock = threading.Lock()
        self._queues: list[NoticeQueue] = []

    def __len__(self) -> int:
        return len(self._queues)

    def take(self) -> NoticeQueue:
        """A place for one channel. Raises VerbsError when there is none and none can be made."""
        with self._lock:
            for queue in self._queues:
                if queue.free:
                    queue.free -= 1
                    return queue
        made = NoticeQueue(self._device, self._channels)
        try:
            self._watch(made)
        except BaseException:
            made.close()
            raise
        with self._lock:
            made.free -= 1
            self._queues.append(made)
        return made

    def give(self, queue: NoticeQueue) -> None:
        """The place is not needed any more."""
        with self._lock:
            queue.free += 1
            unused = queue.free == queue.channels
            if unused:
                self._queues.remove(queue)
        if unused:
            self._forget(queue)
