#!/usr/bin/env python3
"""Replays a trace of KV-cache traffic with TENT and with what one would pick instead, on the same blocks.

    python benchmarks/replay_peers.py TRACE [--requests 50] [--rounds 3] [--json]

`tent replay` moves the blocks of each request between two paged pools, and checks every byte. The same
pieces go once more from and to the same offsets, through the peers' Python API in processes of their own:
TENT's shm beside nixl, its tcp beside mooncake. Throughput is bytes over the time of the transfers alone,
on all sides. The exit status is 1 if TENT has less than four times the throughput of either, by the medians
of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, conclude
from surroundings import HERE, machine, peers_python

from tent_core.replay.geometry import MODELS, PAGES_PER_BLOCK, Geometry
from tent_core.replay.pool import PagedPool
from tent_core.replay.trace import TraceRequest, read_trace

MODEL = "Qwen2.5-0.5B"
PAIRS = {"shm": "nixl", "tcp": "mooncake"}
LEAST = 4.0
POOL = 2 << 30
SEED = 0
PATIENCE_S = 600.0


def lists(requests: tuple[TraceRequest, ...], geometry: Geometry) -> dict[str, Any]:
    """Which pieces go where, by the placement of `tent replay` with the same seed and pools."""
    pages = geometry.pages_in(POOL)
    decode = PagedPool(pages, PAGES_PER_BLOCK, SEED)
    prefill = PagedPool(pages, PAGES_PER_BLOCK, SEED + 1)
    found: dict[str, Any] = {"size": POOL, "piece": geometry.piece_bytes}
    count = 0
    for request in requests:
        wanted = decode.acquire(list(dict.fromkeys(request.hashes)))
        decode.release(wanted)
        if not wanted.fresh.any():
            continue
        blocks = [h for h, fresh in zip(wanted.hashes, wanted.fresh, strict=True) if fresh]
        own = prefill.acquire(blocks)
        prefill.release(own)
        found[f"here{count}"] = geometry.offsets(own.pages, pages)
        found[f"there{count}"] = geometry.offsets(wanted.pages[wanted.fresh], pages)
        count += 1
    return {**found, "requests": count}


def tent(trace: str, requests: int, transport: str) -> dict[str, Any]:
    """What `tent replay` says of that transport."""
    command = (sys.executable, "-m", "tent_core.cli", "replay", trace, "--json")
    options = (f"--requests={requests}", f"--transport={transport}", f"--model={MODEL}")
    return _run((*command, *options, f"--seed={SEED}", f"--pool-size={POOL}"))


def peer(python: str, name: str, path: Path) -> dict[str, Any]:
    """What moving the same pieces with that peer takes."""
    return _run((python, str(HERE / "replay_mover.py"), name, str(path)))


def _run(command: tuple[str, ...]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode:
        raise SystemExit(f"{done.stderr}\n{' '.join(command)} ended with {done.returncode}")
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    found: dict[str, Any] = json.loads(line)
    return found


def measure(args: argparse.Namespace, python: str) -> dict[str, list[float]]:
    """GB/s of every contender, one for each round."""
    pieces = lists(read_trace(args.trace, args.requests), MODELS[MODEL])
    moved = sum(len(column) for name, column in pieces.items() if name.startswith("here"))
    moved *= pieces["piece"]
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "lists.npz")
        np.savez(path, **pieces)
        for number in range(args.rounds):
            for transport, name in PAIRS.items():
                print(f"round {number + 1} of {args.rounds}: {transport}, {name}", file=sys.stderr)
                for who, document in (
                    (f"tent {transport}", tent(args.trace, args.requests, transport)),
                    (name, peer(python, name, path)),
                ):
                    if document["bytes"] != moved:
                        raise SystemExit(f"{who} moved {document['bytes']} bytes of {moved}")
                    found.setdefault(who, []).append(document["bytes"] / document["seconds"] / 1e9)
    return found


def main() -> int:
    """Measure, and print a table or one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", help="such as the conversation trace of the Mooncake paper")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers-python", metavar="PATH", help="a Python that has the peers")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    python = peers_python(args.peers_python)
    found = measure(args, python)
    middle = {who: statistics.median(rates) for who, rates in found.items()}
    figures = [
        Figure(
            f"replay, tent {transport} to {name}",
            middle[f"tent {transport}"] / middle[name],
            LEAST,
            "times the throughput",
            at_least=True,
        )
        for transport, name in PAIRS.items()
    ]
    if args.json:
        document = {"machine": machine(python), "GBps": found}
        print(json.dumps({**document, "figures": [figure.as_json() for figure in figures]}))
    else:
        for who, rates in found.items():
            print(f"{who:12}{middle[who]:>8.2f} GB/s ({min(rates):.2f} to {max(rates):.2f})")
        print(*figures, sep="\n")
    return conclude(figures)


if __name__ == "__main__":
    raise SystemExit(main())
