"""A pytest plugin: what the conformance suite has proven of each transport, as a table at the end.

Load it with `-p tent_core.testing.report`, or with `pytest_plugins` in a conftest. It also makes the suite's
marks known. With pytest-xdist the table is the same.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

_CLAIM, _REFUSED = "tent_conformance", "tent_refused"
_MARKS = (
    "namespaces: needs root, to make network namespaces",
    "slow: takes more than about five seconds",
    "timeout: seconds that a test may take, for pytest-timeout",
)


def pytest_configure(config: pytest.Config) -> None:
    """Make the suite's marks known."""
    for mark in _MARKS:
        config.addinivalue_line("markers", mark)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note of each test of the suite which transport it is about, and of which part it is."""
    for item in items:
        cls = getattr(item, "cls", None)
        if cls is not None and getattr(cls, "conformance", False):
            part = _part_of(cls, item.name.partition("[")[0])
            item.user_properties.append((_CLAIM, [f"{cls.transport} ({cls.__name__})", part]))


def _part_of(cls: type, test: str) -> str:
    """The class of the suite that has the test; what a subclass adds is its own."""
    owner = next(base for base in cls.__mro__ if test in vars(base))
    return owner.__name__.lower() if owner.__module__.startswith("tent_core.") else "its own"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a table for each transport that was tested."""
    tables: dict[str, _Table] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            properties = getattr(report, "user_properties", ())
            claim = next((value for name, value in properties if name == _CLAIM), None)
            if claim is not None:
                table = tables.setdefault(claim[0], _Table())
                refused = [value for name, value in properties if name == _REFUSED]
                table.add(claim[1], outcome, report, refused)
    for name, table in sorted(tables.items()):
        terminalreporter.write_sep("=", f"conformance of {name}")
        for line in table.lines():
            terminalreporter.write_line(line)


class _Table:
    """What has become of the suite for one transport."""

    def __init__(self) -> None:
        self._proven: Counter[str] = Counter()
        self._refused: list[str] = []
        self._skipped: dict[str, Counter[str]] = {}
        self._failed: list[str] = []

    def add(self, part: str, outcome: str, report: Any, refused: list[str]) -> None:
        """One test."""
        name = report.nodeid.rpartition("::")[2]
        if outcome in ("failed", "error"):
            self._failed.append(f"{part}: {_sentence(name)}")
        elif outcome == "skipped":
            self._skipped.setdefault(_reason(report), Counter())[part] += 1
        elif refused:
            self._refused.extend(refused)
        else:
            self._proven[part] += 1

    def lines(self) -> list[str]:
        """The table, a line for each part that was proven, and for all else a line each."""
        rows = [("proven", f"{part}: {_tests(n)}") for part, n in self._proven.items()]
        rows += [("refused", what) for what in dict.fromkeys(self._refused)]
        for reason, parts in self._skipped.items():
            where = ", ".join(parts)
            rows.append(("not applicable", f"{where}: {reason} ({_tests(parts.total())})"))
        rows += [("FAILED", what) for what in self._failed]
        return [f"  {outcome:<15} {text}" for outcome, text in rows]


def _tests(count: int) -> str:
    return f"{count} test{'s' if count > 1 else ''}"


def _sentence(name: str) -> str:
    test, bracket, parameters = name.partition("[")
    return test.removeprefix("test_").replace("_", " ") + (f" [{parameters}" if bracket else "")


def _reason(report: Any) -> str:
    found = report.longrepr
    text = str(found[2]) if isinstance(found, tuple) else str(found)
    return text.removeprefix("Skipped: ")
