"""An open NIC: its device, where its data queue pairs complete, and how it does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tent_rdma.devices import ChosenDevice
from tent_rdma.lane import Health, Lane, Run
from tent_rdma.verbs import Completion, CompletionQueue, Event, Verbs, VerbsError
from tent_rdma.wire import NicAddress

COMPLETIONS = 16384
"""Entries of a NIC's completion queue, which is lost when it overflows: so many work requests are under way
at most, and drain markers, one for each queue pair, for which a quarter is kept apart."""

_OF_THE_PORT = (Event.PORT_ACTIVE, Event.PORT_DOWN, Event.ADDRESS_CHANGED)

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
    lost: Callable[[Nic, VerbsError], None]
    """Its completion queue or its events cannot be read any more."""


class Nic:
    """One device of this engine. Thread-safe.

    Completions are taken by whoever comes first, a thread that waits for its own transfer or the poller;
    nobody waits for the other. Locks: `_polling` (held only while completions are taken, never while anybody
    is told), then a lane's, and `_lock`, a leaf.
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
        self._starved: dict[Waiter, None] = {}
        """Those that wait for credits, in order."""
        self._armed = False
        self._deaf = False
        self.dead = False
        self.device = verbs.open(chosen.name)
        try:
            self.port = self.device.port(chosen.port)
            self.channel = self.device.channel()
        except BaseException:
            self.device.close()
            raise
        depth = min(COMPLETIONS, self.device.limits.max_completions)
        self._markers = depth // 4
        self._credits = depth - self._markers
        try:
            self.queue: CompletionQueue = self.device.completion_queue(depth, self.channel)
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

    @property
    def hears(self) -> bool:
        """Whether its completions can still be taken."""
        return not self._deaf

    # ---------------------------------------------------------------- lanes

    def take_credits(self, count: int, waiter: Waiter | None = None) -> int:
        """Room in the completion queue, up to `count`. Where there is none at all, `waiter` is resumed once
        when there is some."""
        with self._lock:
            taken = min(count, self._credits)
            self._credits -= taken
            if not taken and waiter is not None:
                self._starved[waiter] = None
            return taken

    def give_credits(self, count: int) -> None:
        """What was taken has completed, or was not needed; those that found none look again, in turn."""
        if count:
            with self._lock:
                self._credits += count
                starved, self._starved = list(self._starved), {}
            # Whoever looked first before looks last: it may have taken all, and left none to the others.
            for waiter in starved[1:] + starved[:1]:
                waiter.resume()

    def take_marker(self) -> bool:
        """Room in the completion queue for the drain marker of one more queue pair."""
        with self._lock:
            self._markers -= 1
            if self._markers >= 0:
                return True
            self._markers += 1
            return False

    def give_marker(self) -> None:
        """A queue pair was destroyed."""
        with self._lock:
            self._markers += 1

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
        """Take what has completed and tell the listeners; how many there were, 0 if another thread does."""
        if self._deaf or not self._polling.acquire(blocking=False):
            return 0
        return self._take()

    def arm(self) -> None:
        """See to it that the poller wakes at the next completion, unless it was seen to already."""
        if self._armed or self._deaf:
            return
        failure: VerbsError | None = None
        with self._polling:
            if not self._armed:
                self._armed = True  # before the queue is: whoever is woken takes it back
                try:
                    self.queue.arm()
                except VerbsError as error:
                    failure = error
        if failure is not None:
            self.lost(failure)
            return
        while not self._deaf:  # what completed before it was armed wakes nobody
            self._polling.acquire()
            if self._take() < BATCH:
                return

    def _take(self) -> int:
        """With `_polling`, which it lets go."""
        ended: list[Run] = []
        broken: list[tuple[Lane, Completion]] = []
        drained: list[Lane] = []
        failure: VerbsError | None = None
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
        except VerbsError as error:
            failure = error
        finally:
            self._polling.release()
        if failure is not None:
            self.lost(failure)
            return 0
        if ended:
            # Those that found no room come first: the ones that had some would take it again.
            self.give_credits(sum(run.stop - run.start for run in ended))
            self._listeners.ended(ended)
        for lane, completion in broken:
            self._listeners.broken(lane, completion)
        for lane in drained:
            lane.connection.drained(lane)
        return len(completions)

    def lost(self, error: VerbsError) -> None:
        """Its completions, or its events, cannot be read any more: it is not used from now on."""
        with self._lock:
            first = not self._deaf
            self._deaf = self.dead = True
        if first:
            self._listeners.lost(self, error)

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
        """The device has something to say: take it. `tell` the listeners then. Raises VerbsError."""
        event = self.device.next_event()
        if event is Event.FATAL:
            self.dead = True
        elif event in _OF_THE_PORT and not self.dead:
            self.port = self.device.port(self.chosen.port)
        return event

    def tell(self, event: Event) -> None:
        """Tell the listener of an event that was taken, if it is about the port or all of the device."""
        if event is Event.FATAL or event in _OF_THE_PORT:
            self._listeners.port(self)

    def close(self) -> None:
        """Close all that is open; every lane and registration must be gone. Raises VerbsError."""
        self.queue.close()
        self.channel.close()
        self.device.close()
