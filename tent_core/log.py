"""Logging: structlog events with fields, on standard error, for each engine by itself.

Nothing is configured globally, neither at import nor by an engine: an application's own structlog and
logging settings are untouched, and two engines may log differently.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from tent_core.config import LogSettings

_PLAIN = re.compile(r"[\w.:/#@%+,\[\]()-]+", re.ASCII)


def configure(settings: LogSettings) -> Any:
    """The logger of one engine: a structlog bound logger; `logger.bind(peer=...)` is one with more fields."""
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    return structlog.wrap_logger(
        _StandardError(),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer() if settings.format == "json" else _console,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        context_class=dict,
    ).bind()


class _StandardError:
    """Writes to whatever `sys.stderr` is at that moment; one that is closed must not harm a transfer."""

    def msg(self, message: str) -> None:
        try:
            sys.stderr.write(message + "\n")
            sys.stderr.flush()
        except (AttributeError, OSError, ValueError):
            pass

    debug = info = warning = error = critical = msg


def _console(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
    """One line for people: time, level, event, fields. What came from outside cannot start another line."""
    stamp = str(event.pop("timestamp"))[11:23] + "Z"
    level, name = event.pop("level"), event.pop("event")
    trace = event.pop("exception", None)
    fields = "".join(f" {key}={_plain(value)}" for key, value in event.items())
    return f"{stamp} {level:<7} {_plain(name)}{fields}" + (f"\n{trace}" if trace else "")


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
