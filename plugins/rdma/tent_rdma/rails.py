"""Which rail the next work goes to, and which rails are not to be used for a while.

A rail is a pair of NICs, one here and one of the peer, known by its index. Nothing here reads a clock or
touches a device: the caller tells what was posted, what completed and what failed, each with the time, and
asks. One `Rails` belongs to one peer's endpoint, whose lock guards it: it is not thread-safe.

**Choice.** `predicted`: the rail on which the work would end first, (bytes in flight + length) / bandwidth *
penalty, where equal ones take turns. Every `probe_every`-th choice goes to the rail that was used the longest
ago instead, so that what is known of a slow rail is renewed. `round_robin`: one after the other.

**Bandwidth** is bytes over the time in which the rail had work: from the moment when something is posted on
an idle rail, or the last measurement, to a completion. The time since the work itself was posted will not do:
with a queue it is the length of the queue that would be measured, and the more a rail is used the slower it
would seem. Measurements are summed with decay, bytes and seconds apart, so that a few short messages, whose
time is latency, do not hide what long ones have shown. A rail that has completed nothing yet is assumed to be
as fast as the fastest known: it will be tried.

**Health.** A rail that fails `error_threshold` times within `error_window` pauses for `cooldown`. When that
time has passed it is on probation: one piece of work at a time, a completion makes it healthy, a failure
pauses it again for twice as long, up to `longest_cooldown`. A completion of what was posted before the pause
puts it on probation at once. The cool-down is halved for every `error_window`
that passes without a failure, as completions show, and so has to be earned back: a rail that works for a
moment between failures is not tried again and again. A port that goes down takes its rail out at once, and
one that comes up brings it back at once.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

DECAY = 0.8
"""Weight that each measurement leaves to what was measured before: about five of them count."""

SHORTEST_MEASUREMENT = 100e-6
"""Seconds of work that count as one measurement. Completions are polled in batches: those of one batch seem
to be no time apart, and belong to the time before the first of them."""


class RailSettings(Protocol):
    """What of the transport's settings is read here; times in seconds."""

    @property
    def rail_choice(self) -> str: ...
    @property
    def probe_every(self) -> int: ...
    @property
    def error_threshold(self) -> int: ...
    @property
    def error_window(self) -> float: ...
    @property
    def cooldown(self) -> float: ...
    @property
    def longest_cooldown(self) -> float: ...


class Condition(enum.Enum):
    """Of a rail."""

    HEALTHY = "healthy"
    PAUSED = "paused"
    PROBATION = "probation"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class RailState:
    """A rail, to be shown.

    `bandwidth` is in bytes per second, 0 if unknown; `returns_in` seconds until a paused one is tried.
    """

    condition: Condition
    bandwidth: float
    in_flight: int
    completed: int
    failures: int
    returns_in: float


class _Rail:
    __slots__ = (
        "began",
        "bytes",
        "completed",
        "cooldown",
        "down",
        "eased",
        "errors",
        "failures",
        "in_flight",
        "measured",
        "paused_until",
        "penalty",
        "probation",
        "seconds",
        "tried",
        "used",
    )

    def __init__(self, penalty: float, threshold: int) -> None:
        self.penalty = penalty
        self.in_flight = 0
        self.completed = 0
        self.failures = 0
        self.used = 0
        """Number of the choice that used it last."""
        # What has been measured, with decay, until `began`, and the seconds of it since the last decay.
        self.began = 0.0
        self.bytes = 0.0
        self.seconds = 0.0
        self.measured = 0.0
        # Health.
        self.down = False
        self.errors: deque[float] = deque(maxlen=threshold)
        self.paused_until = -math.inf
        self.probation = False
        """Paused, or not yet healthy after a pause."""
        self.tried = False
        """Whether anything was posted on probation."""
        self.cooldown = 0.0
        """Of the last pause, eased since; 0 if there was none."""
        self.eased = 0.0
        """When it failed last, or its cool-down was halved."""

    def open(self, now: float) -> bool:
        """Whether it may be used."""
        if self.down:
            return False
        return not self.probation or (now >= self.paused_until and self.in_flight == 0)


