"""One mistake in a configuration: where it is, what was found, what is allowed, and what was likely meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Path = tuple[str | int, ...]
"""Keys and list indexes that lead from the top of a configuration to a value in it."""

_LONGEST = 80


@dataclass(frozen=True, slots=True)
class Mistake:
    """`found` and `allowed` are phrases; `line` counts from 1, and is None in a dict, which has none."""

    key: str
    found: str
    allowed: str
    nearest: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        where = ", ".join(filter(None, (f"line {self.line}" if self.line else "", self.key)))
        hint = f"; did you mean {self.nearest!r}?" if self.nearest else ""
        return f"{where or 'document'}: found {self.found}; allowed: {self.allowed}{hint}"


class NotAllowed(ValueError):
    """A value that may not be used; the text is what is allowed, `nearest` the likely intention or None.

    Validators of settings models raise it (or any ValueError): what was found, and where, is added for them.
    """

    def __init__(self, allowed: str, nearest: str | None = None) -> None:
        self.allowed = allowed
        self.nearest = nearest
        super().__init__(allowed)


def nearest(word: object, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice that is spelled most like `word`, regardless of case; None if none is, or it is no text."""
    if not isinstance(word, str):
        return None
    import difflib  # here: most programs make no mistake in it

    written = word[:100].lower()
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(written, by_lower, n=5, cutoff=cutoff)

    def likeness(choice: str) -> tuple[float, bool]:
        same_letters = sorted(choice) == sorted(
            written
        )  # two that were swapped: tpc is tcp, not tpu
        return difflib.SequenceMatcher(None, choice, written).ratio(), same_letters

    return by_lower[max(close, key=likeness)] if close else None


def shortened(text: str) -> str:
    """Text that is short enough for a message, whatever a file may hold."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def dotted(path: Path) -> str:
    """A path as people write it: `policy[0].transports[1]`."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{shortened(step)}" for step in path)
    return "".join(steps).removeprefix(".")


def described(value: object) -> str:
    """A value much as YAML would write it, short."""
    if isinstance(value, Mapping):
        return f"a mapping of {len(value)}" if value else "an empty mapping"
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return f"a list of {len(value)}" if value else "an empty list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(shortened(value)) if isinstance(value, str) else shortened(repr(value))
