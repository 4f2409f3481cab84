"""What the runtime promises, done the simple way: in plain Python, in one thread, on time of its own.

The model knows how requests become rows that travel (neighbours joined, bulk in pieces), what each attempt
does, and what follows. It shares with the engine what has tests of its own and decides nothing alone: the
script of a mock transport, and the turns and the health of transports (`Traffic`).
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tent_core.admission import Rules, Ticket
from tent_core.health import HealthRules
from tent_core.testing.steps import StepAlarm
from tent_core.traffic import Traffic
from tent_core.types import Opcode, Priority, Status
from tent_mock.script import Do, On, Script, Verdict

ENTRIES: dict[str, tuple[tuple[str, ...], float | None]] = {
    "all": (("a", "b", "c"), None),
    "other": (("c", "a"), None),
    "quick": (("b", "a", "c"), 0.5),
}
"""The policy: names of entries, their transports, and how long an attempt may take."""

CANCELS = {"a": True, "b": False, "c": True}
"""Which transports can interrupt what they have; `c` also says how much has moved."""

RULES = HealthRules(failures=3, window=8.0, pause=1.0, longest=16.0)
MAX_TRIES = 6
TRANSFER_S = 32.0


@dataclass(frozen=True)
class Wish:
    """One submission, as the test draws it. `rows` are local offset, remote offset, length."""

    peer: int
    opcode: Opcode
    rows: tuple[tuple[int, int, int], ...]
    priority: Priority
    policy: str
    transport: str | None
    timeout: float
    attempt: float | None
    stall: float | None
    retry_unfenced: bool


class Batch:
    def __init__(self, wish: Wish) -> None:
        n = len(wish.rows)
        self.wish = wish
        self.status = [Status.PENDING] * n
        self.moved = [0] * n
        self.carried: Counter[str] = Counter()
        self.carries: list[Carry] = []

    @property
    def done(self) -> bool:
        return Status.PENDING not in self.status


@dataclass(eq=False)
class Joined:
    """Neighbouring requests that travel as one, and how many pieces of it are out."""

    batch: Batch
    members: list[int]
    local: int
    remote: int
    length: int
    out: int = 1
    moved: int = 0
    broken: Status | None = None

    def end_piece(self, moved: int, broken: Status | None, by: str) -> None:
        self.moved += moved
        self.batch.carried[by] += moved
        if broken is not None and self.broken is None:
            self.broken = broken
        self.out -= 1
        if self.out:
            return
        left = self.moved
        for member in self.members:
            length = self.batch.wish.rows[member][2]
            share = min(left, length)
            left -= share
            self.batch.moved[member] = share
            self.batch.status[member] = Status.COMPLETED if self.broken is None else self.broken


@dataclass(eq=False)
class Piece:
    whole: Joined
    offset: int
    length: int

    @property
    def local(self) -> int:
        return self.whole.local + self.offset

    @property
    def remote(self) -> int:
        return self.whole.remote + self.offset

    @property
    def requests(self) -> int:
        """How many requests end with it."""
        last = self.offset + self.length == self.whole.length
        return len(self.whole.members) if last else 0


@dataclass(eq=False)
class Attempt:
    """Pieces at one transport."""

    carry: Carry
    name: str
    pieces: list[Piece]
    deadline: float
    status: list[Status] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    causes: list[tuple[int, int, bool]] = field(default_factory=list)
    cancelled: bool = False
    inside: bool = True
    epoch: int = 0
    """Which of the peers that were in its place it is for."""

    def __post_init__(self) -> None:
        self.epoch = self.carry.model.epochs[self.carry.batch.wish.peer]
        self.status = [Status.PENDING] * len(self.pieces)
        self.moved = [0] * len(self.pieces)

    @property
    def finished(self) -> bool:
        return Status.PENDING not in self.status

    def report(
        self,
        status: Status,
        start: int,
        stop: int,
        moved: Sequence[int] | None = None,
        fenced: bool = True,
    ) -> None:
        fresh = [i for i in range(start, stop) if self.status[i] is Status.PENDING]
        if not fresh:
            return
        for i in fresh:
            self.status[i] = status
            if status is Status.COMPLETED:
                self.moved[i] = self.pieces[i].length
            elif moved is not None:
                self.moved[i] = moved[i - start]
        if status is not Status.COMPLETED:
            self.causes.append((start, stop, fenced))
        if self.finished and not self.inside:
            self.carry.model.finished(self)


@dataclass(eq=False)
class Pending:
    """Something that hangs or is delayed at a mock transport."""

    run: Callable[[], None]
    abandon: Callable[[], None]
    hangs: bool
    peer: int | None
    attempt: Attempt | None


class Transport:
    """What a mock transport does: its script decides."""

    def __init__(self, model: Model, name: str) -> None:
        self.model = model
        self.name = name
        self.script = Script()
        self.pending: list[Pending] = []

    def submit(self, attempt: Attempt) -> None:
        wish = attempt.carry.batch.wish
        peer = self.model.peer_names[wish.peer]
        if not len(self.script):
            self._carry(attempt, 0, len(attempt.pieces))
            return
        verdicts = [self.script.decide(On.REQUEST, peer, wish.opcode) for _ in attempt.pieces]
        actions = {verdict.step.do for verdict in verdicts if verdict is not None}
        everything = (0, len(attempt.pieces))
        if Do.CRASH in actions:
            attempt.report(Status.FAILED, *everything, fenced=False)
            return
        if Do.RAISE in actions:
            attempt.report(Status.INITIAL, *everything)
            return
        start = 0
        for verdict, group in itertools.groupby(verdicts):
            stop = start + len(list(group))
            self._act(verdict, attempt, start, stop)
            start = stop

    def _act(self, verdict: Verdict | None, attempt: Attempt, start: int, stop: int) -> None:
        if verdict is None:
            self._carry(attempt, start, stop)
            return
        step = verdict.step
        match step.do:
            case Do.REFUSE:
                attempt.report(Status.INITIAL, start, stop)
            case Do.FAIL:
                if not step.fenced:
                    late = partial(self.model.move, attempt, start, stop)
                    self._pend(Pending(late, lambda: None, True, None, None))
                attempt.report(Status.FAILED, start, stop, fenced=step.fenced)
            case Do.HANG:
                self._pend(self._held(attempt, start, stop, True))
            case Do.DELAY:
                left = attempt.deadline - self.model.now
                if verdict.seconds <= left:
                    self._pend(self._held(attempt, start, stop, False), verdict.seconds)
                else:
                    late = partial(attempt.report, Status.TIMEOUT, start, stop)
                    give_up = self._held(attempt, start, stop, False, late)
                    self._pend(give_up, max(0.0, left))
            case Do.SHORT:
                lengths = [piece.length for piece in attempt.pieces[start:stop]]
                part = [n // 2 if step.moved is None else min(n, step.moved) for n in lengths]
                self.model.move(attempt, start, stop, part)
                attempt.report(Status.FAILED, start, stop, part)
            case Do.TWICE:
                self._carry(attempt, start, stop)
            case Do.LOSE:
                attempt.report(Status.FAILED, start, stop)
            case _:
                raise AssertionError(step.do)

    def _held(
        self,
        attempt: Attempt,
        start: int,
        stop: int,
        hangs: bool,
        run: Callable[[], None] | None = None,
    ) -> Pending:
        def abandon() -> None:
            status = Status.CANCELED if attempt.cancelled else Status.FAILED
            attempt.report(status, start, stop)

        run = run or partial(self._carry, attempt, start, stop)
        return Pending(run, abandon, hangs, attempt.carry.batch.wish.peer, attempt)

    def _carry(self, attempt: Attempt, start: int, stop: int) -> None:
        self.model.move(attempt, start, stop)
        attempt.report(Status.COMPLETED, start, stop)

    def _pend(self, pending: Pending, seconds: float = 0.0) -> None:
        self.pending.append(pending)
        if not pending.hangs:
            self.model.alarm.call_later(seconds, lambda: self._happen(pending))

    def _happen(self, pending: Pending) -> None:
        if pending in self.pending:
            self.pending.remove(pending)
            pending.run()

    def release(self, most: int) -> None:
        for pending in [p for p in self.pending if p.hangs][:most]:
            self._happen(pending)

    def cancel(self, attempt: Attempt) -> None:
        self._abandon(lambda p: p.attempt is attempt)

    def depart(self, peer: int) -> None:
        self._abandon(lambda p: p.peer == peer)

    def _abandon(self, which: Callable[[Pending], bool]) -> None:
        gone = [p for p in self.pending if which(p)]
        self.pending = [p for p in self.pending if not which(p)]
        for pending in gone:
            pending.abandon()


class Carry:
    """Pieces on their way from one candidate to the next."""

    def __init__(
        self, model: Model, batch: Batch, pieces: list[Piece], left: Sequence[str]
    ) -> None:
        self.model = model
        self.batch = batch
        self.pieces = pieces
        self.left = list(left)
        self.again: list[str] = []
        """Which have failed, and may have another turn when all have had one."""
        self.resting = False
        self.tries = 0
        self.name = ""
        self.deadline = model.now + batch.wish.timeout
        self.ticket: Ticket | None = None
        self.attempt: Attempt | None = None
        self.abandoned: Attempt | None = None
        self.cancelled = False

    @property
    def traffic(self) -> Traffic:
        return self.model.traffic[self.batch.wish.peer]

    def run(self) -> None:
        while True:
            if self.cancelled:
                self._leave()
                self._end(Status.CANCELED)
                return
            if not self.name:
                if not self.left and self.again:
                    self.left, self.again = self.again, []
                    self._rest()
                    return
                if not self.left:
                    self._end(Status.FAILED)
                    return
                if self.traffic.troubled and len(self.left) > 1:
                    self.left = list(self.traffic.order(self.left))
                self.name = self.left.pop(0)
            if not self._may_enter():
                return
            attempt = self._submit()
            if attempt is None or not self.settle(attempt):
                return

    def _rest(self) -> None:
        """1/64 s after the first attempt, twice as long after each further one, up to 1 s."""
        self.resting = True
        self.model.alarm.call_later(min(2**self.tries / 128, 1.0), self.wake)

    def wake(self) -> None:
        if self.resting:
            self.resting = False
            self.model.queue.append(self.run)

    def _may_enter(self) -> bool:
        wish = self.batch.wish
        if self.ticket is not None or wish.priority is not Priority.LOW:
            return True
        size = sum(piece.length for piece in self.pieces)
        go = partial(self.model.queue.append, self.run)
        self.ticket = Ticket(wish.priority, size, len(self.pieces), self.deadline, go)
        return self.traffic.enter(self.name, self.ticket)

    def _leave(self) -> None:
        ticket, self.ticket = self.ticket, None
        if ticket is not None and ticket.admitted:
            self.traffic.leave(self.name, ticket)

    def _submit(self) -> Attempt | None:
        wish, model = self.batch.wish, self.model
        if model.now >= self.deadline:
            self._leave()
            self._end(Status.TIMEOUT)
            return None
        seconds = wish.attempt if wish.attempt is not None else ENTRIES[wish.policy][1]
        until = self.deadline if seconds is None else min(self.deadline, model.now + seconds)
        if model.departed[wish.peer]:
            model.queue.append(self._unreachable)
            return None
        attempt = self.attempt = Attempt(self, self.name, self.pieces, until)
        model.transports[self.name].submit(attempt)
        attempt.inside = False
        if attempt.finished:
            return attempt
        if seconds is not None:
            model.alarm.call_later(seconds, partial(self._look, attempt))
        if wish.stall is not None and self.name == "c":
            model.alarm.call_later(wish.stall, partial(self._look, attempt))
        return None

    def _unreachable(self) -> None:
        """The peer has departed, which no other transport will mend."""
        self._leave()
        self.model.count(self.name, self.pieces, [0] * len(self.pieces), self.pieces)
        self._end(Status.CANCELED if self.cancelled else Status.FAILED)

    def _look(self, attempt: Attempt) -> None:
        if not attempt.finished:
            self.model.queue.append(partial(self._abandon, attempt))

    def _abandon(self, attempt: Attempt) -> None:
        if not attempt.finished:
            self.abandoned = attempt
            self._stop(attempt)

    def cancel(self) -> None:
        self.cancelled = True
        if self.ticket is not None and self.traffic.withdraw(self.name, self.ticket):
            self.model.queue.append(self.run)
        elif self.resting:
            self.wake()
        elif self.attempt is not None and not self.attempt.finished:
            self._stop(self.attempt)

    def _stop(self, attempt: Attempt) -> None:
        attempt.cancelled = True
        if CANCELS[attempt.name]:
            self.model.transports[attempt.name].cancel(attempt)

    def settle(self, attempt: Attempt) -> bool:
        """True when pieces are left for the next candidate."""
        model, wish, name = self.model, self.batch.wish, attempt.name
        self._leave()
        pairs = list(zip(attempt.pieces, attempt.status, strict=True))
        undone = [piece for piece, status in pairs if status is not Status.COMPLETED]
        model.count(name, attempt.pieces, attempt.moved, undone)
        if not attempt.causes:
            self.traffic.succeeded(name)
        for piece, status in pairs:
            if status is Status.COMPLETED:
                piece.whole.end_piece(piece.length, None, name)
        if not attempt.causes:
            return False
        self.name = ""
        more = self.tries + 1 < MAX_TRIES and not self.cancelled
        if (
            not self.left
        ):  # all have been tried, and the failures of mocks may pass, if there is time
            rest = min(2 ** (self.tries + 1) / 128, 1.0)
            more &= not model.departed[wish.peer] and model.now + rest < self.deadline
        moving: list[int] = []
        ending: list[tuple[int, Status]] = []
        blamed = False
        seen: set[int] = set()
        for start, stop, fenced in attempt.causes:
            rows = [
                i
                for i in range(start, stop)
                if attempt.status[i] is not Status.COMPLETED and i not in seen
            ]
            seen.update(rows)
            if not rows:
                continue
            status = attempt.status[rows[0]]
            own = status is Status.TIMEOUT and attempt.deadline < self.deadline
            late = self.abandoned is attempt and status in (Status.CANCELED, Status.TIMEOUT)
            if own or late:
                status = Status.FAILED
            final = status in (Status.CANCELED, Status.TIMEOUT)
            unknown = wish.opcode is Opcode.WRITE and not fenced and not wish.retry_unfenced
            blamed |= not final
            if more and not final and not unknown:
                moving += rows
                continue
            ended = Status.CANCELED if self.cancelled else status if final else Status.FAILED
            ending += [(i, ended) for i in rows]
        if blamed:
            self.traffic.failed(name)
        for i, ended in ending:
            attempt.pieces[i].whole.end_piece(attempt.moved[i], ended, name)
        self.pieces = [attempt.pieces[i] for i in sorted(moving)]
        if not moving:
            return False
        self.tries += 1
        self.again.append(name)
        model.failovers += sum(piece.requests for piece in self.pieces)
        return True

    def _end(self, status: Status) -> None:
        for piece in self.pieces:
            piece.whole.end_piece(0, status, "")


class Model:
    """The whole: time, memory, transports, and what is to be carried on, in order."""

    def __init__(
        self,
        names: Sequence[str],
        peers: Sequence[str],
        admission: Rules,
        slice_: int,
        memory: bytes,
        memories: Sequence[bytes],
    ) -> None:
        self.alarm = StepAlarm()
        self.transports = {name: Transport(self, name) for name in names}
        self.peer_names = list(peers)
        self.traffic = [Traffic(admission, RULES, self.alarm) for _ in peers]
        self.departed = [False] * len(self.traffic)
        self.epochs = [0] * len(self.traffic)
        self.memory = bytearray(memory)
        self.memories = [bytearray(m) for m in memories]
        self.queue: deque[Callable[[], None]] = deque()
        self.counters: Counter[tuple[str, str]] = Counter()
        self.failovers = 0
        self.carries: list[Carry] = []
        self._admission = admission
        self._slice = slice_

    @property
    def now(self) -> float:
        return self.alarm.now()

    def submit(self, wish: Wish) -> Batch:
        batch = Batch(wish)
        names = ENTRIES[wish.policy][0]
        if wish.transport in names:
            names = (wish.transport, *(name for name in names if name != wish.transport))
        groups = self._pieces(self._joined(batch))
        batch.carries = [Carry(self, batch, pieces, names) for pieces in groups]
        self.carries += batch.carries
        for carry in batch.carries:
            carry.run()
        return batch

    def _joined(self, batch: Batch) -> list[Joined]:
        found: list[Joined] = []
        for i, (local, remote, length) in enumerate(batch.wish.rows):
            last = found[-1] if found else None
            if (
                last is not None
                and last.local + last.length == local
                and last.remote + last.length == remote
            ):
                last.members.append(i)
                last.length += length
            else:
                found.append(Joined(batch, [i], local, remote, length))
        return found

    def _pieces(self, rows: list[Joined]) -> list[list[Piece]]:
        size = self._slice
        total = sum(row.length for row in rows)
        if rows[0].batch.wish.priority is not Priority.LOW or total <= size:
            return [[Piece(row, 0, row.length) for row in rows]]
        groups: dict[int, list[Piece]] = {}
        end = 0
        for row in rows:
            starts = range(0, row.length, size)
            row.out = len(starts)
            for start in starts:
                piece = Piece(row, start, min(size, row.length - start))
                end += piece.length
                groups.setdefault((end - 1) // size, []).append(piece)
        return list(groups.values())

    def cancel(self, batch: Batch) -> None:
        if not batch.done:
            for carry in batch.carries:
                carry.cancel()

    def finished(self, attempt: Attempt) -> None:
        carry = attempt.carry
        if attempt.causes:
            self.queue.append(lambda: carry.run() if carry.settle(attempt) else None)
        else:
            carry.settle(attempt)

    def pump(self, most: int | None = None) -> None:
        while self.queue and (most is None or most > 0):
            self.queue.popleft()()
            most = None if most is None else most - 1

    def depart(self, peer: int) -> None:
        self.departed[peer] = True
        for carry in self.carries:
            if carry.batch.wish.peer == peer:
                carry.wake()
        for transport in self.transports.values():
            transport.depart(peer)

    def welcome(self, peer: int, name: str, memory: bytes) -> None:
        """Another one is in the place of a peer that has departed."""
        self.departed[peer] = False
        self.epochs[peer] += 1
        self.peer_names[peer] = name
        self.traffic[peer] = Traffic(self._admission, RULES, self.alarm)
        self.memories[peer] = bytearray(memory)

    def count(
        self, name: str, pieces: Sequence[Piece], moved: Sequence[int], undone: Sequence[Piece]
    ) -> None:
        self.counters[name, "tasks"] += sum(piece.requests for piece in pieces)
        self.counters[name, "failures"] += sum(piece.requests for piece in undone)
        self.counters[name, "bytes"] += sum(moved)

    def move(
        self, attempt: Attempt, start: int, stop: int, lengths: Sequence[int] | None = None
    ) -> None:
        wish = attempt.carry.batch.wish
        if attempt.epoch != self.epochs[wish.peer]:
            return  # late bytes of, or for, a peer that has gone
        there = self.memories[wish.peer]
        for i, piece in enumerate(attempt.pieces[start:stop]):
            n = piece.length if lengths is None else lengths[i]
            here, far = slice(piece.local, piece.local + n), slice(piece.remote, piece.remote + n)
            if wish.opcode is Opcode.WRITE:
                there[far] = self.memory[here]
            else:
                self.memory[here] = there[far]
