#!/usr/bin/env python3
"""Two processes: one owns a pool of pages, the other writes a thousand blocks into it and says so.

    python examples/two_processes.py
    python examples/two_processes.py examples/tent.yaml

Workers are spawned, not forked: neither an engine nor gRPC survives a fork.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection

import numpy as np

import tent_core as tent

PAGE = 4096
PAGES = 4096
BLOCKS = 1000
TIMEOUT_S = 30.0


def decode(config: str | None, parent: Connection) -> None:
    """Own the pool, wait for word that blocks have arrived, and look at them."""
    with tent.Engine(config) as engine:
        pool = engine.allocate(PAGES * PAGE, name="kv-pool")
        parent.send(engine.segment_name)

        note = engine.next_notification(timeout=TIMEOUT_S)
        pages = np.frombuffer(note.payload, np.uint64).astype(np.int64)
        rows = pool.array.reshape(PAGES, PAGE)[pages]
        right = (rows == (np.arange(len(pages)) % 251 + 1).astype(np.uint8)[:, None]).all()
        print(
            f"decode:  {note.name!r}: {len(pages)} blocks, {'all right' if right else 'WRONG'}",
            flush=True,
        )

        # Nobody can touch the pool any more when this returns.
        pool.unregister()
        parent.send(bool(right))


def prefill(config: str | None, peer: str) -> None:
    """Write blocks from memory of our own to random pages of the peer's pool."""
    blocks = np.empty((BLOCKS, PAGE), np.uint8)
    blocks[:] = (np.arange(BLOCKS) % 251 + 1)[:, None]
    pages = np.random.default_rng().permutation(PAGES)[:BLOCKS].astype(np.uint64)

    with tent.Engine(config) as engine, engine.open_segment(peer) as segment:
        source = engine.register(blocks)
        target = segment.buffer("kv-pool")
        print(f"prefill: candidates are {engine.explain(segment, PAGE).candidates}")

        # Offsets in bytes, all blocks in one call; it returns when every byte is there.
        batch = segment.write_many(source, np.arange(BLOCKS) * PAGE, target, pages * PAGE, PAGE)
        print(f"prefill: {batch.moved.sum():,} bytes by {batch.transports()}", flush=True)

        segment.notify("request-1", pages.tobytes())


def main() -> int:
    """Start the decode process, be the prefill process; the exit status is 0 if every byte arrived."""
    config = sys.argv[1] if len(sys.argv) > 1 else None
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=decode, args=(config, theirs))
    child.start()
    theirs.close()  # so that recv() raises EOFError if the child dies
    try:
        prefill(config, ours.recv())
        return 0 if ours.recv() else 1
    finally:
        child.join(TIMEOUT_S)


if __name__ == "__main__":
    raise SystemExit(main())
