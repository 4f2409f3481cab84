"""The prefill role: fills pages of its pool, and writes them to the pages that decode grants."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tent_core.errors import TentError
from tent_core.replay.errors import ReplayError
from tent_core.replay.geometry import PAGES_PER_BLOCK, Geometry, Pages
from tent_core.replay.messages import VERSION, Mailbox, Message, hashes_of, send
from tent_core.replay.pattern import PoolView
from tent_core.replay.pool import PagedPool
from tent_core.replay.report import Report, Tally, summarise
from tent_core.replay.trace import TraceRequest

if TYPE_CHECKING:
    from tent_core.engine import Engine
    from tent_core.memory import Buffer
    from tent_core.remote import Segment
    from tent_core.remote_buffer import RemoteBuffer


class Prefill:
    """Replays requests against one decode process. Used by one thread."""

    def __init__(
        self, engine: Engine, buffer: Buffer, geometry: Geometry, *, seed: int, timeout: float
    ) -> None:
        self._engine = engine
        self._buffer = buffer
        self._geometry = geometry
        self._timeout = timeout
        self._view = PoolView(buffer.array, geometry)
        # Another seed than the receiver's: where a page lands has nothing to do with where it lay.
        self._pool = PagedPool(self._view.pages, PAGES_PER_BLOCK, seed + 1)
        self._mailbox = Mailbox(engine)

    def run(
        self,
        peer: str,
        requests: Sequence[TraceRequest],
        progress: Callable[[Tally], None] = lambda tally: None,
    ) -> Report:
        """Replay the requests in order, each when the one before has been checked. Raises TentError.

        `progress` is called after every request.
        """
        with self._engine.open_segment(peer, self._timeout) as segment:
            try:
                return self._session(segment, requests, progress)
            except TentError as error:
                with contextlib.suppress(TentError):  # it may be the reason for the error
                    send(segment, Message("refused", {"reason": str(error)}), self._timeout)
                raise

    def _session(
        self,
        segment: Segment,
        requests: Sequence[TraceRequest],
        progress: Callable[[Tally], None],
    ) -> Report:
        target, pages = self._introduce(segment)
        smaller = min(pages, self._view.pages)
        check_requests(requests, self._geometry, smaller * self._geometry.page_bytes)
        tally = Tally()
        before = self._engine.stats()["failovers"]
        for request in requests:
            self._replay(segment, target, pages, request, tally)
            progress(tally)
        tally.failovers = self._engine.stats()["failovers"] - before
        send(segment, Message("bye"), self._timeout)
        return summarise(tally)

    def _introduce(self, segment: Segment) -> tuple[RemoteBuffer, int]:
        geometry = self._geometry
        hello = {
            "version": VERSION,
            "model": geometry.model,
            "layers": geometry.layers,
            "token_bytes": geometry.token_bytes,
            "parts": geometry.parts,
        }
        send(segment, Message("hello", hello), self._timeout)
        welcome = self._answer(
            segment, "welcome", "decode's answer (it may be busy with another replay)"
        )
        return segment.buffer(str(welcome.fields.get("buffer"))), welcome.number("pages")

    def _replay(
        self,
        segment: Segment,
        target: RemoteBuffer,
        target_pages: int,
        request: TraceRequest,
        tally: Tally,
    ) -> None:
        hashes = hashes_of(request.hashes)
        send(segment, Message("want", arrays={"hashes": hashes}), self._timeout)
        grant = self._answer(segment, "grant", "pages for a request")
        missing, pages = _granted(grant, len(hashes), target_pages)
        if len(pages):
            self._transfer(segment, target, target_pages, hashes[missing].tolist(), pages, tally)
        else:
            send(segment, Message("complete"), self._timeout)
        checked = self._answer(segment, "checked", "the receiver's verdict")
        tally.requests += 1
        tally.blocks_sent += len(pages)
        tally.blocks_reused += len(hashes) - len(pages)
        tally.pieces_checked += checked.number("pieces")
        tally.mismatches += checked.number("mismatches")
        tally.first_mismatch = tally.first_mismatch or str(checked.fields.get("first", ""))

    def _transfer(
        self,
        segment: Segment,
        target: RemoteBuffer,
        target_pages: int,
        blocks: list[int],
        pages: Pages,
        tally: Tally,
    ) -> None:
        geometry = self._geometry
        own = self._pool.acquire(blocks)
        self._view.fill(hashes_of(blocks)[own.fresh], own.pages[own.fresh])
        here = geometry.offsets(own.pages, self._view.pages)
        there = geometry.offsets(pages, target_pages)
        length = np.uint64(geometry.piece_bytes)
        began = time.perf_counter()
        batch = segment.write_many(self._buffer, here, target, there, length, timeout=self._timeout)
        written = time.perf_counter()
        send(segment, Message("complete"), self._timeout)
        told = time.perf_counter()
        self._pool.release(own)
        tally.pieces += len(here)
        tally.bytes += len(here) * geometry.piece_bytes
        tally.seconds += written - began
        tally.latencies_s.append(told - began)
        tally.transports.update(batch.transports())

    def _answer(self, segment: Segment, kind: str, what: str) -> Message:
        return self._mailbox.expect(kind, segment.descriptor.key, self._timeout, what)


def _granted(grant: Message, blocks: int, pool_pages: int) -> tuple[NDArray[np.bool_], Pages]:
    """Which blocks are missing at the receiver, and the pages that await them."""
    missing, pages = grant.column("fresh", np.bool_), grant.column("pages", np.int64)
    inside = (pages >= 0) & (pages < pool_pages)
    if len(missing) != blocks or len(pages) != missing.sum() * PAGES_PER_BLOCK or not inside.all():
        raise ReplayError("a grant of pages that does not fit the request")
    return missing, pages.reshape(-1, PAGES_PER_BLOCK)


def check_requests(requests: Sequence[TraceRequest], geometry: Geometry, pool_bytes: int) -> None:
    """Raise PoolTooSmall, with the size that all of them need, if one does not fit into such a pool."""
    largest = max(range(len(requests)), key=lambda index: len(requests[index].hashes))
    geometry.check_fits(
        len(requests[largest].hashes), pool_bytes, f"request {largest + 1} of the trace"
    )
