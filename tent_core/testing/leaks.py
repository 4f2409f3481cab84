"""What a process holds, counted, so that a test can tell that nothing stayed behind."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

from tent_core.testing.waiting import wait_until

_GRPC_POOL = "event_engine"


@dataclass(frozen=True)
class Held:
    """Descriptors by what they are, threads by name, child processes by pid, and shared mappings by path."""

    descriptors: tuple[str, ...]
    threads: tuple[str, ...]
    children: tuple[int, ...]
    mappings: tuple[str, ...]

    def beyond(self, before: Held) -> list[str]:
        """What is held now and was not before, in words; empty when nothing is."""
        more: list[str] = []
        for kind in ("descriptors", "threads", "children", "mappings"):
            left = list(getattr(before, kind))
            for item in getattr(self, kind):
                if item in left:
                    left.remove(item)
                else:
                    more.append(f"{kind}: {item}")
        return more


def holding(pid: int | None = None) -> Held:
    """What the process `pid` (this one by default) holds now; what ends while it is looked at is left out."""
    proc = Path("/proc", str(pid or os.getpid()))
    names = {t.native_id: t.name for t in threading.enumerate()} if pid is None else {}
    return Held(
        descriptors=tuple(sorted(_descriptors(proc / "fd"))),
        threads=tuple(sorted(_threads(proc / "task", names))),
        children=tuple(sorted(_children(proc))),
        mappings=tuple(sorted(_shared_mappings(proc / "maps"))),
    )


def family() -> Held:
    """What this process and its children hold together, but for gRPC's threads: its pool grows with load, and
    lets what is too many go after 20 s."""
    everybody = [own := holding(), *map(holding, own.children)]

    def together(kind: str) -> tuple[Any, ...]:
        things = chain.from_iterable(getattr(held, kind) for held in everybody)
        return tuple(sorted(thing for thing in things if thing != _GRPC_POOL))

    return Held(**{kind.name: together(kind.name) for kind in fields(Held)})


@contextmanager
def nothing_stays_behind(timeout: float = 5.0) -> Iterator[None]:
    """AssertionError, naming each thing, if more is held after the block than before, and goes on being held.

    Run the block once before, to warm up what a process makes once and keeps: pools, lazily started loops.
    """
    before = holding()
    yield
    gc.collect()  # gRPC's poller ends with its last channel, and what only garbage refers to is nobody's
    last: list[str] = []

    def nothing_more() -> bool:
        last[:] = holding().beyond(before)
        return not last

    try:
        wait_until(nothing_more, timeout)
    except AssertionError:
        raise AssertionError("still held afterwards: " + "; ".join(last)) from None


def _descriptors(directory: Path) -> Iterator[str]:
    for entry in _entries(directory):
        try:
            target = os.readlink(directory / entry)
        except OSError:
            continue
        # The inode in "socket:[123]" differs between one socket and its successor: only the kind counts.
        if target != str(directory):
            yield target.partition("[")[0] if target.startswith(("socket:", "pipe:")) else target


def _threads(tasks: Path, names: Mapping[int | None, str]) -> Iterator[str]:
    for entry in _entries(tasks):
        if name := names.get(int(entry)) or _text(tasks / entry / "comm"):
            yield name


def _children(proc: Path) -> Iterator[int]:
    for entry in _entries(proc / "task"):
        yield from map(int, _text(proc / "task" / entry / "children").split())


def _shared_mappings(maps: Path) -> Iterator[str]:
    for line in _text(maps).splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[1].endswith("s"):
            yield fields[5]


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _entries(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
