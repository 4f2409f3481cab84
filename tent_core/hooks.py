"""Calling the hooks of packages, each on a queue of its own: one that blocks harms itself only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import pluggy

from tent_core.errors import ClosedError
from tent_core.plugins import HOOKS, Registry
from tent_core.serial import SerialQueue

_SELECTING = "tent_select"
_NOT_OF_ENGINES = frozenset({"tent_transport", "tent_doctor"})
LIFECYCLE = HOOKS - _NOT_OF_ENGINES - {_SELECTING}
"""The hooks that tell of events, and are called on a queue."""


@dataclass(frozen=True, slots=True)
class HookReport:
    """How one package keeps up: events that wait, events that it has missed, and whether it is stuck now."""

    waiting: int
    dropped: int
    stuck: bool


class Hooks:
    """The hooks of all packages that the registry had loaded when this was made. Thread-safe.

    Calls of one package are made in the order of the events, in a thread that starts with the first. What
    a hook raises is logged. A call that takes longer than `stuck_s` seconds marks its package stuck: its
    events are dropped and counted until the call returns; so are those beyond `queue` that wait.
    """

    def __init__(
        self, registry: Registry, log: Any, *, stuck_s: float = 5.0, queue: int = 1024
    ) -> None:
        manager = registry.hooks
        packages = [
            _Package(name, plugin, manager, log.bind(plugin=name), stuck_s, queue)
            for name, plugin in manager.list_name_plugin()
        ]
        self._listeners: Mapping[str, tuple[_Package, ...]] = {
            hook: tuple(package for package in packages if hook in package.hooks)
            for hook in LIFECYCLE
        }
        # pluggy calls first what was registered last
        self._selectors = tuple(
            package for package in reversed(packages) if _SELECTING in package.hooks
        )
        self._packages = MappingProxyType(
            {package.name: package for package in packages if package.hooks}
        )
        self._log = log
        self.has_select = bool(self._selectors)
        """Whether any package implements `tent_select`; if not, `select` need not be called."""

    def has(self, hook: str) -> bool:
        """Whether any package implements this lifecycle hook."""
        return bool(self._listeners[hook])

    def fire(self, hook: str, **fields: Any) -> None:
        """Queue an event for each package that listens. Returns at once and raises nothing of theirs."""
        for package in self._listeners[hook]:
            package.post(hook, fields)

    def select(self, *, candidates: tuple[str, ...], **fields: Any) -> tuple[str, ...] | None:
        """The first answer of a package that overrules selection, or None. Waits, at most `stuck_s` for each.

        An answer that is not made of `candidates` is logged and passed over.
        """
        allowed = set(candidates)
        for package in self._selectors:
            answer = package.ask(_SELECTING, {**fields, "candidates": candidates})
            if answer is None:
                continue
            if (
                isinstance(answer, tuple)
                and len(set(answer)) == len(answer)
                and set(answer) <= allowed
            ):
                return answer
            self._log.error("hook_answer_wrong", plugin=package.name, answer=repr(answer))
        return None

    def report(self) -> Mapping[str, HookReport]:
        """How each package that has hooks keeps up, by its name."""
        return {name: package.report() for name, package in self._packages.items()}

    def close(self, timeout: float) -> None:
        """Deliver what is queued, within `timeout` seconds for all; then leave behind what is stuck."""
        deadline = time.monotonic() + timeout
        for package in self._packages.values():
            package.close(0.0)
        for package in self._packages.values():
            if not package.close(max(0.0, deadline - time.monotonic())):
                self._log.error(
                    "hook_left_behind", plugin=package.name, waiting=package.report().waiting
                )


class _Package:
    """The hooks of one package, their queue, and what was missed."""

    def __init__(
        self,
        name: str,
        plugin: object,
        manager: pluggy.PluginManager,
        log: Any,
        stuck_s: float,
        queue: int,
    ) -> None:
        others = [other for other in manager.get_plugins() if other is not plugin]
        callers = {
            caller.name for caller in manager.get_hookcallers(plugin) or ()
        } - _NOT_OF_ENGINES
        self.name = name
        self.hooks: Mapping[str, Callable[..., Any]] = {
            hook: manager.subset_hook_caller(hook, others) for hook in callers
        }
        self._calls = SerialQueue(f"tent-hooks-{name}")
        self._log = log
        self._stuck_s = stuck_s
        self._queue = queue
        self._lock = threading.Lock()
        self._waiting = 0
        self._dropped = 0
        self._missed = 0  # since the package last kept up

    @property
    def stuck(self) -> bool:
        return self._calls.busy_for() > self._stuck_s

    def post(self, hook: str, fields: Mapping[str, Any]) -> None:
        self._submit(hook, fields)

    def ask(self, hook: str, fields: Mapping[str, Any]) -> Any:
        if self._calls.inside:  # a hook of this package has called the engine
            return self._guarded(hook, fields)
        future = self._submit(hook, fields)
        if future is None:
            return None
        try:
            return future.result(self._stuck_s)
        except FutureTimeout:
            if future.cancel():
                self._done()
            self._log.error("hook_late", hook=hook, seconds=self._stuck_s)
            return None

    def close(self, timeout: float) -> bool:
        return self._calls.close(timeout)

    def report(self) -> HookReport:
        with self._lock:
            return HookReport(self._waiting, self._dropped, self.stuck)

    def _submit(self, hook: str, fields: Mapping[str, Any]) -> Future[Any] | None:
        stuck = self.stuck
        with self._lock:
            drop = stuck or self._waiting >= self._queue
            first = drop and not self._missed
            if drop:
                self._missed += 1
                self._dropped += 1
            else:
                self._waiting += 1
        if first:
            self._log.error(
                "hook_stuck" if stuck else "hook_queue_full", missed=hook, waiting=self._waiting
            )
        if drop:
            return None
        try:
            return self._calls.submit(partial(self._call, hook, fields))
        except ClosedError:
            with self._lock:
                self._waiting -= 1
            return None

    def _call(self, hook: str, fields: Mapping[str, Any]) -> Any:
        try:
            return self._guarded(hook, fields)
        finally:
            self._done()

    def _guarded(self, hook: str, fields: Mapping[str, Any]) -> Any:
        try:
            return self.hooks[hook](**fields)
        except BaseException:
            self._log.error("hook_raised", hook=hook, exc_info=True)
            return None

    def _done(self) -> None:
        with self._lock:
            self._waiting -= 1
            missed, self._missed = self._missed, 0
        if missed:
            self._log.warning("hook_recovered", missed=missed)
