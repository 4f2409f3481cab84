"""What is to happen to which request or call: steps, decided by number and seed alone."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval

from tent_core.mistakes import NotAllowed
from tent_core.section import Section
from tent_core.types import Opcode
from tent_core.units import Seconds, Size


class On(enum.StrEnum):
    """What a step waits for: a request that is submitted, or a call of the contract."""

    REQUEST = "request"
    START = "start"
    ADD_BUFFERS = "add_buffers"
    CONNECT = "connect"
    BOOTSTRAP = "bootstrap"
    REFRESH = "refresh"
    CLOSE = "close"
    REMOVE_BUFFER = "remove_buffer"
    RELEASE = "release"
    STOP = "stop"
    EXCHANGE = "exchange"


class Do(enum.StrEnum):
    """What happens then; see the README for each."""

    REFUSE = "refuse"
    FAIL = "fail"
    DELAY = "delay"
    HANG = "hang"
    SHORT = "short"
    TWICE = "twice"
    LOSE = "lose"
    RAISE = "raise"
    CRASH = "crash"
    UNREACHABLE = "unreachable"
    DROP = "drop"


_OF_REQUESTS = frozenset(Do) - {Do.UNREACHABLE, Do.DROP}
_OF_CALLS = frozenset({Do.FAIL, Do.DELAY, Do.HANG, Do.CRASH})
_ALLOWED = {
    **dict.fromkeys(On, _OF_CALLS),
    On.REQUEST: _OF_REQUESTS,
    On.CONNECT: _OF_CALLS | {Do.UNREACHABLE},
    On.ADD_BUFFERS: _OF_CALLS | {Do.REFUSE},
    On.EXCHANGE: _OF_CALLS | {Do.REFUSE, Do.TWICE, Do.DROP},
}


@dataclass(frozen=True, slots=True)
class Step(Section):
    """One line of a script. `at` counts, from 1, what matches `on`, `peer`, `opcode` since it was added.

    A step is due at `at`, then at every `every`-th match, `times` times in all: by default once if `at` is
    given, else for ever. When due it acts, unless an earlier step has the event; with `chance` it then acts
    only so often, drawn anew each time from the seed and the number of the match.
    `seconds` and `jitter` (drawn likewise, from 0 to `jitter`) belong to `delay`; `moved` is how many bytes
    `short` moves of each request, half of them by default; `fenced` belongs to `fail`.
    """

    do: Do
    on: On = On.REQUEST
    at: Annotated[int, Ge(1)] | None = None
    every: Annotated[int, Ge(1)] = 1
    times: Annotated[int, Ge(1)] | None = None
    chance: Annotated[float, Interval(ge=0.0, le=1.0)] = 1.0
    peer: str | None = None
    opcode: Literal["read", "write"] | None = None
    seconds: Seconds = 0.0
    jitter: Seconds = 0.0
    moved: Size | None = None
    fenced: bool = True

    @classmethod
    def conflicts(cls, read: Mapping[str, Any]) -> Iterator[tuple[str, NotAllowed]]:
        """An action that the event cannot have, and an opcode where there is none."""
        do, on = read.get("do"), read.get("on")
        if on is None:
            return
        if do is not None and do not in _ALLOWED[on]:
            yield (
                "do",
                NotAllowed(f"{', '.join(sorted(_ALLOWED[on]))}: it has no meaning for on: {on}"),
            )
        if read.get("opcode") is not None and on is not On.REQUEST:
            yield "opcode", NotAllowed(f"null: it is of requests, and on: {on} has none")

    def matches(self, on: On, peer: str, opcode: Opcode | None) -> bool:
        """Whether this kind of event counts for the step."""
        return (
            self.on is on
            and (self.peer is None or self.peer == peer)
            and (self.opcode is None or (opcode is not None and self.opcode == opcode.name.lower()))
        )

    def due(self, number: int) -> bool:
        """Whether it is due at match `number`, from 1."""
        first = 1 if self.at is None else self.at
        limit = self.times if self.times is not None else (None if self.at is None else 1)
        turn, off = divmod(number - first, self.every)
        return turn >= 0 and off == 0 and (limit is None or turn < limit)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A step that acts, and the seconds drawn for it."""

    step: Step
    seconds: float


class Script:
    """Steps with their counts. The same seed and the same events give the same verdicts.

    Not thread-safe.
    """

    def __init__(self, steps: Sequence[Step] = (), seed: int = 0) -> None:
        self._seed = seed
        self._steps: list[Step] = []
        self._seen: list[int] = []
        for step in steps:
            self.add(step)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Step) -> None:
        """Append a step; its counts start now."""
        self._steps.append(step)
        self._seen.append(0)

    def clear(self) -> None:
        """Forget all steps: everything goes well from now on."""
        self._steps.clear()
        self._seen.clear()

    def decide(self, on: On, peer: str = "", opcode: Opcode | None = None) -> Verdict | None:
        """Count one event, by every step that it matches; the first that acts on it has it."""
        verdict: Verdict | None = None
        for index, step in enumerate(self._steps):
            if not step.matches(on, peer, opcode):
                continue
            self._seen[index] += 1
            if verdict is None and step.due(self._seen[index]):
                verdict = self._draw(index, step)
        return verdict

    def _draw(self, index: int, step: Step) -> Verdict | None:
        # Drawn from the number of the match, not from a stream: other events do not shift the outcome.
        draw = random.Random(f"{self._seed}/{index}/{self._seen[index]}")
        if draw.random() >= step.chance:
            return None
        return Verdict(step, step.seconds + step.jitter * draw.random())
