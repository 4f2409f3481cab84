"""A transport for TENT that moves bytes inside one process and does what a script tells it."""

from __future__ import annotations

from tent_mock.clock import Clock, ManualClock, ThreadClock
from tent_mock.controller import Call, Controller, controller
from tent_mock.script import Do, On, Step
from tent_mock.settings import Settings
from tent_mock.transport import MockTransport, declare

__all__ = [
    "Call",
    "Clock",
    "Controller",
    "Do",
    "ManualClock",
    "MockTransport",
    "On",
    "Settings",
    "Step",
    "ThreadClock",
    "controller",
    "declare",
]
