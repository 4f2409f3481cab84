"""The reference C++ engine over one RDMA device, for `rdma_bandwidth.py`: runs where its wheel is installed.

Its argument is the device. It reads lines "SIZE COUNT" and answers each with the MiB/s of so many such writes
in one call.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

MIB = 1 << 20
SPAN = 64 * MIB


def engine(device: str) -> Any:
    """One that speaks RDMA over the device, on loopback."""
    from mooncake.engine import TransferEngine

    made = TransferEngine()
    if made.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", device):
        sys.exit(f"mooncake cannot use {device}")
    return made


def own(connection: Connection, device: str) -> None:
    """In the other process: a span to write to."""
    made = engine(device)
    span = np.zeros(SPAN, np.uint8)
    made.register_memory(span.ctypes.data, span.nbytes)
    connection.send((f"127.0.0.1:{made.get_rpc_port()}", span.ctypes.data))
    connection.recv()
    os._exit(0)


def main(device: str) -> None:
    """Measure what is asked for, line by line."""
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    other = context.Process(target=own, args=(there, device), daemon=True)
    other.start()
    segment, base = here.recv()
    made = engine(device)
    source = np.ones(SPAN, np.uint8)
    made.register_memory(source.ctypes.data, source.nbytes)
    print("ready", flush=True)
    for line in sys.stdin:
        size, count = map(int, line.split())
        offsets = [i * size % SPAN for i in range(count)]
        began = time.perf_counter()
        failed = made.batch_transfer_sync_write(
            segment,
            [source.ctypes.data + o for o in offsets],
            [base + o for o in offsets],
            [size] * count,
        )
        seconds = time.perf_counter() - began
        print("nan" if failed else size * count / MIB / seconds, flush=True)
    here.send(None)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
