"""Names at which nobody answered, without I/O: who asks for one fails at once, and one prober looks for it.

    failed --> silent --> answered, or nobody asked for a while, or too many others: forgotten

The first failure is the real one, after a real attempt, and so is the first call after a name is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

NAMES_KEPT = 1024
"""So many names are remembered."""

FORGET_S = 60.0
"""A name for which nobody has asked for so long is not looked for any more."""

LOOK_EVERY_S = 0.2
"""A caller may have a name looked for out of turn, unless that was done so short a time ago."""


@dataclass(slots=True)
class _Silent:
    since: float
    asked: float
    why: str
    pause: float
    looked: float


class Silence:
    """The silent names of one engine. Takes a clock (seconds). Not thread-safe: for the control thread.

    A prober waits `first_s` before its first look, and twice as long before each next one, up to `longest_s`.
    `most` names are remembered; beyond that, the one that was not asked for longest is forgotten.
    """

    def __init__(self, first_s: float, longest_s: float, most: int = NAMES_KEPT) -> None:
        self._first_s = min(first_s, longest_s)
        self._longest_s = longest_s
        self._most = most
        self._names: dict[str, _Silent] = {}

    def __len__(self) -> int:
        return len(self._names)

    def failed(self, now: float, name: str, why: str) -> str | None:
        """Nobody answered at `name`: it shall be looked for. Answers another one that shall be no more."""
        known = self._names.get(name)
        if known is not None:
            known.asked = now
            return None
        self._names[name] = _Silent(now, now, why, self._first_s, now)
        if len(self._names) <= self._most:
            return None
        oldest = min(self._names, key=lambda n: (self._names[n].asked, n == name))
        del self._names[oldest]
        return oldest

    def asked(self, now: float, name: str) -> str | None:
        """Somebody needs `name`: what to tell them, or None when it is to be tried for real."""
        silent = self._names.get(name)
        if silent is None:
            return None
        silent.asked = now
        return (
            f"{silent.why} (that was {now - silent.since:.1f} s ago; it is being looked for, at least every "
            f"{self._longest_s:g} s, and until it answers every call fails at once)"
        )

    def may_look(self, now: float, name: str) -> bool:
        """Whether a caller is to look for `name` out of turn: it may have come back since the prober did."""
        silent = self._names.get(name)
        if silent is None or now - silent.looked < LOOK_EVERY_S:
            return False
        silent.looked = now
        return True

    def pause(self, now: float, name: str) -> float | None:
        """How long its prober waits before it looks again; None: nobody needs `name` now, or it is back."""
        silent = self._names.get(name)
        if silent is None:
            return None
        if now - silent.asked >= FORGET_S:
            del self._names[name]
            return None
        pause, silent.pause = silent.pause, min(2 * silent.pause, self._longest_s)
        return pause

    def answered(self, name: str) -> None:
        """Somebody answers there: the next call is made for real."""
        self._names.pop(name, None)
