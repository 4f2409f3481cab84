"""Newcomers that wait for room, and who is asked to make it, without I/O.

A newcomer that finds the engine full stands in line: first come, first served. Meanwhile those that are idle
longest, by what their own engines report, are asked to retire: as many as newcomers wait, a few at a time.
One that is in use is never asked, and one that was asked and has found a use meanwhile just stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

HELD_SHARE = 0.8
"""How much of its caller's time a call may wait in line; what is left is for opening the session."""

HELD_MOST_S = 30.0
"""How long a call may wait in line, whatever time its caller has."""

ASKED_AT_ONCE = 8
"""So many are asked at the same time, at most."""

ANSWER_S = 1.0
"""How long one that was asked may take before another is asked in its place."""

AGAIN_S = 5.0
"""When one that was asked, and still is idle, is asked again."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in line, and when who holds it is sent away."""

    number: int
    until: float


class Pressure:
    """The line of one engine. Takes a clock (seconds). Not thread-safe: for the control thread."""

    def __init__(self, most_waiting: int) -> None:
        self._most = most_waiting
        self._drawn = 0
        self._line: list[Place] = []
        self._asked: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._line)

    def arrive(self, now: float, within: float | None) -> Place | None:
        """A newcomer with so many seconds (None: as many as it takes) gets in line; None: too many wait."""
        if len(self._line) >= self._most:
            return None
        self._drawn += 1
        held = HELD_MOST_S if within is None else min(HELD_MOST_S, within * HELD_SHARE)
        place = Place(self._drawn, now + held)
        self._line.append(place)
        return place

    def is_next(self, place: Place | None) -> bool:
        """Whether it is the turn of who holds `place`, or of who has just come when nobody waits."""
        return self._line[:1] == ([] if place is None else [place])

    def leave(self, place: Place) -> None:
        """Served, sent away, or gone by itself."""
        self._line.remove(place)

    def ask(self, now: float, idle: Mapping[int, float]) -> list[int]:
        """Whom to ask now; `idle` has the sessions that can be asked, and since when each is idle."""
        self._asked = {session: at for session, at in self._asked.items() if session in idle}
        awaited = sum(now - at < ANSWER_S for at in self._asked.values())
        wanted = min(len(self._line), ASKED_AT_ONCE) - awaited
        if wanted <= 0:
            return []
        free = [s for s in idle if s not in self._asked or now - self._asked[s] >= AGAIN_S]
        chosen = sorted(free, key=lambda session: (idle[session], session))[:wanted]
        self._asked.update(dict.fromkeys(chosen, now))
        return chosen
