"""Figures that have to be met: each is printed beside its bound, and one that is missed fails the run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that was found, and the bound that it has to keep: at most that, or at least."""

    what: str
    found: float
    bound: float
    unit: str = ""
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether it keeps its bound."""
        return self.found >= self.bound if self.at_least else self.found <= self.bound

    def as_json(self) -> dict[str, Any]:
        """For a document."""
        return {**asdict(self), "met": self.met}

    def __str__(self) -> str:
        side = "at least" if self.at_least else "at most"
        unit = f" {self.unit}" if self.unit else ""
        verdict = "met" if self.met else "MISSED"
        return f"{verdict:6}  {self.what}: {self.found:.3g}{unit}, {side} {self.bound:g}"


def of_json(document: Mapping[str, Any]) -> list[Figure]:
    """The figures in the document that a benchmark printed with `--json`."""
    return [
        Figure(**{name: value for name, value in figure.items() if name != "met"})
        for figure in document["figures"]
    ]


def missed(figures: Iterable[Figure]) -> list[Figure]:
    """Those that do not keep their bounds."""
    return [figure for figure in figures if not figure.met]


def conclude(figures: list[Figure]) -> int:
    """Say on stderr which figures are missed; the exit status of the run."""
    wrong = missed(figures)
    for figure in wrong:
        print(figure, file=sys.stderr)
    print(f"{len(figures) - len(wrong)} of {len(figures)} figures are met", file=sys.stderr)
    return 1 if wrong else 0
