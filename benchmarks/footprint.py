"""What a process holds, in numbers that must not grow with peers: read from /proc, from outside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KIB = 1 << 10
_CLOSE_WAIT = "08"  # the states of /proc/net/tcp are those of include/net/tcp_states.h


@dataclass(frozen=True, slots=True)
class Footprint:
    """Counts of one process at one moment.

    `mappings` are those of files, memfds and libraries: anonymous memory comes and goes with the allocator,
    and is in `resident_kib`. `close_wait` are its TCP sockets whose other end has closed.
    """

    descriptors: int
    threads: int
    mappings: int
    close_wait: int
    resident_kib: int


def footprint(pid: int | None = None) -> Footprint:
    """What the process `pid` holds now, or this one. Raises FileNotFoundError when it has ended."""
    pid = os.getpid() if pid is None else pid
    proc = Path("/proc", str(pid))
    sockets = set(_sockets(proc / "fd"))
    return Footprint(
        descriptors=len(os.listdir(proc / "fd")),
        threads=len(os.listdir(proc / "task")),
        mappings=sum(_is_of_a_file(line) for line in (proc / "maps").read_text().splitlines()),
        close_wait=sum(
            inode in sockets and state == _CLOSE_WAIT for state, inode in _tcp(proc / "net")
        ),
        resident_kib=int((proc / "statm").read_text().split()[1])
        * os.sysconf("SC_PAGE_SIZE")
        // KIB,
    )


def children(pid: int) -> list[int]:
    """The child processes of `pid`, oldest first."""
    tasks = Path("/proc", str(pid), "task")
    found: list[int] = []
    for task in os.listdir(tasks):
        found += map(int, (tasks / task / "children").read_text().split())
    return sorted(found)


def private_kib(pid: int) -> int:
    """What is resident of no file: pages of a library serve all who have loaded it."""
    return _status(Path("/proc", str(pid)), "RssAnon")


def reset_peak() -> None:
    """Have `peak_kib` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_kib() -> int:
    """The most that was resident of this process since `reset_peak`."""
    return _status(Path("/proc/self"), "VmHWM")


def _status(proc: Path, name: str) -> int:
    lines = (proc / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _sockets(directory: Path) -> Iterator[str]:
    for entry in os.listdir(directory):
        try:
            target = os.readlink(directory / entry)
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _is_of_a_file(line: str) -> bool:
    return line.split(maxsplit=5)[4] != "0"


def _tcp(net: Path) -> Iterator[tuple[str, str]]:
    """State and inode of every TCP socket of the network namespace."""
    for name in ("tcp", "tcp6"):
        for line in (net / name).read_text().splitlines()[1:]:
            fields = line.split()
            yield fields[3], fields[9]
