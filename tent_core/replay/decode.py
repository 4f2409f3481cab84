"""The decode role: grants pages of its pool, and checks what has been written there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tent_core.descriptor import PeerKey
from tent_core.errors import TentError
from tent_core.replay.errors import ReplayError
from tent_core.replay.geometry import PAGES_PER_BLOCK, Geometry
from tent_core.replay.messages import VERSION, Mailbox, Message, expected, hashes_of, send
from tent_core.replay.pattern import PoolView, Verdict
from tent_core.replay.pool import PagedPool, Placement

if TYPE_CHECKING:
    from tent_core.engine import Engine
    from tent_core.memory import Buffer
    from tent_core.remote import Segment

_BLOCKS = "the blocks of a request"


@dataclass(frozen=True, slots=True)
class Received:
    """What a decode process took in. `pieces` were all checked; `mismatches` of them were wrong.

    Blocks that were held already are checked again with each request that uses them; a wrong piece there
    counts as well.
    """

    requests: int = 0
    blocks_received: int = 0
    blocks_reused: int = 0
    pieces: int = 0
    bytes: int = 0
    mismatches: int = 0
    first_mismatch: str = ""

    @property
    def verified(self) -> bool:
        """Whether every byte was right."""
        return self.mismatches == 0


class Decode:
    """Serves one prefill process from its hello to its goodbye. Used by one thread."""

    def __init__(
        self,
        engine: Engine,
        buffer: Buffer,
        *,
        seed: int,
        timeout: float,
        alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self._engine = engine
        self._buffer = buffer
        self._seed = seed
        self._timeout = timeout
        self._mailbox = Mailbox(engine, alive)

    def serve(self, progress: Callable[[Received], None] = lambda received: None) -> Received:
        """Wait for a prefill process, serve it, and say what came. Raises TentError, and Stopped.

        `progress` is called after every request. A prefill process that is silent for twice the timeout in
        the middle of a replay is an error; before its hello the wait is bounded by `alive` alone.
        """
        sender, hello = self._greeting()
        with self._engine.open_segment(sender.name, self._timeout) as segment:
            try:
                return self._session(sender, segment, hello, progress)
            except TentError as error:
                with contextlib.suppress(TentError):  # it may be the reason for the error
                    send(segment, Message("refused", {"reason": str(error)}), self._timeout)
                raise

    def _greeting(self) -> tuple[PeerKey, Message]:
        while True:
            sender, message = self._mailbox.take(None, "a prefill process")
            if message.kind == "hello":
                return sender, message

    def _session(
        self,
        sender: PeerKey,
        segment: Segment,
        hello: Message,
        progress: Callable[[Received], None],
    ) -> Received:
        geometry = _geometry(hello)
        view = PoolView(self._buffer.array, geometry)
        pool = PagedPool(view.pages, PAGES_PER_BLOCK, self._seed)
        welcome = Message("welcome", {"pages": view.pages, "buffer": self._buffer.name})
        send(segment, welcome, self._timeout)
        received = Received()
        while True:
            message = self._next(sender, "the next request")
            if message.kind == "bye":
                return received
            want = expected(message, "want", "the next request")
            placement = _acquire(pool, geometry, want)
            view.scrub(placement.pages[placement.fresh])
            grant = Message(
                "grant",
                arrays={
                    "fresh": placement.fresh,
                    "pages": placement.pages[placement.fresh].reshape(-1),
                },
            )
            send(segment, grant, self._timeout)
            expected(self._next(sender, _BLOCKS), "complete", _BLOCKS)
            verdict = view.verify(hashes_of(placement.hashes), placement.pages)
            pool.release(placement)
            received = _add(received, geometry, placement, verdict)
            checked = Message("checked", _checked(geometry, placement, verdict))
            send(segment, checked, self._timeout)
            progress(received)

    def _next(self, sender: PeerKey, what: str) -> Message:
        while True:
            found, message = self._mailbox.take(2 * self._timeout, what)
            if found == sender:
                return message


def _geometry(hello: Message) -> Geometry:
    fields = hello.fields
    if fields.get("version") != VERSION:
        raise ReplayError(
            f"prefill speaks version {fields.get('version')} of the replay's messages, decode "
            f"version {VERSION}: install the same version of tent-core on both sides"
        )
    layers, token_bytes, parts = map(hello.number, ("layers", "token_bytes", "parts"))
    if not (0 < layers < 1 << 16 and 0 < token_bytes < 1 << 32 and parts in (1, 2)):
        raise ReplayError(f"a hello with a geometry that cannot be: {dict(fields)}")
    return Geometry(str(fields.get("model")), layers, token_bytes, parts)


def _acquire(pool: PagedPool, geometry: Geometry, want: Message) -> Placement:
    hashes = want.column("hashes", np.uint64).tolist()
    if len(set(hashes)) != len(hashes):
        raise ReplayError("a request that names a block twice")
    geometry.check_fits(len(hashes), pool.pages * geometry.page_bytes, "a request")
    return pool.acquire(hashes)


def _add(
    received: Received, geometry: Geometry, placement: Placement, verdict: Verdict
) -> Received:
    fresh = int(placement.fresh.sum())
    return Received(
        requests=received.requests + 1,
        blocks_received=received.blocks_received + fresh,
        blocks_reused=received.blocks_reused + len(placement.fresh) - fresh,
        pieces=received.pieces + fresh * geometry.pieces_per_block,
        bytes=received.bytes + fresh * geometry.block_bytes,
        mismatches=received.mismatches + verdict.mismatches,
        first_mismatch=received.first_mismatch or str(verdict.first or ""),
    )


def _checked(geometry: Geometry, placement: Placement, verdict: Verdict) -> dict[str, Any]:
    return {
        "pieces": int(placement.fresh.sum()) * geometry.pieces_per_block,
        "checked": verdict.pieces,
        "mismatches": verdict.mismatches,
        "first": str(verdict.first or ""),
    }
