"""Nothing public changes by accident."""

from __future__ import annotations

import difflib

from .surface import RECORDED, lines

MEANT = (
    "if it is meant, see docs/compatibility.md for what may change when, record it with "
    "`python tests/public/surface.py`, and say so in CHANGELOG.md"
)


def test_public_names_signatures_and_wire_messages_are_as_recorded() -> None:
    recorded = RECORDED.read_text().splitlines()
    changes = [
        line
        for line in difflib.unified_diff(recorded, lines(), "recorded", "now", lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    assert not changes, "\n".join(["the public surface has changed:", *changes, MEANT])


def test_the_record_has_what_packages_are_written_against() -> None:
    recorded = RECORDED.read_text()
    for name in ("tent_core.Engine.allocate(", "tent_core.transport.Endpoint.submit(", "wire "):
        assert name in recorded
