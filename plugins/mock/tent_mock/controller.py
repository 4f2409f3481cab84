"""The hand on a running mock transport: add steps, let go of what hangs, move time, read the calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tent_core import models
from tent_core.errors import TransportError
from tent_core.types import Opcode
from tent_mock.clock import Clock, ManualClock
from tent_mock.script import Do, On, Script, Step, Verdict

CALLS_KEPT = 100_000
"""So many of the newest calls are remembered."""

HANG_LIMIT_S = 60.0
"""A call of the contract that hangs ends by itself after this time, lest it hold up a test run."""


class Call(NamedTuple):
    """One call of the contract as the transport got it; `detail` is what it was about, in a few words."""

    on: On
    peer: str = ""
    detail: str = ""


@dataclass(eq=False)
class Pending:
    """Something that is yet to happen: one of `run` and `abandon` is called, once, with no lock held."""

    owner: object
    run: Callable[[], None]
    abandon: Callable[[Exception], None]
    hangs: bool
    work: object = None
    """The submission that it belongs to, if any."""


class Controller:
    """Steers one mock transport of one engine, and remembers what was asked of it. Thread-safe."""

    def __init__(self, script: Script, clock: Clock) -> None:
        self.clock = clock
        self._script = script
        self._changed = threading.Condition()
        self._calls: deque[Call] = deque(maxlen=CALLS_KEPT)
        self._pending: dict[Pending, None] = {}
        self._suspects: dict[object, Callable[[Exception], None]] = {}

    # For tests

    def plan(self, do: Do | str, **fields: Any) -> None:
        """Add a step that counts from now: `plan("refuse")` is for ever, `plan("refuse", at=1)` once."""
        step: Step = models.make(Step, do=do, **fields)
        with self._changed:
            self._script.add(step)

    def clear(self) -> None:
        """Forget all steps. What hangs goes on hanging until `release`."""
        with self._changed:
            self._script.clear()

    def advance(self, seconds: float) -> int:
        """Let time pass on a manual clock; answers how many delayed things happened."""
        if not isinstance(self.clock, ManualClock):
            raise TypeError("this mock runs in real time; its settings need clock: manual")
        return self.clock.advance(seconds)

    def release(self, most: int | None = None) -> int:
        """Let go of what hangs and of late bytes, the oldest first; answers how many there were."""
        with self._changed:
            hanging = [pending for pending in self._pending if pending.hangs][:most]
        return sum(self._happen(pending) for pending in hanging)

    @property
    def held(self) -> int:
        """How many things hang (groups of requests that were submitted together count as one)."""
        with self._changed:
            return sum(pending.hangs for pending in self._pending)

    def wait_held(self, count: int, timeout: float = 10.0) -> None:
        """Wait until at least `count` things hang; AssertionError after `timeout` seconds."""
        with self._changed:
            reached = self._changed.wait_for(
                lambda: sum(pending.hangs for pending in self._pending) >= count, timeout
            )
        if not reached:
            raise AssertionError(f"{self.held} of {count} things hang after {timeout:g} s")

    def suspect(self, cause: Exception | None = None) -> int:
        """Tell the engine that each connected peer seems to have gone; answers how many were connected."""
        with self._changed:
            suspects = list(self._suspects.values())
        for suspect in suspects:
            suspect(cause or TransportError("the mock transport says that the peer has gone"))
        return len(suspects)

    @property
    def calls(self) -> tuple[Call, ...]:
        """What the engine has asked of the transport, in order; submits are one call each, of n requests."""
        with self._changed:
            return tuple(self._calls)

    def count(self, on: On | str, peer: str | None = None) -> int:
        """How many such calls there were, of that peer or of all."""
        return sum(call.on == on and peer in (None, call.peer) for call in self.calls)

    # For the transport

    def record(self, on: On, peer: str = "", detail: str = "") -> None:
        """Remember a call."""
        with self._changed:
            self._calls.append(Call(on, peer, detail))

    @property
    def scripted(self) -> bool:
        """Whether there is a script at all."""
        return len(self._script) > 0

    def verdicts(self, peer: str, opcode: Opcode, count: int) -> list[Verdict | None] | None:
        """What happens to each of `count` requests, or None when there is no script at all."""
        with self._changed:
            if not len(self._script):
                return None
            return [self._script.decide(On.REQUEST, peer, opcode) for _ in range(count)]

    def decided(self, on: On, peer: str = "", detail: str = "") -> Verdict | None:
        """Remember a call; what the script says of it is left to the caller, but for `crash`.

        Raises RuntimeError for that."""
        with self._changed:
            self._calls.append(Call(on, peer, detail))
            verdict = self._script.decide(on, peer)
        if verdict is not None and verdict.step.do is Do.CRASH:
            raise RuntimeError(f"the mock transport crashes in {on}, as scripted")
        return verdict

    def called(self, on: On, peer: str = "", detail: str = "") -> Verdict | None:
        """As `decided`, waiting where the script says so: the rest is what only the caller can do.

        Raises TransportError when nobody lets go of it, or RuntimeError for `crash`."""
        verdict = self.decided(on, peer, detail)
        if verdict is None:
            return None
        if verdict.step.do in (Do.HANG, Do.DELAY):
            self._wait(verdict, on)
        return verdict

    def _wait(self, verdict: Verdict, on: On) -> None:
        over = threading.Event()
        hangs = verdict.step.do is Do.HANG
        self.pend(Pending(self, over.set, lambda _: over.set(), hangs), verdict.seconds)
        if not over.wait(HANG_LIMIT_S):
            raise TransportError(f"nobody let go of {on} within {HANG_LIMIT_S:g} s")

    def pend(self, pending: Pending, seconds: float = 0.0) -> None:
        """Let it happen after `seconds`, or, if it hangs, when it is released."""
        with self._changed:
            self._pending[pending] = None
            self._changed.notify_all()
        if not pending.hangs:
            self.clock.call_later(seconds, lambda: self._fall_due(pending))

    def _fall_due(self, pending: Pending) -> None:
        self._happen(pending)

    def _happen(self, pending: Pending) -> bool:
        with self._changed:
            if pending not in self._pending:
                return False
            del self._pending[pending]
        pending.run()
        return True

    def connected(self, owner: object, suspect: Callable[[Exception], None]) -> None:
        """An endpoint was made; `suspect` is how to tell the engine that its peer seems to have gone."""
        with self._changed:
            self._suspects[owner] = suspect

    def abandon(self, owner: object, cause: Exception) -> None:
        """What was pending for `owner` does not happen any more; None is everything."""
        with self._changed:
            gone = self._take(lambda p: owner is None or p.owner is owner)
            self._suspects.pop(owner, None)
        for pending in gone:
            pending.abandon(cause)

    def cancel(self, work: object) -> list[Pending]:
        """What is pending of one submission does not happen any more: the caller abandons it."""
        with self._changed:
            return self._take(lambda p: p.work is work)

    def _take(self, which: Callable[[Pending], bool]) -> list[Pending]:
        gone = [pending for pending in self._pending if which(pending)]
        for pending in gone:
            del self._pending[pending]
        return gone

    def pending_of(self, owner: object) -> int:
        """How many things are yet to happen for `owner`."""
        with self._changed:
            return sum(pending.owner is owner for pending in self._pending)


_lock = threading.Lock()
_controllers: dict[tuple[str, bytes], Controller] = {}


def controller(engine: Any, name: str = "mock") -> Controller:
    """The controller of the mock transport `name` that runs in `engine` (anything with an `incarnation`).

    Raises LookupError when none runs there.
    """
    with _lock:
        found = _controllers.get((name, engine.incarnation))
    if found is None:
        raise LookupError(
            f"no mock transport {name!r} runs in {engine!r}; enable it under `transports`, "
            "or name it in the policy"
        )
    return found


def announce(name: str, incarnation: bytes, control: Controller) -> None:
    """A transport has started."""
    with _lock:
        _controllers[name, incarnation] = control


def withdraw(name: str, incarnation: bytes) -> None:
    """A transport has stopped."""
    with _lock:
        _controllers.pop((name, incarnation), None)
