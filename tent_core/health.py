"""Which transports have been failing for one peer, and so go last for a while. Pure: it is told the time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HealthRules:
    """`failures` within `window` seconds pause a transport, for `pause` seconds at first, twice as long each
    time up to `longest`; the pause is halved for each `window` that passes without a failure."""

    failures: int = 3
    window: float = 10.0
    pause: float = 1.0
    longest: float = 60.0


class _State:
    __slots__ = ("length", "paused_until", "probe_until", "resting", "since", "times")

    def __init__(self, rules: HealthRules) -> None:
        self.times: deque[float] = deque(maxlen=rules.failures)
        self.resting = False
        """Paused, or not yet proven well after a pause."""
        self.paused_until = 0.0
        self.probe_until = 0.0
        """Until then one sub-batch is trying it."""
        self.length = 0.0
        """Length of the last pause, eased since."""
        self.since = 0.0
        """When it failed last, or its pause was eased."""


class Health:
    """The transports to one peer. Not thread-safe: its owner has a lock.

    A paused transport is never taken away, only put behind those that are well, so that work whose other
    candidates are gone still gets it. When its pause is over one sub-batch goes to it first; the others
    follow when that has succeeded.
    """

    def __init__(self, rules: HealthRules) -> None:
        self._rules = rules
        self._states: dict[str, _State] = {}

    @property
    def troubled(self) -> bool:
        """Whether any transport has failed: without that, `order` changes nothing."""
        return bool(self._states)

    def order(self, names: Sequence[str], now: float) -> tuple[str, ...]:
        """Candidates in the order in which to try them."""
        well: list[str] = []
        resting: list[tuple[float, str]] = []
        for name in names:
            state = self._states.get(name)
            if state is None or not state.resting:
                well.append(name)
            elif now >= state.paused_until and now >= state.probe_until:
                state.probe_until = now + state.length
                well.append(name)
            else:
                resting.append((state.paused_until, name))
        return (*well, *(name for _, name in sorted(resting)))

    def failed(self, name: str, now: float) -> float | None:
        """An attempt failed through the transport's fault; seconds of the pause that this began, if any."""
        rules = self._rules
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = _State(rules)
        if state.resting and now < state.paused_until:
            return None  # what was under way when the pause began
        state.since = now
        state.times.append(now)
        enough = len(state.times) == rules.failures and now - state.times[0] <= rules.window
        if not state.resting and not enough:
            return None
        state.times.clear()
        state.length = min(2 * state.length, rules.longest) if state.length else rules.pause
        state.paused_until = now + state.length
        state.resting = True
        return state.length

    def succeeded(self, name: str, now: float) -> None:
        """A sub-batch was carried."""
        state = self._states.get(name)
        if state is None:
            return
        if state.resting and now >= state.paused_until:
            state.resting = False
            state.times.clear()
            state.since = now
        elif now - state.since >= self._rules.window:
            state.length /= 2
            state.since = now
            if state.length < self._rules.pause:
                del self._states[name]

    def paused(self, now: float) -> dict[str, float]:
        """Seconds that each paused transport has still to wait, for people."""
        return {
            name: max(0.0, state.paused_until - now)
            for name, state in self._states.items()
            if state.resting
        }
