"""An open NIC: its device, where its data queue pairs complete, and how it does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tent_rdma.devices import ChosenDevice
from tent_rdma.lane import Health, Lane, Run
from tent_rdma.verbs import Completion, CompletionQueue, Event, Verbs
from tent_rdma.wire import NicAddress

COMPLETIONS = 16384
"""Work requests under way on one NIC at most, since a completion queue that overflows is lost."""

BATCH = 64
"""Completions taken at a time."""


class Waiter(Protocol):
    """Who had to wait for room."""

    def resume(self) -> None:
        """There may be some."""
        ...


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who is told: of runs that ended, of a lane's first error, of a port."""

    ended: Callable[[list[Run]], None]
    broken: Callable[[Lane, Completion], None]
    port: Callable[[Nic], None]


class Nic:
    """One device of this engine. Thread-safe.

    Completions are taken by whoever comes first, a thread that waits for its own transfer or the poller;
    nobody waits for the other. Locks: `_polling` (never waited for), then a lane's, and `_lock`, a leaf.
    """

    def __init__(
        self, verbs: Verbs, index: int, chosen: ChosenDevice, listeners: Listeners
    ) -> None:
        """Open it. Raises VerbsError, and then nothing is left open."""
        self.index = index
        self.chosen = chosen
        self.name = chosen.name
        self._listeners = listeners
        self._polling = threading.Lock()
        self._lock = threading.Lock()
        self._lanes: dict[int, Lane] = {}
        self._starved: set[Waiter] = set()
        self._armed = False
        self.dead = False
        self.device = verbs.open(chosen.name)
        try:
            self.port = self.device.port(chosen.port)
            self.channel = self.device.channel()
        except BaseException:
            self.device.close()
            raise
        self._credits = min(COMPLETIONS, self.device.limits.max_completions)
        try:
            self.queue: CompletionQueue = self.device.completion_queue(self._credits, self.channel)
        except BaseException:
            self.channel.close()
            self.device.close()
            raise

    @property
    def address(self) -> NicAddress:
        """What peers must know of it."""
        return NicAddress(
            name=self.name,
            gid=self.chosen.gid,
            lid=self.port.lid,
            link_layer=self.chosen.link_layer,
            mtu=self.port.mtu,
            reads=min(self.device.limits.max_reads, 255),
            numa_node=self.chosen.numa_node,
        )

    @property
    def usable(self) -> bool:
        """Whether its port is up and the device is well."""
        return self.port.active and not self.dead

    # ---------------------------------------------------------------- lanes

    def take_credits(self, count: int, waiter: Waiter | None = None) -> int:
        """Room in the completion queue, up to `count`. Where there is none at all, `waiter` is resumed once
        when there is some."""
        with self._lock:
            taken = min(count, self._credits)
            self._credits -= taken
            if not taken and waiter is not None:
                self._starved.add(waiter)
            return taken

    def give_credits(self, count: int) -> None:
        """What was taken has completed, or was not needed."""
        with self._lock:
            self._credits += count

    def resume_starved(self) -> None:
        """Credits were given: have those that found none look again."""
        if self._starved:
            with self._lock:
                starved, self._starved = self._starved, set()
            for waiter in starved:
                waiter.resume()

    def add_lane(self, lane: Lane) -> None:
        """From now on completions of its queue pair are its own."""
        with self._lock:
            self._lanes[lane.queue_pair.number] = lane

    def discard_lane(self, lane: Lane) -> None:
        """Its queue pair is about to be destroyed."""
        with self._lock:
            self._lanes.pop(lane.queue_pair.number, None)

    def lanes(self) -> list[Lane]:
        """All of them."""
        with self._lock:
            return list(self._lanes.values())

    # ---------------------------------------------------------------- completions

    def reap(self) -> int:
        """Take what has completed and tell the listeners; how many there were, 0 if another thread is at it.

        Raises VerbsError when the queue is lost.
        """
        if not self._polling.acquire(blocking=False):
            return 0
        return self._take()

    def arm(self) -> None:
        """See to it that the poller wakes at the next completion, unless it was seen to already.

        Raises VerbsError when the queue is lost.
        """
        if self._armed:
            return
        with self._polling:
            if not self._armed:
                self.queue.arm()
                self._armed = True
        while True:  # what completed before it was armed wakes nobody
            self._polling.acquire()
            if not self._take():
                return

    def _take(self) -> int:
        """With `_polling`, which it lets go."""
        ended: list[Run] = []
        broken: list[tuple[Lane, Completion]] = []
        drained: list[Lane] = []
        try:
            completions = self.queue.poll(BATCH)
            for completion in completions:
                lane = self._lanes.get(completion.queue_pair)
                if lane is None:
                    continue  # destroyed since
                health = lane.completed(completion, ended)
                if health is Health.BROKEN:
                    broken.append((lane, completion))
                elif health is Health.DRAINED:
                    drained.append(lane)
        finally:
            self._polling.release()
        if ended:
            self.give_credits(sum(run.stop - run.start for run in ended))
            self._listeners.ended(ended)
            self.resume_starved()
        for lane, completion in broken:
            self._listeners.broken(lane, completion)
        for lane in drained:
            lane.connection.drained(lane)
        return len(completions)

    @property
    def busy(self) -> bool:
        """Whether anything is outstanding on a lane."""
        return any(lane.busy or lane.broken for lane in self.lanes())

    def woken(self) -> None:
        """The channel is readable: take the event."""
        self._armed = False
        self.channel.take(self.queue)

    # ---------------------------------------------------------------- events

    def take_event(self) -> Event:
        """The device has something to say: take it, and tell the listener if it is about the port."""
        event = self.device.next_event()
        if event is Event.FATAL:
            self.dead = True
        if event in (Event.PORT_ACTIVE, Event.PORT_DOWN, Event.ADDRESS_CHANGED, Event.FATAL):
            if not self.dead:
                self.port = self.device.port(self.chosen.port)
            self._listeners.port(self)
        return event

    def close(self) -> None:
        """Close all that is open; every lane and registration must be gone. Raises VerbsError."""
        self.queue.close()
        self.channel.close()
        self.device.close()
