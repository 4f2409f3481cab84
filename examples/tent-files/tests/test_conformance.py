"""The parts of the suite that a transport to files can pass, over real engines and files."""

from __future__ import annotations

from tent_core.testing.conformance import FileConformance


class TestConformance(FileConformance):
    transport = "files"


class TestConformanceOnTheDisk(FileConformance):
    transport = "files"
    settings = {"sync": True}  # noqa: RUF012
    largest = 32 << 20
