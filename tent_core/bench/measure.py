"""Times one call, again and again, and checks before and after that it moves every byte to its place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tent_core.bench import content
from tent_core.bench.cases import SEED, Case, Memory, Work, works
from tent_core.bench.target import Target
from tent_core.errors import TransferFailed
from tent_core.types import Opcode

if TYPE_CHECKING:
    from tent_core.memory import Buffer
    from tent_core.remote import Segment
    from tent_core.remote_buffer import RemoteBuffer

Call = Callable[[], object]

LEAST_CALLS = 5
MOST_CALLS = 5000


@dataclass(frozen=True, slots=True)
class Measurement:
    """The outcome of one case. `transport` names what carried it, several joined by `+`."""

    opcode: Opcode
    case: Case
    p50_s: float
    bytes_per_second: float
    transport: str
    memory: Memory
    threads: int = 1

    def as_json(self) -> dict[str, Any]:
        """The line that `tent bench --json` prints: peerbench's keys, and transport and memory."""
        threads = {"threads": self.threads} if self.threads > 1 else {}
        return {
            "peer": "tent",
            "op": self.opcode.name.lower(),
            "block": self.case.block,
            "batch": self.case.batch,
            "p50_us": round(self.p50_s * 1e6, 2),
            "GBps": round(self.bytes_per_second / 1e9, 3),
            "us_per_block": round(self.p50_s / self.case.batch * 1e6, 3),
            "transport": self.transport,
            "memory": self.memory.value,
            **threads,
        }


@dataclass(frozen=True, slots=True)
class Bench:
    """Both ends of a measurement, and how long each case takes."""

    segment: Segment
    local: Buffer
    remote: RemoteBuffer
    target: Target
    memory: Memory
    span: int
    seconds: float
    threads: int = 1

    def run(self, opcodes: tuple[Opcode, ...], cases: tuple[Case, ...]) -> Iterator[Measurement]:
        """Measure each case with each opcode. Raises TransferFailed when bytes are not where they belong."""
        plans = [works(opcodes, cases, self.span, SEED + i) for i in range(self.threads)]
        for each in zip(*plans, strict=True):
            yield self._measure(each)

    def _measure(self, each: tuple[Work, ...]) -> Measurement:
        work = each[0]
        calls = [self.call(w) for w in each]
        self.check(work, calls[0], 1)
        if len(calls) == 1:
            times = timed(calls[0], self.seconds)
            p50 = sorted(times)[len(times) // 2]
            rate = work.case.block * work.case.batch / p50
        else:
            p50, calls_per_second = timed_together(calls, self.seconds)
            rate = work.case.block * work.case.batch * calls_per_second
        self.check(work, calls[0], 3)
        transport = self._carrier(work)
        return Measurement(work.opcode, work.case, p50, rate, transport, self.memory, self.threads)

    def call(self, work: Work) -> Call:
        """A batch of one is prepared once and posted again; a larger one is new each time."""
        block = work.case.block
        if work.case.batch == 1:
            here, there = int(work.local[0]), int(work.remote[0])
            return self.segment.prepare(
                work.opcode, self.local[here : here + block], self.remote[there : there + block]
            ).run
        many = self.segment.write_many if work.opcode is Opcode.WRITE else self.segment.read_many
        local, remote = self.local, self.remote
        return lambda: many(local, work.local, remote, work.remote, block)

    def check(self, work: Work, call: Call, key: int) -> None:
        """Move other bytes by `call`, and look at both ends. Raises TransferFailed."""
        block = work.case.block
        if work.opcode is Opcode.WRITE:
            content.fill(self.local.array, work.local, block, key)
            call()
            wrong = self.target.wrong(work, key)
        else:
            self.target.fill(work, key)
            call()
            wrong = content.wrong(self.local.array, work.local, block, key)
        if wrong:
            raise TransferFailed(
                f"{work.opcode.name} of {work.case} was COMPLETED, "
                f"but {wrong} blocks do not hold what was sent"
            )

    def _carrier(self, work: Work) -> str:
        block = work.case.block
        batch = self.segment.submit(
            work.opcode, self.local, work.local, self.remote, work.remote, block
        ).wait()
        return "+".join(sorted(batch.transports()))


def timed(call: Call, seconds: float) -> list[float]:
    """Seconds that each call took: at least 5 calls, then for `seconds`, at most 5,000 (as peerbench)."""
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while len(times) < LEAST_CALLS or (time.perf_counter() < stop and len(times) < MOST_CALLS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def timed_together(calls: list[Call], seconds: float) -> tuple[float, float]:
    """The median seconds of a call, and calls per second of all threads, each with a call of its own.

    All go on for `seconds`, and the rate is what was done from the first call to the last, so that a thread
    that waits for another one counts as waiting.
    """
    start = threading.Barrier(len(calls), timeout=60)
    found: list[list[float]] = [[] for _ in calls]
    errors: list[BaseException] = []

    def work(times: list[float], call: Call) -> None:
        try:
            start.wait()
            times.append(time.perf_counter())
            stop = times[0] + seconds
            while times[-1] < stop or len(times) <= LEAST_CALLS:
                call()
                times.append(time.perf_counter())
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=each, name=f"tent-bench-{i}", daemon=True)
        for i, each in enumerate(zip(found, calls, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    spans = np.concatenate([np.diff(times) for times in found])
    lasted = max(times[-1] for times in found) - min(times[0] for times in found)
    return float(np.median(spans)), len(spans) / lasted
