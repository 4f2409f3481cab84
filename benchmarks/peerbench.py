#!/usr/bin/env python3
"""Measures what a user would pick instead of TENT, on the same work, on this machine.

    pip install numpy mooncake-transfer-engine-non-cuda        # peer "mooncake"
    pip install numpy && pip install --no-deps nixl-cu12       # peers "nixl...": no torch, no CUDA
    python peerbench.py --peer mooncake --peer nixl --peer nixl-tcp --peer cma --peer tcp

Two processes on one host; the second one owns the target memory. One JSON line per case: {"peer", "op",
"block", "batch", "p50_us", "GBps", "us_per_block"}; batch > 1 moves `batch` blocks of `block` bytes at random
offsets in one call. "nixl" builds a batch's descriptors anew each time, from arrays; "nixl-prepped" picks
them from lists prepared once over the whole span (its fastest way); "nixl-tcp" uses TCP alone. Each --peer is
a fresh process; name one several times to see how much a process's luck matters. With --busy a Python thread
computes without pause in the target (or initiator, or both). Peers "memmove", "cma" and "tcp" are not
products: they are the limits of this machine (one memcpy; one process_vm_writev; one blocking loopback
stream). The wheel of "mooncake" needs libibverbs.so.1 (Debian: libibverbs1).

`tent bench` does the same work through TENT, and `compare.py` puts both side by side.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing as mp
import os
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

SPAN = 256 << 20
IOV_MAX = 1024
CASES = [
    (4 << 10, 1),
    (64 << 10, 1),
    (1 << 20, 1),
    (16 << 20, 1),
    (64 << 20, 1),
    (4 << 10, 1000),
    (16 << 10, 1000),
    (64 << 10, 500),
]

Call = Callable[[], object]
"""Moves one batch; what it returns is false unless it failed."""

Case = Callable[[str, list[int], list[int], int], Call]
"""(op, local addresses, remote addresses, block) -> what is timed."""


def burn() -> None:
    """Keep one Python thread of this process computing, as an inference worker's do."""

    def spin() -> None:
        count = 0
        while True:
            count += 1

    threading.Thread(target=spin, daemon=True).start()


# ------------------------------------------------------------------------- targets: the second process


def mooncake_target(conn: Connection, size: int = SPAN) -> None:
    """Offer a span through the reference C++ engine."""
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    span = np.zeros(size, np.uint8)
    engine.register_memory(span.ctypes.data, span.nbytes)
    conn.send((f"127.0.0.1:{engine.get_rpc_port()}", span.ctypes.data))
    conn.recv()
    os._exit(0)


def nixl_target(conn: Connection, size: int = SPAN) -> None:
    """Offer a span through NIXL over UCX."""
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("target", nixl_agent_config(backends=["UCX"]))
    span = np.zeros(size, np.uint8)
    agent.register_memory([(span.ctypes.data, span.nbytes, 0, "")], "DRAM")
    conn.send((agent.get_agent_metadata(), span.ctypes.data))
    conn.recv()
    os._exit(0)


def cma_target(conn: Connection, size: int = SPAN) -> None:
    """Own a span, and do nothing. It is written to: what never was is one page of zeros, and quickly read."""
    span = np.ones(size, np.uint8)
    conn.send((os.getpid(), span.ctypes.data))
    conn.recv()


def tcp_target(conn: Connection) -> None:
    """Answer one stream: take what is written, send what is read."""
    span = memoryview(bytearray(SPAN))
    listener = socket.create_server(("127.0.0.1", 0))
    conn.send((listener.getsockname()[1], 0))
    stream, _ = listener.accept()
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = bytearray(9)
    while stream.recv_into(head, 9, socket.MSG_WAITALL) == 9:
        size = int.from_bytes(head[:8], "little")
        if head[8]:
            stream.sendall(span[:size])
            continue
        done = 0
        while done < size:
            done += stream.recv_into(span[done:size])
        stream.sendall(b"k")


# ------------------------------------------------------------------------- initiators: this process


def mooncake(seg: Any, base: int, local: int, size: int = SPAN) -> Case:
    """The reference C++ engine, over its TCP transport."""
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    engine.register_memory(local, size)

    def case(op: str, lo: list[int], ro: list[int], block: int) -> Call:
        if len(lo) == 1:
            call = getattr(engine, f"transfer_sync_{op}")
            return lambda: call(seg, lo[0], ro[0], block)
        call = getattr(engine, f"batch_transfer_sync_{op}")
        lengths = [block] * len(lo)
        return lambda: call(seg, lo, ro, lengths)

    return case


