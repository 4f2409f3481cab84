"""Moves the blocks of a replay with a peer's Python API, for `replay_peers.py`: runs in the Python of the
peers.

    python replay_mover.py mooncake|nixl LISTS.npz

LISTS.npz has `size`, the bytes of a pool, `piece`, those of a piece, and for each request the columns
`here0`, `there0`, `here1`, ... of byte offsets in the pools of both sides. Prints one JSON document: bytes,
seconds of transfer, and GBps. Both pools are in memory before anything is timed, and the lists that an API
takes are made before; what was written last is read back and compared.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from peerbench import PEERS

CHUNK = {"mooncake": 1000}
"""So many blocks go in one call at most, where there is a limit: mooncake refuses 5,000."""


def target(conn: Any, name: str, size: int) -> None:
    """The other process: a pool to write to."""
    serve = PEERS[name].target
    assert serve is not None
    serve(conn, size)  # type: ignore[call-arg]


def caller(
    name: str, case: Any, op: str, piece: int, here: list[int], there: list[int]
) -> Callable[[], None]:
    """Moves these pieces, in as many calls as the peer needs."""
    step = CHUNK.get(name, len(here))
    calls = [
        case(op, here[i : i + step], there[i : i + step], piece) for i in range(0, len(here), step)
    ]

    def move() -> None:
        for call in calls:
            if call():
                raise SystemExit(f"{name} failed to {op}")

    return move


def main(name: str, path: str) -> None:
    """Replay, and print the throughput."""
    os.environ.update(PEERS[name].environment)
    lists = np.load(path)
    size, piece = int(lists["size"]), int(lists["piece"])
    ours, theirs = mp.Pipe()
    other = mp.get_context("spawn").Process(target=target, args=(theirs, name, size), daemon=True)
    other.start()
    theirs.close()
    segment, base = ours.recv()
    pool = np.resize(np.random.default_rng(7).integers(1, 256, 1 << 20, np.uint8), size)
    start = pool.ctypes.data
    case = PEERS[name].initiator(segment, base, start, size)  # type: ignore[call-arg]
    everything = [(lists[f"here{i}"], lists[f"there{i}"]) for i in range(int(lists["requests"]))]
    pages = np.arange(0, size - piece, piece)
    for at in range(0, len(pages), 100_000):  # so that the other pool is in memory
        some = pages[at : at + 100_000]
        caller(name, case, "write", piece, (some + start).tolist(), (some + base).tolist())()
    seconds, moved = 0.0, 0
    for here, there in everything:
        mine, yours = (here + np.uint64(start)).tolist(), (there + np.uint64(base)).tolist()
        move = caller(name, case, "write", piece, mine, yours)
        began = time.perf_counter()
        move()
        seconds += time.perf_counter() - began
        moved += len(here) * piece
    check(name, case, pool, piece, *everything[-1], base)
    print(
        json.dumps({"bytes": moved, "seconds": seconds, "GBps": moved / seconds / 1e9}), flush=True
    )
    other.kill()
    os._exit(0)


def check(name: str, case: Any, pool: Any, piece: int, here: Any, there: Any, base: int) -> None:
    """Read back what was written last, and compare."""
    rows = here.astype(np.int64)[:, None] + np.arange(piece)
    sent = pool[rows]
    pool[rows] = 0
    mine, yours = (here + np.uint64(pool.ctypes.data)).tolist(), (there + np.uint64(base)).tolist()
    caller(name, case, "read", piece, mine, yours)()
    if not np.array_equal(pool[rows], sent):
        raise SystemExit(f"{name} did not move every byte to its place")


if __name__ == "__main__":
    main(*sys.argv[1:])
