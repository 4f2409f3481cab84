"""Who may start on one transport to one peer, and who waits for room. Pure: it is told the time.

Each priority has a limit of bytes and of tasks under way; one without a limit never comes here. A higher
priority's limit is at least that of a lower one, and what is under way counts for all: so bulk leaves room.
Those that wait go by priority and, within one, in the order of their arrival or of their deadlines.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tent_core.types import Priority


@dataclass(frozen=True, slots=True)
class Limit:
    """What may be under way when something of a priority starts, itself included. An entry that is larger
    than the limit starts when nothing else is under way."""

    bytes: int
    tasks: int


@dataclass(frozen=True, slots=True)
class Rules:
    """`promotion` is in seconds: who waited so long moves up by one priority, itself only, again and again.
    `by_deadline`: the earliest deadline goes first within a priority."""

    limits: Mapping[Priority, Limit]
    promotion: float = 0.5
    by_deadline: bool = False


class Ticket:
    """One entry. `go()` is called, by whoever makes room, when it has waited: because it has been `admitted`,
    or because its deadline has passed."""

    __slots__ = ("admitted", "bytes", "deadline", "go", "priority", "queue", "tasks")

    def __init__(
        self,
        priority: Priority,
        size: int,
        tasks: int,
        deadline: float,
        go: Callable[[], None],
    ) -> None:
        self.priority = priority
        self.bytes = size
        self.tasks = tasks
        self.deadline = deadline
        self.go = go
        self.admitted = False
        """Whether it counts as under way."""
        self.queue: Priority | None = None
        """Where it waits: its priority, or a higher one after a promotion; None while it does not wait."""


class _Queue:
    """Tickets of one priority; those that left it elsewhere are passed over when they come up."""

    def __init__(self, priority: Priority) -> None:
        self.priority = priority
        self._heap: list[tuple[float, int, Ticket]] = []
        self._arrivals: deque[tuple[float, Ticket]] = deque()
        """With the times at which they move up, which grow."""

    def add(self, ticket: Ticket, key: float, order: int, promote_at: float) -> None:
        ticket.queue = self.priority
        heapq.heappush(self._heap, (key, order, ticket))
        self._arrivals.append((promote_at, ticket))

    def first(self) -> Ticket | None:
        """The next in turn."""
        while self._heap and self._heap[0][2].queue is not self.priority:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def oldest(self) -> tuple[float, Ticket] | None:
        """The one that moves up next, and when."""
        while self._arrivals and self._arrivals[0][1].queue is not self.priority:
            self._arrivals.popleft()
        return self._arrivals[0] if self._arrivals else None


class Admission:
    """One transport and one peer. Not thread-safe: its owner has a lock, and calls `go` without it."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._queues = tuple(_Queue(priority) for priority in Priority)
        self._orders = itertools.count()
        self._deadlines: list[tuple[float, int, Ticket]] = []
        """A heap of those that wait and have one; others stay in it for a while."""
        self.bytes = 0
        """Under way."""
        self.tasks = 0
        self.waiting = 0
        """How many wait."""
        self.waiting_bytes = 0

    def enter(self, ticket: Ticket, now: float) -> bool:
        """Whether it may start now; otherwise it waits, and is answered by a later `leave` or `due`."""
        if self._fits(ticket, ticket.priority) and not (self.waiting and self._behind(ticket)):
            self._take(ticket)
            return True
        self._add(ticket, ticket.priority, now)
        self.waiting += 1
        self.waiting_bytes += ticket.bytes
        if ticket.deadline < float("inf"):
            self._expect(ticket)
        return False

    def leave(self, ticket: Ticket, now: float) -> list[Ticket]:
        """An admitted one has ended, or its second end is told; who may go now."""
        if ticket.admitted:
            ticket.admitted = False
            self.bytes -= ticket.bytes
            self.tasks -= ticket.tasks
        return self.due(now)

    def withdraw(self, ticket: Ticket) -> bool:
        """It does not wait any more; False if it does not wait."""
        if ticket.queue is None:
            return False
        self._waits_no_more(ticket)
        return True

    def due(self, now: float) -> list[Ticket]:
        """Move up those that waited long; who may go now: those whose deadline has passed, which were not
        admitted, and those that may start."""
        admitted = self._expired(now)
        self._promote(now)
        for queue in self._queues:
            while (ticket := queue.first()) is not None:
                if not self._fits(ticket, queue.priority):
                    return admitted  # all behind it wait for it, or it would never go
                self._waits_no_more(ticket)
                self._take(ticket)
                admitted.append(ticket)
        return admitted

    def next_promotion(self) -> float | None:
        """When somebody will have waited long enough to move up."""
        times = [oldest[0] for queue in self._queues[1:] if (oldest := queue.oldest()) is not None]
        return min(times, default=None)

    def next_due(self) -> float | None:
        """When `due` will have something to do, if nobody leaves before."""
        while self._deadlines and self._deadlines[0][2].queue is None:
            heapq.heappop(self._deadlines)
        times = [self._deadlines[0][0]] if self._deadlines else []
        promotion = self.next_promotion()
        if promotion is not None:
            times.append(promotion)
        return min(times, default=None)

    def _expect(self, ticket: Ticket) -> None:
        """Remember its deadline; forget, now and then, those of tickets that do not wait any more."""
        if len(self._deadlines) > 2 * self.waiting + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2].queue is not None]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (ticket.deadline, next(self._orders), ticket))

    def _expired(self, now: float) -> list[Ticket]:
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            ticket = heapq.heappop(self._deadlines)[2]
            if self.withdraw(ticket):
                expired.append(ticket)
        return expired

    def _behind(self, ticket: Ticket) -> bool:
        """Whether somebody waits that goes before it."""
        return any(q.first() is not None for q in self._queues if q.priority <= ticket.priority)

    def _add(self, ticket: Ticket, priority: Priority, now: float) -> None:
        key = ticket.deadline if self._rules.by_deadline else 0.0
        self._queues[priority].add(ticket, key, next(self._orders), now + self._rules.promotion)

    def _fits(self, ticket: Ticket, priority: Priority) -> bool:
        limit = self._rules.limits.get(priority)
        return (
            limit is None
            or self.tasks == 0
            or (
                self.bytes + ticket.bytes <= limit.bytes
                and self.tasks + ticket.tasks <= limit.tasks
            )
        )

    def _waits_no_more(self, ticket: Ticket) -> None:
        ticket.queue = None
        self.waiting -= 1
        self.waiting_bytes -= ticket.bytes

    def _take(self, ticket: Ticket) -> None:
        ticket.admitted = True
        self.bytes += ticket.bytes
        self.tasks += ticket.tasks

    def _promote(self, now: float) -> None:
        for queue in self._queues[1:]:
            while (oldest := queue.oldest()) is not None and oldest[0] <= now:
                self._add(oldest[1], Priority(queue.priority - 1), now)
