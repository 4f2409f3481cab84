"""A whole measurement: makes or finds the other side, and measures the cases one by one."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tent_core.bench.cases import CASES, OPCODES, SPAN, Busy, Case, Memory
from tent_core.bench.measure import Bench, Measurement
from tent_core.bench.target import BUFFER_NAME, ChildTarget, PeerTarget, burn, make_buffer
from tent_core.children import Children
from tent_core.types import Opcode


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure. Without `peer` a target process is made; `buffer` is the peer's to write to."""

    config: Mapping[str, Any] | str | None = None
    memory: Memory = Memory.ALLOCATED
    cases: tuple[Case, ...] = CASES
    opcodes: tuple[Opcode, ...] = OPCODES
    seconds: float = 1.0
    busy: Busy = Busy.NEITHER
    threads: int = 1
    peer: str | None = None
    buffer: str = BUFFER_NAME


@contextmanager
def ends(options: BenchOptions) -> Iterator[Bench]:
    """Both ends of a measurement; this process is the initiator. Raises TentError."""
    from tent_core.engine import Engine

    if options.busy.initiator:
        burn()
    with ExitStack() as stack:
        peer, target = options.peer, None
        if peer is None:
            children = stack.enter_context(Children())
            target = ChildTarget(children, options.config, options.memory, options.busy.target)
            peer = target.segment_name
        engine = stack.enter_context(Engine(options.config))
        local = make_buffer(engine, options.memory, 1)
        segment = stack.enter_context(engine.open_segment(peer))
        remote = segment.buffer(options.buffer)
        yield Bench(
            segment=segment,
            local=local,
            remote=remote,
            target=target or PeerTarget(segment, remote, local),
            memory=options.memory,
            span=min(SPAN, remote.length),
            seconds=options.seconds,
            threads=options.threads,
        )


def bench(options: BenchOptions) -> Generator[Measurement, None, None]:
    """Measure each case; this process is the initiator. Raises TentError.

    Closing the generator ends the target and the engine.
    """
    with ends(options) as both:
        yield from both.run(options.opcodes, options.cases)
