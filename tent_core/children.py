"""Spawned processes whose events and errors reach their parent, and which never outlive it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from tent_core.errors import TentError, WaitTimeout

_STOP_S = 3.0


class ChildFailed(TentError):
    """A child process raised an error or died; `trace` is the child's traceback, if it could still tell."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class NobodyLeft(ChildFailed):
    """Every child has ended without an error, and without saying what was waited for."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a child said: who, what kind, and any picklable value."""

    child: str
    kind: str
    value: Any


class Link:
    """The child's side: says events to the parent and hears its commands."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def say(self, kind: str, value: Any = None) -> None:
        """Tell the parent."""
        self._connection.send((kind, value))

    def hear(self, timeout: float) -> Any:
        """The parent's next command. Raises WaitTimeout."""
        if not self._connection.poll(timeout):
            raise WaitTimeout(f"the parent process gave no command for {timeout:g} s")
        return self._connection.recv()


class Child:
    """A spawned process that runs `target(link, *args)`. `target` and its arguments must be picklable.

    What it raises arrives as ChildFailed in `Children.next_event`. It ignores SIGINT, since the
    parent ends it, and exits at once when the parent's process has ended.
    """

    def __init__(self, name: str, target: Callable[..., None], *args: Any) -> None:
        self.name = name
        spawn = multiprocessing.get_context("spawn")
        self.connection, theirs = spawn.Pipe()
        # Not `daemon`: a transport may start processes of its own, which daemonic ones must not.
        self.process = spawn.Process(
            target=_main,
            args=(theirs, os.getpid(), target, args),
            name=f"tent-{name}",
            daemon=False,
        )
        self.process.start()
        theirs.close()

    def tell(self, command: Any) -> None:
        """Give the child a command, for its `Link.hear`. That it has died shows in `next_event`."""
        with contextlib.suppress(OSError):
            self.connection.send(command)

    def stop(self) -> None:
        """End it within some seconds: wait if it has finished already, else SIGTERM, else SIGKILL."""
        self.connection.close()
        if self.process.is_alive():
            self.process.terminate()
        self.process.join(_STOP_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(_STOP_S)


class Children:
    """Some children, and what they say. Leaving the context ends all of them."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._finished: set[Child] = set()

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._children:
            child.stop()

    def start(self, name: str, target: Callable[..., None], *args: Any) -> Child:
        """Start a child; see `Child`."""
        child = Child(name, target, *args)
        self._children.append(child)
        return child

    def join(self, timeout: float) -> None:
        """Wait until every child has ended by itself, at most `timeout` seconds altogether."""
        end = time.monotonic() + timeout
        for child in self._children:
            child.process.join(max(0.0, end - time.monotonic()))

    def next_event(self, timeout: float, what: str) -> Event:
        """The next thing that any child says. `what` says in an error what was waited for.

        Raises ChildFailed when a child has failed or died, NobodyLeft when all have ended, WaitTimeout
        after `timeout` seconds.
        """
        end = time.monotonic() + timeout
        while True:
            running = {c.connection: c for c in self._children if c not in self._finished}
            if not running:
                raise NobodyLeft(f"every process ended before {what}")
            ready = wait(list(running), max(0.0, end - time.monotonic()))
            if not ready:
                names = " and ".join(c.name for c in running.values())
                raise WaitTimeout(f"waited {timeout:g} s for {what}; {names} said nothing")
            for connection in ready:
                assert isinstance(connection, Connection)
                event = self._event(running[connection])
                if event is not None:
                    return event

    def _event(self, child: Child) -> Event | None:
        try:
            kind, value = child.connection.recv()
        except (EOFError, OSError):
            self._finished.add(child)
            child.process.join(_STOP_S)
            if child.process.exitcode:
                raise ChildFailed(_died(child.name, child.process.exitcode)) from None
            return None
        if kind == _ERROR:
            text, trace = value
            raise ChildFailed(f"{child.name}: {text}", trace)
        return Event(child.name, kind, value)


_ERROR = "error"


def _died(name: str, code: int) -> str:
    if code > 0:
        return (
            f"the {name} process ended with exit status {code} and said nothing; see its log above"
        )
    hint = "; was the machine out of memory?" if -code == signal.SIGKILL else ""
    return f"the {name} process was ended by {signal.Signals(-code).name}{hint}"


def _main(
    connection: Connection, parent: int, target: Callable[..., None], args: tuple[Any, ...]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with, args=(parent,), name="tent-parent", daemon=True).start()
    try:
        target(Link(connection), *args)
    except BaseException as error:
        text = str(error) if isinstance(error, TentError) else f"{type(error).__name__}: {error}"
        connection.send((_ERROR, (text, traceback.format_exc())))
        connection.close()
        raise SystemExit(1) from None
    connection.close()


def _die_with(parent: int) -> None:
    """End this process when its parent has ended, even by SIGKILL, which closes no pipe that others hold."""
    try:
        process = os.pidfd_open(parent)
    except OSError:
        os._exit(1)
    if os.getppid() == parent:  # else the number may already be another process's
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.poll()
    os._exit(1)
