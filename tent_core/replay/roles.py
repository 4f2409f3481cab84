"""The two processes of a replay: each makes an engine with a KV pool and plays its role."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tent_core.replay.decode import Decode, Received
from tent_core.replay.geometry import Geometry
from tent_core.replay.prefill import Prefill
from tent_core.replay.report import Report, Tally
from tent_core.replay.trace import TraceRequest

if TYPE_CHECKING:
    from tent_core.engine import Engine
    from tent_core.memory import Buffer

POOL_NAME = "kv-pool"


class PoolMemory(enum.StrEnum):
    """Where the memory of a pool comes from: the engine, or the application, which registers it."""

    ALLOCATED = "allocated"
    REGISTERED = "registered"


@dataclass(frozen=True, slots=True)
class RoleOptions:
    """What both roles need. `config` is what `Engine` takes; `timeout` bounds each wait, in seconds."""

    pool_bytes: int
    config: Mapping[str, Any] | None = None
    memory: PoolMemory = PoolMemory.ALLOCATED
    seed: int = 0
    timeout: float = 60.0


def run_decode(
    options: RoleOptions,
    ready: Callable[[str], None],
    progress: Callable[[Received], None] = lambda received: None,
    alive: Callable[[], bool] = lambda: True,
) -> Received:
    """Serve one prefill process; `ready` is told the segment name. Raises TentError, Stopped."""
    with _engine_with_pool(options) as (engine, buffer):
        decode = Decode(engine, buffer, seed=options.seed, timeout=options.timeout, alive=alive)
        ready(engine.segment_name)
        return decode.serve(progress)


def run_prefill(
    options: RoleOptions,
    geometry: Geometry,
    requests: tuple[TraceRequest, ...],
    peer: str,
    progress: Callable[[Tally], None] = lambda tally: None,
) -> Report:
    """Replay the requests against the decode process whose segment name is `peer`. Raises TentError."""
    with _engine_with_pool(options) as (engine, buffer):
        prefill = Prefill(engine, buffer, geometry, seed=options.seed, timeout=options.timeout)
        return prefill.run(peer, requests, progress)


@contextmanager
def _engine_with_pool(options: RoleOptions) -> Iterator[tuple[Engine, Buffer]]:
    from tent_core.engine import Engine

    with Engine(options.config) as engine:
        if options.memory is PoolMemory.ALLOCATED:
            buffer = engine.allocate(options.pool_bytes, name=POOL_NAME)
        else:
            buffer = engine.register(np.zeros(options.pool_bytes, np.uint8), name=POOL_NAME)
        yield engine, buffer
