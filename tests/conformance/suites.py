"""The shared suite for each transport with a fault. Not collected by itself: `test_faults.py` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from tent_core.plugins import Registry
from tent_core.testing.conformance import TransportConformance
from tent_mock.transport import NAME, declare

from . import broken


class _Suite(TransportConformance):
    transport = NAME
    kind: ClassVar[type[broken.Broken]]
    settles_s = 0.5
    lets_go_s = 1.0

    @classmethod
    def registry(cls) -> Registry:
        return Registry.of(replace(declare(**cls.kind.claims), factory=cls.kind))

    @pytest.fixture(autouse=True)
    def _undone(self) -> Iterator[None]:
        yield
        while broken.undo:
            broken.undo.pop()()


def _suites() -> Iterator[tuple[str, Any]]:
    for kind in vars(broken).values():
        if isinstance(kind, type) and issubclass(kind, broken.Broken):
            name = f"Test{kind.__name__}"
            yield name, type(name, (_Suite,), {"kind": kind, "__module__": __name__})


globals().update(_suites())
