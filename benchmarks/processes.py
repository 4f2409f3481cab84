"""What the machine gives to several at once: the transfers of `threads.py` by bare means, in processes.

Processes share no interpreter lock, so what they gain over one of them is what threads could gain at best:
memory, caches, the kernel and the processors set the limit. Blocks are copied within memory that both sides
map ("copy"), by process_vm_writev(2) and process_vm_readv(2), or contiguously over a blocking stream each.
More processes than processors would each run for milliseconds on end, out of the caches; threads that take
turns at every call cannot.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import multiprocessing as mp
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from peerbench import SPAN, cma, cma_target, tcp, tcp_target

from tent_core.bench.cases import Work
from tent_core.columns import iovecs
from tent_core.types import Opcode
from tent_shm import gather, syscalls

Call = Callable[[], object]

MEANS = {"shm allocated": "copy", "shm registered": "process_vm", "tcp allocated": "stream"}
"""Which bare means does what a transport does with a kind of memory."""

_START_S = 0.02
"""Until everybody has heard when to begin."""


class _Process(NamedTuple):
    process: BaseProcess
    link: Connection


class Movers:
    """As many processes as there are works, each of which can carry out any of them."""

    def __init__(self, processes: list[_Process]) -> None:
        self._processes = processes

    def rate(self, shares: Sequence[Sequence[int]], seconds: float) -> float:
        """Calls per second of all together, where process i goes through the works shares[i] in turn."""
        at = time.perf_counter() + _START_S
        busy = self._processes[: len(shares)]
        for mover, share in zip(busy, shares, strict=True):
            mover.link.send((list(share), at, seconds))
        done = [mover.link.recv() for mover in busy]
        lasted = max(ended for _, _, ended in done) - min(began for _, began, _ in done)
        return float(sum(count for count, _, _ in done) / lasted)


@contextlib.contextmanager
def movers(means: str, works: Sequence[Work]) -> Iterator[Movers]:
    """The processes, by one of the MEANS."""
    spawn = mp.get_context("spawn")
    started: list[_Process] = []

    def start(target: Callable[..., None], *args: Any) -> Connection:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=target, args=(theirs, *args), daemon=True)
        process.start()
        started.append(_Process(process, ours))
        return ours

    spans = [os.memfd_create(f"tent-bench-{side}") for side in ("local", "remote")]
    try:
        if means == "copy":
            for span in spans:
                os.truncate(span, SPAN)
            where: list[Any] = [[f"/proc/{os.getpid()}/fd/{span}" for span in spans]] * len(works)
        elif means == "process_vm":
            where = [start(_open_target).recv()] * len(works)
        else:
            where = [start(tcp_target).recv() for _ in works]
        links = [start(_serve, means, at, list(works)) for at in where]
        for link in links:
            link.recv()  # it is ready
        yield Movers([mover for mover in started if mover.link in links])
    finally:
        for process, _ in started:
            process.kill()
            process.join()
        for span in spans:
            os.close(span)


def _open_target(link: Connection) -> None:
    """Own a span that others than the parent may write to."""
    with contextlib.suppress(OSError):  # of a kernel without Yama, which forbids nothing
        syscalls.allow_ptrace_by_anyone()
    cma_target(link)


class _Means(NamedTuple):
    """A call for each work, and what has the memory that they use."""

    calls: list[Call]
    kept: list[object]


def _serve(link: Connection, means: str, where: Any, works: list[Work]) -> None:
    """Be one of the processes: make all calls, then carry out those that are named, when it is time."""
    calls, _kept = _MEANS[means](where, works)
    failed = [call() for call in calls]
    if any(failed):
        raise OSError(f"{means} does not work here")
    link.send(None)
    while True:
        share, at, seconds = link.recv()
        turn = itertools.cycle([calls[i] for i in share])
        time.sleep(max(0.0, at - time.perf_counter()))
        count, began = 0, time.perf_counter()
        now, stop = began, began + seconds
        while now < stop:
            next(turn)()
            count, now = count + 1, time.perf_counter()
        link.send((count, began, now))


def _copies(where: list[str], works: list[Work]) -> _Means:
    local, remote = (_mapped(path) for path in where)
    calls: list[Call] = []
    for work in works:
        lengths = np.full(len(work.local), work.case.block, np.uint64)
        here = iovecs(work.local + np.uint64(local.ctypes.data), lengths)
        there = iovecs(work.remote + np.uint64(remote.ctypes.data), lengths)
        target, source = (there, here) if work.opcode is Opcode.WRITE else (here, there)
        move = syscalls.memmove(keep_gil=True)
        one = partial(move, int(target[0, 0]), int(source[0, 0]), work.case.block)
        sides = (gather.Side(side, gather.around(side)) for side in (target, source))
        many = gather.arranged(*sides, work.case.block * work.case.batch)
        calls.append(one if many is None else many)
    return _Means(calls, [local, remote])


def _mapped(path: str) -> NDArray[np.uint8]:
    with open(path, "r+b") as file:
        span = np.frombuffer(mmap.mmap(file.fileno(), SPAN), np.uint8)
    span[:: mmap.PAGESIZE] = 1
    return span


def _kernel_calls(where: tuple[int, int], works: list[Work]) -> _Means:
    span = np.ones(SPAN, np.uint8)
    pid, base = where
    case = cma(pid, base, 0)
    return _Means(_addressed(case, works, span.ctypes.data, base), [span, case])


def _streamed(where: tuple[int, int], works: list[Work]) -> _Means:
    case = tcp(where[0], 0, 0)
    return _Means(_addressed(case, works, 0, 0), [case])


def _addressed(case: Callable[..., Call], works: list[Work], local: int, remote: int) -> list[Call]:
    return [
        case(
            work.opcode.name.lower(),
            (work.local + np.uint64(local)).tolist(),
            (work.remote + np.uint64(remote)).tolist(),
            work.case.block,
        )
        for work in works
    ]


_MEANS: dict[str, Callable[[Any, list[Work]], _Means]] = {
    "copy": _copies,
    "process_vm": _kernel_calls,
    "stream": _streamed,
}
