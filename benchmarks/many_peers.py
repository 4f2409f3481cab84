#!/usr/bin/env python3
"""A thousand peers at once on one engine: what each costs while it is idle, on either side.

Ten processes with a hundred engines each open the segment of one engine, write to it and stay. Counted before
and after, from outside: threads of the one engine, which do not grow with peers, and resident memory, of its
process and helpers and of the processes with the hundred. The exit status is 1 if a peer costs more than
160 KiB on either side, or a thread.

    python benchmarks/many_peers.py                              # shm
    python benchmarks/many_peers.py --transport tcp --json
    python benchmarks/many_peers.py --role opener                # the one engine opens the thousand
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from footprint import children, footprint

from tent_core.testing.peers import Nursery, PeerProcess

HERE = Path(__file__).resolve().parent
BEFORE = f"import sys; sys.path.insert(0, {str(HERE)!r})"
MOST_KIB = 160
POOL_THREADS = 8
"""By so many gRPC's own pool of threads may have grown, whatever the number of peers."""

WAIT_S = 600.0
QUIET_S = 2.0


@dataclass(frozen=True)
class Cost:
    """What one side holds: threads, descriptors and KiB, the helpers of its process included."""

    threads: int
    descriptors: int
    resident_kib: int


def cost(*peers: PeerProcess) -> Cost:
    """Of these processes together."""
    found = [footprint(pid) for peer in peers for pid in (peer.pid, *children(peer.pid))]
    return Cost(
        sum(f.threads for f in found),
        sum(f.descriptors for f in found),
        sum(f.resident_kib for f in found),
    )


def config(transport: str) -> dict[str, Any]:
    """The same for all."""
    return {
        "transports": {transport: {"enable": True}},
        "policy": [{"name": "many", "transports": [transport]}],
        "log": {"level": "error"},
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start everybody, have them open, count, close."""
    with ExitStack() as stack:
        one = stack.enter_context(PeerProcess(config(args.transport)))
        one.run("pool = engine.allocate(4096, name='pool')")
        nursery = stack.enter_context(Nursery())
        crowds = []
        for number in range(args.processes):
            say(f"process {number + 1} of {args.processes}: {args.engines} engines")
            crowd = stack.enter_context(
                PeerProcess(config(args.transport), before=BEFORE, nursery=nursery)
            )
            crowd.run("from crowd import Crowd")
            make = "crowd = Crowd(config, n); names = crowd.offer() if offer else []; names"
            offer = args.role == "opener"
            names = crowd.run(
                make, config=config(args.transport), n=args.engines, offer=offer, timeout=WAIT_S
            )
            crowds.append((crowd, names))
        peers = [crowd for crowd, _ in crowds]
        time.sleep(QUIET_S)
        before = {"one": cost(one), "many": cost(*peers)}
        began = time.monotonic()
        for number, (crowd, names) in enumerate(crowds, 1):
            say(f"process {number} of {args.processes}: opening")
            if args.role == "opened":
                crowd.run("crowd.open(target)", target=one.segment_name, timeout=WAIT_S)
            else:
                one.run(OPEN, names=names, timeout=WAIT_S)
        opened_s = time.monotonic() - began
        known = one.run("len(engine.peers())", timeout=WAIT_S)
        time.sleep(QUIET_S)
        after = {"one": cost(one), "many": cost(*peers)}
        say("closing")
        began = time.monotonic()
        one.run("engine.close()", timeout=WAIT_S)
        closed_s = time.monotonic() - began
        left_s = max(peer.run("crowd.close()", timeout=WAIT_S) for peer in peers)
    return document(args, before, after, known, opened_s, closed_s, left_s)


OPEN = """
held = globals().setdefault("held", [])
for name in names:
    segment = engine.open_segment(name)
    segment.write(pool, segment.buffer("pool"))
    held.append(segment)
"""


def document(
    args: argparse.Namespace,
    before: dict[str, Cost],
    after: dict[str, Cost],
    known: int,
    opened_s: float,
    closed_s: float,
    left_s: float,
) -> dict[str, Any]:
    """The result, and what of it is too much."""
    peers = args.processes * args.engines
    kib = {side: (after[side].resident_kib - before[side].resident_kib) / peers for side in before}
    wrong = [
        f"{n:.1f} KiB for a peer, on the side of the {s}" for s, n in kib.items() if n > MOST_KIB
    ]
    if after["one"].threads - before["one"].threads > POOL_THREADS:
        wrong.append("threads of the one engine grow with its peers")
    if known != peers:
        wrong.append(f"the one engine knows {known} peers")
    return {
        "transport": args.transport,
        "role": args.role,
        "peers": peers,
        "before": {side: asdict(c) for side, c in before.items()},
        "after": {side: asdict(c) for side, c in after.items()},
        "kib_per_peer": {side: round(n, 1) for side, n in kib.items()},
        "open_ms": round(1000 * opened_s / peers, 2),
        "close_s": round(closed_s, 2),
        "peers_close_s": round(left_s, 2),
        "wrong": wrong,
    }


def show(found: dict[str, Any]) -> None:
    """The table for people."""
    print(f"{found['peers']} peers, {found['transport']}")
    print(f"{'':24}{'before':>12}{'after':>12}{'per peer':>12}")
    for side in ("one", "many"):
        for what, before in found["before"][side].items():
            after = found["after"][side][what]
            print(
                f"{f'{side}: {what}':24}{before:>12}{after:>12}{(after - before) / found['peers']:>12.2f}"
            )
    print(
        f"opening took {found['open_ms']} ms a peer, close() of the one engine {found['close_s']} s, "
        f"of the slowest process with many, all at once, {found['peers_close_s']} s"
    )
    for reason in found["wrong"]:
        print(f"TOO MUCH: {reason}")


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Run, and print; the exit status is 1 if a peer costs too much."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", default="shm", help="the only one that is enabled (shm)")
    parser.add_argument(
        "--role", choices=["opened", "opener"], default="opened", help="of the one engine"
    )
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--engines", type=int, default=100, help="in each process (100)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    found = run(args)
    print(json.dumps(found)) if args.json else show(found)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