class Rails:
    """The rails to one peer. `now` is always time.monotonic() or a clock like it; it does not go back."""

    def __init__(self, count: int, penalties: Sequence[float], settings: RailSettings) -> None:
        """`penalties`: how much longer each rail is assumed to take than what is measured says, 1 or more."""
        if len(penalties) != count:
            raise ValueError(f"{count} rails and {len(penalties)} penalties")
        self._settings = settings
        self._rails = [_Rail(penalty, settings.error_threshold) for penalty in penalties]
        self._choices = 0
        self._round_robin = settings.rail_choice == "round_robin"

    def __len__(self) -> int:
        return len(self._rails)

    def choose(
        self,
        length: int,
        now: float,
        usable: Callable[[int], bool] | None = None,
        exclude: Collection[int] = (),
        penalties: Sequence[float] | None = None,
    ) -> int | None:
        """The rail for `length` bytes, or None if there is none: see `returns_at`.

        `usable` says what the caller knows against a rail (no connection, no room on its queue pairs);
        `exclude` are those that this work has been tried on; `penalties` replace those of the constructor for
        this choice, since memory at another place is near to other NICs. Nothing is counted as posted yet.
        """
        candidates = [
            index
            for index, rail in enumerate(self._rails)
            if rail.open(now) and index not in exclude and (usable is None or usable(index))
        ]
        if not candidates:
            return None
        self._choices += 1
        if len(candidates) == 1:
            chosen = candidates[0]
        elif self._round_robin or self._choices % self._settings.probe_every == 0:
            chosen = min(candidates, key=self._last_used)
        else:
            chosen = self._soonest(candidates, length, penalties)
        self._rails[chosen].used = self._choices
        return chosen

    def posted(self, rail: int, length: int, now: float) -> None:
        """`length` bytes were posted on `rail`; `completed` or `abandoned` will be called for them, once."""
        one = self._rails[rail]
        if one.in_flight == 0:
            one.began = now
        one.in_flight += length
        one.tried = one.probation and now >= one.paused_until

    def completed(self, rail: int, length: int, now: float) -> None:
        """`length` bytes that were posted on `rail` have arrived."""
        one = self._rails[rail]
        one.in_flight -= length
        one.completed += length
        elapsed = now - one.began
        one.began = now
        one.measured += elapsed
        if one.measured >= SHORTEST_MEASUREMENT:
            one.bytes *= DECAY
            one.seconds *= DECAY
            one.measured = 0.0
        one.bytes += length
        one.seconds += elapsed
        if one.probation:
            # What was posted before the pause ends it, but does not vouch for what comes.
            one.probation = not one.tried
            one.paused_until = min(one.paused_until, now)
            one.eased = now
        elif one.cooldown and now - one.eased >= self._settings.error_window:
            one.cooldown = one.cooldown / 2 if one.cooldown > self._settings.cooldown else 0.0
            one.eased = now

    def abandoned(self, rail: int, length: int, now: float) -> None:
        """`length` bytes that were posted on `rail` will not complete (flushed, their connection destroyed).

        Says nothing of the rail's health or speed: `failed` does, once for each connection that failed."""
        one = self._rails[rail]
        one.in_flight -= length
        one.began = now

    def failed(self, rail: int, now: float) -> bool:
        """Work on `rail`, or making a connection over it, failed. Whether that has paused it now."""
        one, settings = self._rails[rail], self._settings
        one.failures += 1
        if one.probation and now < one.paused_until:
            return False  # what was under way when it was paused
        one.eased = now
        one.errors.append(now)
        if not one.probation and not (
            len(one.errors) == settings.error_threshold
            and now - one.errors[0] <= settings.error_window
        ):
            return False
        one.errors.clear()
        longer = one.cooldown * 2 or settings.cooldown
        one.cooldown = min(longer, settings.longest_cooldown)
        one.paused_until = now + one.cooldown
        one.probation, one.tried = True, False
        return True

    def down(self, rail: int) -> None:
        """A port of it went down."""
        self._rails[rail].down = True

    def up(self, rail: int) -> None:
        """Both its ports are up. A pause ends too: it was for what the port has got over."""
        one = self._rails[rail]
        one.down = one.probation = False
        one.errors.clear()

    def returns_at(self, now: float) -> float | None:
        """When a rail may be used again, None if all are down.

        Where it is `now` and `choose` finds none nevertheless, the one that may be used is on probation and
        busy: its completion or failure is the next moment to ask.
        """
        times = [
            rail.paused_until if rail.probation else now for rail in self._rails if not rail.down
        ]
        return max(now, min(times)) if times else None

    def bandwidth(self, rail: int) -> float:
        """Bytes per second; 0 while nothing is known."""
        one = self._rails[rail]
        return one.bytes / one.seconds if one.seconds else 0.0

    def state(self, now: float) -> tuple[RailState, ...]:
        """All rails as they are, by index."""
        return tuple(
            RailState(
                condition=_condition(rail, now),
                bandwidth=self.bandwidth(index),
                in_flight=rail.in_flight,
                completed=rail.completed,
                failures=rail.failures,
                returns_in=max(0.0, rail.paused_until - now) if rail.probation else 0.0,
            )
            for index, rail in enumerate(self._rails)
        )

    def _last_used(self, index: int) -> int:
        return self._rails[index].used

    def _soonest(
        self, candidates: list[int], length: int, penalties: Sequence[float] | None
    ) -> int:
        rails = self._rails
        fastest = max((r.bytes / r.seconds for r in rails if r.seconds), default=1.0)
        best, best_time, best_used = candidates[0], math.inf, 0
        for index in candidates:
            rail = rails[index]
            known = rail.bytes / rail.seconds if rail.seconds else fastest
            penalty = rail.penalty if penalties is None else penalties[index]
            time = (rail.in_flight + length) / known * penalty
            if time < best_time or (time == best_time and rail.used < best_used):
                best, best_time, best_used = index, time, rail.used
        return best


def _condition(rail: _Rail, now: float) -> Condition:
    if rail.down:
        return Condition.DOWN
    if not rail.probation:
        return Condition.HEALTHY
    return Condition.PAUSED if now < rail.paused_until else Condition.PROBATION
