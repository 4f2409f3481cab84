"""Hooks: called in order, each package by itself; what raises, blocks or floods harms itself only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from tent_core.hooks import LIFECYCLE, HookReport, Hooks
from tent_core.hookspecs import hookimpl
from tent_core.plugins import Registry
from tent_core.transport import Transport, TransportDeclaration
from tent_core.types import Capabilities

LONG = 20.0
"""Seconds after which a test has hung."""


class Settings(BaseModel, extra="forbid"):
    pass


def factory() -> Transport:
    raise AssertionError("nothing is started here")


class Package:
    """A package with a transport and no other hooks."""

    def __init__(self, name: str = "one", number: int = 1001) -> None:
        self.declaration = TransportDeclaration(name, number, factory, Settings, Capabilities())
        self.events: list[Any] = []

    @hookimpl
    def tent_transport(self) -> TransportDeclaration:
        return self.declaration


class Listener(Package):
    @hookimpl
    def tent_peer_departed(self, peer: Any, reason: str) -> None:
        self.events.append((peer, reason))

    @hookimpl
    def tent_engine_stopping(self) -> None:
        self.events.append("stopping")


class Raising(Package):
    @hookimpl
    def tent_peer_departed(self, peer: Any) -> None:
        self.events.append(peer)
        raise SystemExit(f"no more after {peer}")


class Blocking(Package):
    """Blocks in its hook until `release`."""

    def __init__(self, name: str = "blocking", number: int = 1002) -> None:
        super().__init__(name, number)
        self.entered = threading.Event()
        self.release = threading.Event()

    @hookimpl
    def tent_peer_departed(self, peer: Any) -> None:
        self.entered.set()
        assert self.release.wait(LONG)
        self.events.append(peer)

    @hookimpl
    def tent_select(self, candidates: tuple[str, ...]) -> Any:
        self.entered.set()
        assert self.release.wait(LONG)
        return candidates[:1]


class Selecting(Package):
    def __init__(self, answer: Any, name: str = "selecting", number: int = 1003) -> None:
        super().__init__(name, number)
        self.answer = answer

    @hookimpl
    def tent_select(self, candidates: tuple[str, ...], total: int) -> Any:
        self.events.append((candidates, total))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Log:
    """Remembers events; `bind` shares the memory."""

    def __init__(self, bound: dict[str, Any] | None = None, lines: list[Any] | None = None) -> None:
        self.bound = bound or {}
        self.lines: list[tuple[str, dict[str, Any]]] = [] if lines is None else lines

    def bind(self, **fields: Any) -> Log:
        return Log({**self.bound, **fields}, self.lines)

    def error(self, event: str, **fields: Any) -> None:
        self.lines.append((event, {**self.bound, **fields}))

    warning = info = error

    def __contains__(self, event: str) -> bool:
        return any(name == event for name, _ in self.lines)


@pytest.fixture
def log() -> Log:
    return Log()


Make = Callable[..., Hooks]


@pytest.fixture
def make(log: Log) -> Iterator[Make]:
    made: list[tuple[Hooks, tuple[Package, ...]]] = []

    def make(*packages: Package, **options: Any) -> Hooks:
        registry = Registry.of(*packages)
        for name in registry.names():
            registry.load(name)
        hooks = Hooks(registry, log, **options)
        made.append((hooks, packages))
        return hooks

    yield make
    for hooks, packages in made:
        for package in packages:
            if isinstance(package, Blocking):
                package.release.set()
        hooks.close(LONG)


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def ask(hooks: Hooks) -> tuple[str, ...] | None:
    candidates = ("shm", "tcp")
    return hooks.select(
        engine=None, peer=None, candidates=candidates, entry="any", total=5, requests=1
    )


def threads() -> set[str]:
    return {
        thread.name for thread in threading.enumerate() if thread.name.startswith("tent-hooks-")
    }


def test_a_package_gets_its_events_in_order_with_the_fields_it_asks_for(make: Make) -> None:
    package = Listener()
    hooks = make(package)
    for i in range(200):
        hooks.fire("tent_peer_departed", engine=None, peer=i, reason="gone")
    hooks.fire("tent_engine_stopping", engine=None)
    hooks.close(LONG)
    assert package.events == [*((i, "gone") for i in range(200)), "stopping"]


def test_a_package_without_lifecycle_hooks_has_no_thread_and_others_get_one_with_the_first_event(
    make: Make,
) -> None:
    hooks = make(Package("quiet", 1001), Listener("loud", 1002))
    before = threads()
    hooks.fire("tent_segment_closed", engine=None, peer=None)
    assert threads() == before
    hooks.fire("tent_engine_stopping", engine=None)
    assert threads() - before == {"tent-hooks-loud"}
    hooks.close(LONG)
    assert threads() == before
    assert set(hooks.report()) == {"loud"}


def test_it_is_known_which_hooks_anybody_implements(make: Make) -> None:
    hooks = make(Listener())
    assert hooks.has("tent_peer_departed")
    assert not hooks.has("tent_transfers_finished")
    assert not hooks.has_select
    assert make(Selecting(None)).has_select
    assert "tent_select" not in LIFECYCLE
    assert "tent_transport" not in LIFECYCLE
    with pytest.raises(KeyError):
        hooks.fire("tent_peer_vanished", engine=None)


def test_what_a_hook_raises_is_logged_and_stops_neither_it_nor_others(make: Make, log: Log) -> None:
    raising, listener = Raising("raising", 1001), Listener("listener", 1002)
    hooks = make(raising, listener)
    hooks.fire("tent_peer_departed", engine=None, peer=1, reason="gone")
    hooks.fire("tent_peer_departed", engine=None, peer=2, reason="gone")
    hooks.close(LONG)
    assert raising.events == [1, 2]
    assert listener.events == [(1, "gone"), (2, "gone")]
    raised = [fields for event, fields in log.lines if event == "hook_raised"]
    assert [fields["plugin"] for fields in raised] == ["raising", "raising"]
    assert raised[0]["hook"] == "tent_peer_departed"
    assert raised[0]["exc_info"]


def test_a_hook_that_blocks_is_stuck_and_its_events_are_dropped_until_it_returns(
    make: Make, log: Log
) -> None:
    blocking, listener = Blocking(), Listener()
    hooks = make(blocking, listener, stuck_s=0.05)
    hooks.fire("tent_peer_departed", engine=None, peer=0, reason="gone")
    assert blocking.entered.wait(LONG)
    eventually(lambda: hooks.report()["blocking"].stuck)
    for peer in (1, 2, 3):
        hooks.fire("tent_peer_departed", engine=None, peer=peer, reason="gone")
    assert hooks.report()["blocking"] == HookReport(waiting=1, dropped=3, stuck=True)
    eventually(lambda: len(listener.events) == 4)
    blocking.release.set()
    eventually(lambda: "hook_recovered" in log)
    hooks.fire("tent_peer_departed", engine=None, peer=4, reason="gone")
    hooks.close(LONG)
    assert blocking.events == [0, 4]
    told = [(event, fields["missed"]) for event, fields in log.lines]
    assert told == [("hook_stuck", "tent_peer_departed"), ("hook_recovered", 3)]
    assert hooks.report()["blocking"].dropped == 3


def test_events_beyond_the_queue_are_dropped_and_counted(make: Make, log: Log) -> None:
    blocking = Blocking()
    hooks = make(blocking, queue=3)
    for peer in range(10):
        hooks.fire("tent_peer_departed", engine=None, peer=peer, reason="gone")
    assert hooks.report()["blocking"] == HookReport(waiting=3, dropped=7, stuck=False)
    assert "hook_queue_full" in log
    blocking.release.set()
    hooks.close(LONG)
    assert blocking.events == [0, 1, 2]


def test_close_is_bounded_though_a_hook_blocks_and_lets_the_others_finish(
    make: Make, log: Log
) -> None:
    blocking, listener = Blocking(), Listener()
    hooks = make(blocking, listener, stuck_s=0.01)
    hooks.fire("tent_peer_departed", engine=None, peer=0, reason="gone")
    assert blocking.entered.wait(LONG)
    hooks.close(0.3)
    assert listener.events == [(0, "gone")]
    left = [fields for event, fields in log.lines if event == "hook_left_behind"]
    assert [fields["plugin"] for fields in left] == ["blocking"]


def test_after_close_events_go_nowhere(make: Make) -> None:
    listener = Listener()
    hooks = make(listener, Selecting(("tcp",)))
    hooks.close(LONG)
    hooks.fire("tent_engine_stopping", engine=None)
    assert ask(hooks) is None
    assert listener.events == []


# ---------------------------------------------------------------- the hook that overrules selection


@pytest.mark.parametrize("answer", [None, ("tcp", "shm"), ("tcp",), ()])
def test_a_package_may_reorder_or_reduce_candidates_or_leave_them(make: Make, answer: Any) -> None:
    package = Selecting(answer)
    hooks = make(package)
    assert ask(hooks) == answer
    assert package.events == [(("shm", "tcp"), 5)]


def test_packages_are_asked_until_one_has_an_answer(make: Make) -> None:
    asked_last, answering, silent = (
        Selecting(("shm",), "a", 1001),
        Selecting(("tcp",), "b", 1002),
        Selecting(None, "c", 1003),
    )
    hooks = make(
        asked_last, answering, silent
    )  # loaded in this order, and asked in the reverse one
    assert ask(hooks) == ("tcp",)
    assert (len(silent.events), len(answering.events), len(asked_last.events)) == (1, 1, 0)


@pytest.mark.parametrize(
    "answer", [("rdma",), ("tcp", "tcp"), ["tcp"], "tcp", ValueError("no idea")]
)
def test_an_answer_that_is_not_made_of_candidates_is_logged_and_passed_over(
    make: Make, log: Log, answer: Any
) -> None:
    hooks = make(Selecting(answer))
    assert ask(hooks) is None
    assert log.lines[0][0] in ("hook_answer_wrong", "hook_raised")
    assert log.lines[0][1]["plugin"] == "selecting"


def test_selection_waits_for_a_blocking_package_once_and_not_again_while_it_is_stuck(
    make: Make, log: Log
) -> None:
    blocking = Blocking()
    hooks = make(blocking, stuck_s=0.05)
    assert ask(hooks) is None
    assert "hook_late" in log
    eventually(lambda: hooks.report()["blocking"].stuck)
    assert ask(hooks) is None
    assert hooks.report()["blocking"].dropped == 1
    blocking.release.set()
    eventually(lambda: hooks.report()["blocking"].waiting == 0)
    assert ask(hooks) == ("shm",)


def test_a_question_that_waited_too_long_in_the_queue_is_withdrawn(make: Make) -> None:
    blocking = Blocking()
    hooks = make(blocking, stuck_s=0.2)
    hooks.fire("tent_peer_departed", engine=None, peer=0, reason="gone")
    assert ask(hooks) is None
    assert hooks.report()["blocking"].waiting == 1
    blocking.release.set()
    eventually(lambda: hooks.report()["blocking"].waiting == 0)


def test_a_hook_that_makes_a_transfer_may_be_asked_from_within(make: Make) -> None:
    class Nested(Selecting):
        @hookimpl
        def tent_engine_started(self, engine: Hooks) -> None:
            self.events.append(ask(engine))

    package = Nested(("tcp",))
    hooks = make(package)
    hooks.fire("tent_engine_started", engine=hooks)
    hooks.close(LONG)
    assert package.events == [(("shm", "tcp"), 5), ("tcp",)]
