"""Logging: events with fields, on standard error, for each engine by itself.

Nothing is configured globally, neither at import nor by an engine: an application's own logging settings are
untouched, and two engines may log differently. A `Logger` has the methods of a bound logger of structlog, so
that one of either kind serves wherever a log is given; importing structlog imports rich where that is
installed, which took 5 MiB of every engine.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tent_core.config import LogSettings

_PLAIN = re.compile(r"[\w.:/#@%+,\[\]()-]+", re.ASCII)
LEVELS = ("debug", "info", "warning", "error", "critical")
"""Ascending."""

Write = Callable[[str, str, dict[str, Any]], None]
"""Takes an event: its level, its name, its fields."""


class Logger:
    """Passes events of a level or above to `write`. Immutable, so that it is as thread-safe as `write`.

    An event has a name in snake_case and fields: `log.info("peer_departed", segment=name, reason=reason)`.
    `exc_info`, an error or True for the one that is being handled, adds its traceback.
    """

    __slots__ = ("_fields", "_least", "_write")

    def __init__(
        self, write: Write, level: str = "debug", fields: Mapping[str, Any] | None = None
    ) -> None:
        self._write = write
        self._least = LEVELS.index(level)
        self._fields = dict(fields or {})

    def bind(self, **fields: Any) -> Logger:
        """One whose events have these fields, too."""
        return Logger(self._write, LEVELS[self._least], {**self._fields, **fields})

    def debug(self, event: str, /, **fields: Any) -> None:
        """What only who looks for a fault wants to know."""
        self._tell(0, event, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        """What happened."""
        self._tell(1, event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        """What went wrong and was dealt with."""
        self._tell(2, event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        """What should not have happened."""
        self._tell(3, event, fields)

    def critical(self, event: str, /, **fields: Any) -> None:
        """What nobody can deal with."""
        self._tell(4, event, fields)

    def exception(self, event: str, /, **fields: Any) -> None:
        """An error, with the traceback of what is being handled."""
        self._tell(3, event, {"exc_info": True, **fields})

    def _tell(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if level < self._least:
            return
        told = {**self._fields, **fields}
        error = told.pop("exc_info", None)
        if error is True:
            error = sys.exception()
        if isinstance(error, BaseException):
            told["exception"] = "".join(traceback.format_exception(error)).rstrip("\n")
        self._write(LEVELS[level], event, told)


def configure(settings: LogSettings) -> Logger:
    """The logger of one engine; `logger.bind(peer=...)` is one with more fields."""
    return Logger(_as_json if settings.format == "json" else _for_people, settings.level)


def _as_json(level: str, event: str, fields: dict[str, Any]) -> None:
    """One document: the fields, `event`, `level` and `timestamp`."""
    now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    _print(json.dumps({**fields, "event": event, "level": level, "timestamp": now}, default=repr))


def _for_people(level: str, event: str, fields: dict[str, Any]) -> None:
    """One line: time, level, event, fields. What came from outside cannot start another line."""
    stamp = datetime.now(UTC).strftime("%H:%M:%S.%f")[:-3] + "Z"
    trace = fields.pop("exception", None)
    said = "".join(f" {key}={_plain(value)}" for key, value in fields.items())
    _print(f"{stamp} {level:<7} {_plain(event)}{said}" + (f"\n{trace}" if trace else ""))


def _print(text: str) -> None:
    """To whatever `sys.stderr` is at that moment; one that is closed must not harm a transfer."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        pass


def _plain(value: object) -> str:
    if isinstance(value, (list, tuple, set, frozenset)):
        return f"[{','.join(map(_plain, value))}]"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else repr(text)


@dataclass(slots=True)
class _Repeats:
    """What has been kept back since the last line about failures of one kind."""

    since: float
    count: int = 0
    newest: Mapping[str, Any] = field(default_factory=dict)


class RateLimited:
    """Logs the first failure of a kind at once, then at most one line in `every_s` with a count. Thread-safe.

    Failures of one event that agree in the fields `by` (those that are given) are of a kind; a line shows
    the other fields of the newest one. At a new kind those are forgotten that were last logged `every_s`
    ago, each with a line if it has a count, and so is the one that was silent longest beyond `capacity`.
    """

    def __init__(
        self,
        log: Any,
        *,
        by: Sequence[str] = ("transport", "peer"),
        every_s: float = 30.0,
        capacity: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._by = tuple(by)
        self._every = every_s
        self._capacity = capacity
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: OrderedDict[tuple[str, ...], _Repeats] = OrderedDict()

    def warning(self, event: str, **fields: Any) -> None:
        """Something failed, again or for the first time."""
        kind = (event, *(str(fields.get(name)) for name in self._by))
        now = self._clock()
        forgotten: list[tuple[tuple[str, ...], _Repeats]] = []
        with self._lock:
            repeats = self._kinds.pop(kind, None)
            quiet = repeats is not None and now - repeats.since < self._every
            if repeats is not None and quiet:
                self._kinds[kind] = _Repeats(repeats.since, repeats.count + 1, fields)
            else:
                while self._kinds and self._is_over(next(iter(self._kinds.values())), now):
                    forgotten.append(self._kinds.popitem(last=False))
                self._kinds[kind] = _Repeats(now)
        for (name, *_), over in forgotten:
            self._tell(name, over)
        if repeats is None:
            self._log.warning(event, **fields)
        elif not quiet:
            self._tell(event, _Repeats(now, repeats.count + 1, fields))

    def _is_over(self, repeats: _Repeats, now: float) -> bool:
        return now - repeats.since >= self._every or len(self._kinds) >= self._capacity

    def flush(self) -> None:
        """Log the counts that are left, and forget all kinds."""
        with self._lock:
            kinds, self._kinds = self._kinds, OrderedDict()
        for kind, repeats in kinds.items():
            self._tell(kind[0], repeats)

    def _tell(self, event: str, repeats: _Repeats) -> None:
        """A line about `count` failures, the newest included, that were kept back since the last one."""
        if repeats.count == 1:
            self._log.warning(event, **repeats.newest)
        elif repeats.count:
            self._log.warning(event, **repeats.newest, repeated=repeats.count)
