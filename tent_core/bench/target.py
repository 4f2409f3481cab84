"""The other side of a measurement: a process started for it, or a peer that somebody else runs."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tent_core.bench import content
from tent_core.bench.cases import SPAN, Memory, Work
from tent_core.children import Child, Children, Link
from tent_core.errors import TentError

if TYPE_CHECKING:
    from tent_core.engine import Engine
    from tent_core.memory import Buffer
    from tent_core.remote import Segment
    from tent_core.remote_buffer import RemoteBuffer

BUFFER_NAME = "span"
_ANSWER_S = 60.0
_LISTEN_S = 24 * 3600.0  # the parent ends its target; this only bounds the wait


class Target(Protocol):
    """What a measurement asks of the other side, so that bytes can be checked there."""

    def fill(self, work: Work, key: int) -> None:
        """Put the blocks of round `key` at the work's remote offsets."""
        ...

    def wrong(self, work: Work, key: int) -> int:
        """How many of the remote blocks are not those of round `key`."""
        ...


def burn() -> None:
    """Keep one Python thread of this process computing, as an inference worker's do."""

    def spin() -> None:
        count = 0
        while True:
            count += 1

    threading.Thread(target=spin, name="tent-busy", daemon=True).start()


def make_buffer(engine: Engine, memory: Memory, value: int) -> Buffer:
    """A buffer of SPAN bytes, all of them `value`; zeros are not touched, so they take no memory yet."""
    if memory is Memory.REGISTERED:
        span = np.full(SPAN, value, np.uint8) if value else np.zeros(SPAN, np.uint8)
        return engine.register(span, name=BUFFER_NAME)
    buffer = engine.allocate(SPAN, name=BUFFER_NAME)
    if value:
        buffer.array[:] = value
    return buffer


class _Command(NamedTuple):
    verb: str
    offsets: NDArray[np.uint64]
    block: int
    key: int


class ChildTarget:
    """A process of our own, which fills and checks its memory itself."""

    def __init__(
        self,
        children: Children,
        config: Mapping[str, Any] | str | None,
        memory: Memory,
        busy: bool,
    ) -> None:
        self._children = children
        self._child: Child = children.start("target", serve_target, config, memory, busy)
        self.segment_name: str = self._answer("ready")

    def fill(self, work: Work, key: int) -> None:
        """See `Target`."""
        self._child.tell(_Command("fill", work.remote, work.case.block, key))
        self._answer("filled")

    def wrong(self, work: Work, key: int) -> int:
        """See `Target`."""
        self._child.tell(_Command("check", work.remote, work.case.block, key))
        return int(self._answer("checked"))

    def _answer(self, kind: str) -> Any:
        event = self._children.next_event(_ANSWER_S, f"the target to be {kind}")
        if event.kind != kind:
            raise TentError(f"the target said {event.kind!r} where {kind!r} was due")
        return event.value


def serve_target(
    link: Link, config: Mapping[str, Any] | str | None, memory: Memory, busy: bool
) -> None:
    """The target's process: offers a span, and fills and checks it when told."""
    from tent_core.engine import Engine

    if busy:
        burn()
    with Engine(config) as engine:
        buffer = make_buffer(engine, memory, 0)
        link.say("ready", engine.segment_name)
        while True:
            verb, offsets, block, key = link.hear(_LISTEN_S)
            if verb == "fill":
                content.fill(buffer.array, offsets, block, key)
                link.say("filled")
            else:
                link.say("checked", content.wrong(buffer.array, offsets, block, key))


class PeerTarget:
    """A peer that offers a buffer, and no more: its bytes are set and read through TENT itself."""

    def __init__(self, segment: Segment, remote: RemoteBuffer, local: Buffer) -> None:
        self._segment = segment
        self._remote = remote
        self._local = local

    def fill(self, work: Work, key: int) -> None:
        """See `Target`."""
        content.fill(self._local.array, work.local, work.case.block, key)
        self._segment.write_many(
            self._local, work.local, self._remote, work.remote, work.case.block
        )
        content.fill(self._local.array, work.local, work.case.block, key + 1)

    def wrong(self, work: Work, key: int) -> int:
        """See `Target`."""
        content.fill(self._local.array, work.local, work.case.block, key + 1)
        self._segment.read_many(self._local, work.local, self._remote, work.remote, work.case.block)
        return content.wrong(self._local.array, work.local, work.case.block, key)