def nixl(metadata: Any, base: int, local: int, size: int = SPAN, prepped: bool = False) -> Case:
    """NIXL, over what UCX finds best under UCX_TLS."""
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("initiator", nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(local, size, 0, "")], "DRAM")
    name = agent.add_remote_agent(metadata)
    lists: dict[int, tuple[Any, Any]] = {}

    def whole_span(block: int) -> tuple[Any, Any]:
        if block not in lists:
            here = np.zeros((SPAN // block, 3), np.uint64)
            here[:, 0], here[:, 1] = local + np.arange(SPAN // block) * block, block
            there = here.copy()
            there[:, 0] = base + np.arange(SPAN // block) * block
            lists[block] = (
                agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, "DRAM"),
                agent.prep_xfer_dlist(name, there, "DRAM"),
            )
        return lists[block]

    def descriptors(addresses: Any, block: int) -> Any:
        rows = np.zeros((len(addresses), 3), np.uint64)
        rows[:, 0], rows[:, 1] = addresses, block
        return agent.get_xfer_descs(rows, "DRAM")

    def case(op: str, lo: list[int], ro: list[int], block: int) -> Call:
        mine, theirs = np.array(lo, np.uint64), np.array(ro, np.uint64)  # as a user's offsets are

        def prepare() -> Any:
            if prepped and len(lo) > 1:
                here, there = whole_span(block)
                picks = [
                    ((addresses - np.uint64(start)) // np.uint64(block)).astype(np.int32)
                    for addresses, start in ((mine, local), (theirs, base))
                ]
                return agent.make_prepped_xfer(op.upper(), here, picks[0], there, picks[1])
            here, there = descriptors(mine, block), descriptors(theirs, block)
            return agent.initialize_xfer(op.upper(), here, there, name)

        def post(handle: Any) -> int:
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            return 0 if state == "DONE" else 1

        if len(lo) == 1:  # the best case for the peer: a handle prepared once
            handle = prepare()
            return lambda: post(handle)

        def fresh() -> int:  # a batch is new each time, as KV blocks are
            handle = prepare()
            failed = post(handle)
            agent.release_xfer_handle(handle)
            return failed

        return fresh

    return case


def nixl_prepped(metadata: Any, base: int, local: int) -> Case:
    """NIXL picking from lists that were prepared once."""
    return nixl(metadata, base, local, prepped=True)


def memmove(_seg: Any, _base: int, local: int) -> Case:
    """The limit of one process: memcpy."""
    other = np.zeros(SPAN, np.uint8)

    def case(op: str, lo: list[int], ro: list[int], block: int) -> Call:
        pairs = [
            (other.ctypes.data + r, a) if op == "write" else (a, other.ctypes.data + r)
            for a, r in zip(lo, ro, strict=True)
        ]

        def run() -> int:
            for dst, src in pairs:
                ctypes.memmove(dst, src, block)
            return 0

        return run

    return case


def cma(pid: Any, base: int, local: int) -> Case:
    """The limit of two processes on one host: process_vm_writev, its iovecs prepared, 1,024 blocks a call."""
    libc, keep = ctypes.CDLL(None), []

    def case(op: str, lo: list[int], ro: list[int], block: int) -> Call:
        call = libc.process_vm_writev if op == "write" else libc.process_vm_readv
        call.restype = ctypes.c_ssize_t
        pointer, count_type = ctypes.c_void_p, ctypes.c_ulong
        call.argtypes = [ctypes.c_int, pointer, count_type, pointer, count_type, count_type]
        here, there = np.empty((len(lo), 2), np.uint64), np.empty((len(lo), 2), np.uint64)
        here[:, 0], there[:, 0] = lo, ro
        here[:, 1] = there[:, 1] = block
        keep.append((here, there))
        pieces = [(i, min(IOV_MAX, len(lo) - i)) for i in range(0, len(lo), IOV_MAX)]
        calls = [(here[i:].ctypes.data, there[i:].ctypes.data, n, n * block) for i, n in pieces]
        if len(calls) == 1:
            mine, theirs, count, total = calls[0]
            return lambda: call(pid, mine, count, theirs, count, 0) != total
        return lambda: any(call(pid, m, n, t, n, 0) != total for m, t, n, total in calls)

    return case


def tcp(port: Any, _base: int, local: int) -> Case:
    """The limit of a loopback stream: contiguous bytes, blocking on either side."""
    span = memoryview(bytearray(SPAN))
    stream = socket.create_connection(("127.0.0.1", port))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def case(op: str, lo: list[int], ro: list[int], block: int) -> Call:
        size = block * len(lo)
        head = size.to_bytes(8, "little") + (b"\1" if op == "read" else b"\0")

        def run() -> object:
            stream.sendall(head)
            if op == "read":
                done = 0
                while done < size:
                    done += stream.recv_into(span[done:size])
                return 0
            stream.sendall(span[:size])
            return stream.recv(1) != b"k"

        return run

    return case


class Peer(NamedTuple):
    """How a peer is measured; `absolute` says that remote offsets are addresses."""

    target: Callable[[Connection], None] | None
    initiator: Callable[[Any, int, int], Case]
    absolute: bool
    environment: dict[str, str]


NIXL = {"UCX_TLS": "all", "NIXL_LOG_LEVEL": "WARN"}
PEERS = {
    "mooncake": Peer(mooncake_target, mooncake, True, {"MC_LOG_LEVEL": "error"}),
    "nixl": Peer(nixl_target, nixl, True, NIXL),
    "nixl-prepped": Peer(nixl_target, nixl_prepped, True, NIXL),
    "nixl-tcp": Peer(nixl_target, nixl, True, {**NIXL, "UCX_TLS": "tcp"}),
    "memmove": Peer(None, memmove, False, {}),
    "cma": Peer(cma_target, cma, True, {}),
    "tcp": Peer(tcp_target, tcp, False, {}),
}


def busy_target(conn: Connection, target: Callable[[Connection], None]) -> None:
    """A target beside a thread that computes."""
    burn()
    target(conn)


def run_peer(
    name: str, seconds: float, cases: list[tuple[int, int]], ops: list[str], busy: str | None
) -> None:
    """Measure one peer in this fresh process, and end it."""
    target, initiator, absolute, environment = PEERS[name]
    os.environ.update(environment)
    if busy in ("initiator", "both"):
        burn()
    child = None
    seg, base = None, 0
    if target is not None:
        ours, theirs = mp.Pipe()
        start: Any = busy_target if busy in ("target", "both") else target
        args = (theirs, target) if start is busy_target else (theirs,)
        child = mp.get_context("spawn").Process(target=start, args=args, daemon=True)
        child.start()
        theirs.close()  # so that a target that dies ends this process too
        seg, base = ours.recv()
    local = np.ones(SPAN, np.uint8)
    case = initiator(seg, base, local.ctypes.data)
    rng = np.random.default_rng(7)
    for op in ops:
        for block, batch in cases:
            slots = SPAN // block
            lo = (rng.permutation(slots)[:batch] * block + local.ctypes.data).tolist()
            ro = (rng.permutation(slots)[:batch] * block + (base if absolute else 0)).tolist()
            call = case(op, lo, ro, block)
            assert not call(), f"{name} {op} failed"
            times: list[float] = []
            stop = time.perf_counter() + seconds
            while len(times) < 5 or (time.perf_counter() < stop and len(times) < 5000):
                began = time.perf_counter()
                failed = call()
                times.append(time.perf_counter() - began)
                assert not failed, f"{name} {op} failed"
            p50 = sorted(times)[len(times) // 2]
            line = {
                "peer": name,
                "op": op,
                "block": block,
                "batch": batch,
                "p50_us": round(p50 * 1e6, 2),
                "GBps": round(block * batch / p50 / 1e9, 3),
                "us_per_block": round(p50 / batch * 1e6, 3),
            }
            print(json.dumps(line), flush=True)
    if child is not None:
        child.kill()
    os._exit(0)


def main() -> int:
    """Measure each peer that is named in a process of its own; their runtimes do not share one well."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--peer", action="append", choices=PEERS, required=True)
    parser.add_argument("--op", action="append", choices=["write", "read"])
    parser.add_argument(
        "--case", action="append", metavar="BLOCKxBATCH", help="e.g. 16384x1000; default: all"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="per case")
    parser.add_argument("--busy", choices=["target", "initiator", "both"])
    args = parser.parse_args()
    pairs = [case.split("x") for case in args.case or ()]
    cases = [(int(block), int(batch)) for block, batch in pairs] or CASES
    failed = 0
    for peer in args.peer:
        runner = mp.get_context("spawn").Process(
            target=run_peer,
            args=(peer, args.seconds, cases, args.op or ["write", "read"], args.busy),
        )
        runner.start()
        runner.join()
        failed += runner.exitcode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
