"""The errors of a replay."""

from __future__ import annotations

from tent_core.errors import TentError


class ReplayError(TentError):
    """The replay cannot start or go on; the message says what is wrong and what to do."""


class Refused(ReplayError):
    """The other side cannot go on; the message has its reason. The error itself is there."""


class TraceError(ReplayError):
    """A line of a trace is not what the format says; the message has file, line, found and allowed."""


class PoolTooSmall(ReplayError):
    """The blocks of one request do not fit into a pool; the message says which size would do."""
