"""Real code in many threads of which one runs at a time, chosen by a seed; a clock that only this moves.

Every taking of a lock, every wait and every call to the outside is a point at which another may go on. So a
seed is one interleaving, and the same one again. What waits for ever is found, since nobody else can move.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
STUCK_S = 20.0
"""Real seconds that one step may take."""


@contextmanager
def reproducible(seed: int) -> Iterator[random.Random]:
    """Randomness of that seed, which any failure names."""
    try:
        yield random.Random(seed)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


class Abandoned(BaseException):
    """Unwinds an actor whose run is over."""


class Actor:
    """One thread of a run."""

    def __init__(
        self, scheduler: Scheduler, name: str, body: Callable[[], None], serves: bool
    ) -> None:
        self.name = name
        self.serves = serves
        self.ready: Callable[[], bool] | None = None
        """What it waits for, or None if it can go on."""
        self.until: float | None = None
        self.ended = False
        self.abandoned = False
        self.error: BaseException | None = None
        self.turn = threading.Semaphore(0)
        self._scheduler = scheduler
        self._body = body
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self._scheduler.current.actor = self
        self.turn.acquire()
        try:
            if not self.abandoned:
                self._body()
        except Abandoned:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self._scheduler.back.release()


class Scheduler:
    """Lets actors run, one at a time. `now` is a clock in seconds that nothing else moves."""

    def __init__(self, choices: random.Random) -> None:
        self.random = choices
        self.now = 1000.0
        self.current = threading.local()
        self.back = threading.Semaphore(0)
        self._actors: list[Actor] = []

    def spawn(self, name: str, body: Callable[[], None], serves: bool = False) -> None:
        """Add an actor. One that `serves` others may wait when all others have ended."""
        self._actors.append(Actor(self, name, body, serves))

    def run(self) -> None:
        """Run until all that do not only serve have ended. Raises what an actor raised, and AssertionError if
        they wait for each other."""
        try:
            while self._step():
                pass
        finally:
            for actor in self._actors:
                if not actor.ended:
                    actor.abandoned = True
                    self._resume(actor)
            self._actors.clear()

    def _step(self) -> bool:
        waiting = [a for a in self._actors if not a.ended]
        able = [a for a in waiting if a.ready is None or a.ready()]
        if not able:
            if all(a.serves for a in waiting):
                return False
            timed = [a for a in waiting if a.until is not None]
            if not timed:
                names = ", ".join(a.name for a in waiting if not a.serves)
                raise AssertionError(f"nobody can go on, and these wait for ever: {names}")
            able = [min(timed, key=lambda a: a.until or 0.0)]
            self.now = max(self.now, able[0].until or 0.0)
        self.now += self.random.uniform(0.0, 0.01)
        actor = self.random.choice(able)
        self._resume(actor)
        if actor.error is not None:
            raise actor.error
        return True

    def _resume(self, actor: Actor) -> None:
        actor.turn.release()
        assert self.back.acquire(timeout=STUCK_S), f"{actor.name} waits for something real"

    # ---------------------------------------------------------------- for actors

    def pause(self) -> None:
        """Let others go on first, or not. Nothing outside a run."""
        self.wait(None)

    def wait(self, ready: Callable[[], bool] | None, timeout: float | None = None) -> bool:
        """Wait until `ready()`; False when that was not so within `timeout` seconds of the clock."""
        actor: Actor | None = getattr(self.current, "actor", None)
        if actor is None:
            assert ready is None or ready(), "outside a run nothing can be waited for"
            return True
        if actor.abandoned:
            raise Abandoned
        actor.ready = ready
        actor.until = None if timeout is None else self.now + timeout
        self.back.release()
        actor.turn.acquire()
        actor.ready, actor.until = None, None
        if actor.abandoned:
            raise Abandoned
        return ready is None or ready()

    # ---------------------------------------------------------------- in place of modules

    @property
    def threading(self) -> Any:
        """What stands for the module `threading` in the code that is driven."""
        return _Threading(self)

    @property
    def time(self) -> Any:
        """What stands for the module `time`."""
        return _Time(self)


class _Threading:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def Lock(self) -> Lock:
        return Lock(self._scheduler)

    def Condition(self, lock: Lock | None = None) -> Condition:
        return Condition(self._scheduler, lock or Lock(self._scheduler))


class _Time:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def monotonic(self) -> float:
        return self._scheduler.now


class Lock:
    """A lock whose taking is a point at which others may go on."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._scheduler.pause()
        limit = None if timeout < 0 else timeout
        if not self._scheduler.wait(lambda: not self._held, limit):
            return False
        self._held = True
        return True

    def release(self) -> None:
        assert self._held
        self._held = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """A condition that tells those who wait, and nobody who did not wait yet."""

    def __init__(self, scheduler: Scheduler, lock: Lock) -> None:
        self._scheduler = scheduler
        self._lock = lock
        self._waiting: list[list[bool]] = []
        self.__enter__ = lock.__enter__
        self.__exit__ = lock.__exit__

    def wait(self, timeout: float | None = None) -> bool:
        told = [False]
        self._waiting.append(told)
        self._lock.release()
        try:
            return self._scheduler.wait(lambda: told[0], timeout)
        finally:
            if told in self._waiting:
                self._waiting.remove(told)
            self._lock.acquire()

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        until = None if timeout is None else self._scheduler.now + timeout
        while not (answer := predicate()):
            left = None if until is None else until - self._scheduler.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return answer

    def notify(self, n: int = 1) -> None:
        for told in self._waiting[:n]:
            told[0] = True
        del self._waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Queue:
    """Stands for a `SerialQueue`: its calls run in order, in an actor of its own."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self._scheduler = scheduler
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.closed = False
        self.idle = True
        scheduler.spawn(name, self._serve, serves=True)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.append((future, call))
        return future

    def close(self, timeout: float) -> bool:
        self.closed = True
        return True

    def busy_for(self) -> float:
        return 0.0

    def _serve(self) -> None:
        while True:
            self._scheduler.wait(lambda: bool(self._jobs))
            future, call = self._jobs.popleft()
            self.idle = False
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
            self.idle = True

    @property
    def done(self) -> bool:
        """Whether nothing is queued or running."""
        return self.idle and not self._jobs
