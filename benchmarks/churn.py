#!/usr/bin/env python3
"""Peers come and go, and nothing of them stays behind: a long-lived engine and hundreds of short-lived ones.

Each peer is a fresh process that opens the engine (or is opened by it), moves data both ways, notifies and
leaves: most close, a third is killed in the middle of writing, some are stopped until the grace has ended,
and some come back at once on the same port. Counted before and after, from outside: descriptors, threads,
mappings, sockets in CLOSE-WAIT and resident memory of the engine's process and of its helpers, and what
Python and the transports hold. The exit status is 1 if anything has grown.

    python benchmarks/churn.py --transport tcp                    # 400 peers open the engine
    python benchmarks/churn.py --transport shm --role opener      # the engine opens 400 peers
    python benchmarks/churn.py --transport tcp --nofile 256       # and then with more peers than fit
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import json
import random
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import surplus
from footprint import children, footprint

from tent_core.testing.peers import Nursery, PeerProcess, thread_states

HERE = Path(__file__).resolve().parent
BEFORE = f"import sys; sys.path.insert(0, {str(HERE)!r})"
POOL = 1 << 20
FIRST = 10
"""After how many peers the first count is made: whatever is made once has been made by then."""

SLACK_KIB = 2048
"""By how much resident memory may differ, over all."""

SETTLE_S = 75.0
"""gRPC's pool lets a thread too many go after 20 s; a name that went silent is looked for for a minute."""

CLOSE_S = 1.0
GRACE_S = 3.0
QUEUE = 64
"""Notifications that wait at a receiver. A peer with one beyond it has something pending: it is in use."""

PATIENCE_S = 40.0


class End(enum.Enum):
    """How a peer leaves."""

    CLOSE = "close"
    """It closes its engine."""
    KILL = "kill"
    """SIGKILL, while data is moving."""
    STOP = "stop"
    """SIGSTOP, while data is moving, until it has departed by the grace; then SIGKILL."""


PATTERN = (
    (End.CLOSE,),
    (End.KILL,),
    (End.KILL, End.CLOSE),
    (End.STOP,),
    (End.CLOSE,),
    (End.CLOSE, End.KILL),
    (End.CLOSE,),
)
"""Lives, over and over. Two peers in one are of one name: the second takes the port of the first at once."""


def lives(peers: int) -> Iterator[tuple[End, ...]]:
    """As many lives as make `peers` processes."""
    while peers:
        for life in PATTERN:
            if peers >= len(life):
                yield life
                peers -= len(life)
            elif not peers:
                return


def config(transport: str, listen: str = "127.0.0.1:0") -> dict[str, Any]:
    """The same for all: one transport, and a lost peer is noticed soon."""
    return {
        "transports": {transport: {"enable": True}},
        "policy": [{"name": "churn", "transports": [transport]}],
        "control": {"listen": listen, "keepalive_time_s": 1, "keepalive_timeout_s": 1},
        "peers": {"grace_s": GRACE_S},
        "notifications": {"queue": QUEUE},
        "log": {"level": "error"},
    }


class Lasting:
    """The long-lived engine, in a process of its own. Thread-safe."""

    def __init__(self, transport: str, nofile: int | None) -> None:
        limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({nofile}, {nofile}))"
        before = f"{BEFORE}\n{limit}" if nofile else BEFORE
        self.process = PeerProcess(config(transport), before=before)
        self._lock = threading.Lock()
        self.ask("import churn_engine; host = churn_engine.Host(engine)")

    def ask(self, source: str, **values: Any) -> Any:
        """Run this in its process."""
        with self._lock:
            return self.process.run(source, timeout=PATIENCE_S, **values)

    def waits(self, name: str, *states: str | None) -> float:
        """Wait until the peer of that name is in one of these states; the seconds that it took."""
        began = looked = time.monotonic()
        apart = 0.0
        while (state := self.ask("host.states()").get(name)) not in states:
            now = time.monotonic()
            apart, looked = max(apart, now - looked), now
            if now - began > PATIENCE_S:
                raise AssertionError(
                    f"peer {name} is still {state} after {PATIENCE_S:g} s, in which it was looked at every "
                    f"{apart:.2f} s or more often: {self._describe(name)}"
                )
            time.sleep(0.02)
        return time.monotonic() - began

    def _describe(self, name: str) -> str:
        """What the engine knows of a peer, and what the kernel says of its process and of the connections."""
        known = self.ask("[(p.pid, repr(p)) for p in engine.peers() if p.name == name]", name=name)
        threads = {pid: thread_states(pid) for pid, _ in known}
        port = self.process.segment_name.rpartition(":")[2]
        ss = ["ss", "-tnpoi", f"sport = :{port} or dport = :{port}"]
        sockets = subprocess.getoutput(shlex.join(ss))
        return f"{known}, threads by process {threads} (T: stopped)\n{sockets}"


@dataclass
class Churn:
    """One run: peers against the engine."""

    lasting: Lasting
    nursery: Nursery
    transport: str
    role: str
    random: random.Random
    forgotten_s: list[float] = field(default_factory=list)
    started: int = 0

    def run(self, peers: int, parallel: int, title: str) -> None:
        """Let `peers` come and go, some at a time."""
        with ThreadPoolExecutor(parallel) as pool:
            futures = [pool.submit(self.life, life) for life in lives(peers)]
            for done, future in enumerate(futures, 1):
                future.result()
                if sys.stderr.isatty() or done % 20 == 0 or done == len(futures):
                    print(f"\r{title}: {self.started} peers", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)

    def life(self, ends: tuple[End, ...]) -> None:
        """One peer after the other under one name; the engine then forgets that name."""
        listen = "127.0.0.1:0"
        for end in ends:
            listen = self.peer(end, listen)
        self.forgotten_s.append(self.lasting.waits(listen, None))

    def peer(self, end: End, listen: str) -> str:
        """One peer from its start to its end; its name."""
        self.started += 1
        peer = PeerProcess(config(self.transport, listen), before=BEFORE, nursery=self.nursery)
        with peer:
            self.exchange(peer, writes_on=end is not End.CLOSE)
            if end is not End.CLOSE:
                time.sleep(self.random.uniform(0, 0.02))
            if end is End.STOP:
                peer.stop()
                # It stays known while its process, which may hold our memory, lives.
                self.lasting.waits(peer.segment_name, None, "departed")
            peer.close() if end is End.CLOSE else peer.kill()
        self.lasting.ask("host.let_go(name)", name=peer.segment_name)
        return peer.segment_name

    def exchange(self, peer: PeerProcess, writes_on: bool) -> None:
        """Have data moved between the two, by the one whose role that is."""
        if self.role == "opened":
            peer.run("import churn_peer")
            visit = "churn_peer.visit(engine, target, on)"
            peer.run(visit, target=self.lasting.process.segment_name, on=writes_on)
        else:
            peer.run("pool = engine.allocate(size, name='pool')", size=POOL)
            self.lasting.ask("host.use(name, on)", name=peer.segment_name, on=writes_on)
            assert peer.run("engine.next_notification(10).name") == "used"


# -------------------------------------------------------------------- counting

Counts = dict[str, int]
"""By what is counted, such as "engine: descriptors"."""


def count(lasting: Lasting) -> Counts:
    """Everything that must not grow."""
    counts = {f"engine: {what}": n for what, n in lasting.ask("host.held()").items()}
    pid = lasting.process.pid
    for number, process in enumerate([pid, *children(pid)]):
        who = f"helper {number}" if number else "engine"
        for what, n in asdict(footprint(process)).items():
            counts[f"{who}: {what}"] = n
    return counts


def settled(lasting: Lasting, first: Counts | None = None) -> Counts:
    """What is held once nothing has changed but memory for a second, and no more than at `first`.

    What is still more after SETTLE_S stays.
    """
    until = time.monotonic() + SETTLE_S
    last, since = count(lasting), time.monotonic()
    while time.monotonic() < until:
        time.sleep(0.2)
        now = count(lasting)
        if _steady(now) != _steady(last):
            since = time.monotonic()
        last = now
        if time.monotonic() - since > 1.0 and (first is None or not grown(first, last)):
            break
    return last


def _steady(counts: Counts) -> Counts:
    return {name: n for name, n in counts.items() if not name.endswith(("resident_kib", "objects"))}


def grown(first: Counts, last: Counts) -> list[str]:
    """What there is more of than there may be."""
    found = [name for name, n in last.items() if n - first.get(name, 0) > _allowed(name)]
    return found + [name for name, n in last.items() if name.endswith("close_wait") and n]


def _allowed(name: str) -> int:
    if name.endswith("resident_kib"):
        return SLACK_KIB
    return 100 if name.endswith("objects") else 0


def report(first: Counts, last: Counts, peers: int) -> dict[str, dict[str, float]]:
    """Before, after, and growth per peer, by what was counted."""
    return {
        name: {
            "first": first.get(name, 0),
            "last": n,
            "per_peer": round((n - first.get(name, 0)) / max(1, peers), 4),
        }
        for name, n in last.items()
    }


def show(document: dict[str, Any]) -> None:
    """The table for people."""
    print(f"{'':34}{f'after {FIRST}':>12}{'after all':>12}{'per peer':>12}")
    for name, row in document["resources"].items():
        mark = "  GREW" if name in document["grew"] else ""
        print(f"{name:34}{row['first']:>12}{row['last']:>12}{row['per_peer']:>12.4f}{mark}")
    if found := document["surplus"]:
        print(f"of {found['most'] + surplus.SURPLUS} busy peers {found['let_in']} were let in")
        print(f"the others heard: {found['refusals'][-1] if found['refusals'] else 'nothing'}")
        print(f"most descriptors of a process: {found['descriptors']} of {document['nofile']}")
        print(f"the next was let in after someone left: {found['served_s']} s")
    for what in document["wrong"]:
        print(f"WRONG: {what}")
    print(f"close() took {document['close_s']:.3f} s")
    print(f"the slowest to be forgotten took {document['forgotten_s']:.3f} s after its end")


def main() -> int:
    """Run, and print; the exit status is 1 if anything grew, or took too long."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=400, help="how many come and go (400)")
    parser.add_argument("--transport", default="tcp", help="the only one that is enabled (tcp)")
    parser.add_argument(
        "--role", choices=["opened", "opener"], default="opened", help="of the engine"
    )
    parser.add_argument("--nofile", type=int, help="limit of descriptors of the engine's process")
    parser.add_argument("--parallel", type=int, default=4, help="peers at a time (4)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    if args.peers <= FIRST:
        parser.error(f"--peers must be more than {FIRST}, after which is counted first")
    lasting = Lasting(args.transport, args.nofile)
    with contextlib.closing(lasting.process), Nursery() as nursery:
        churn = Churn(lasting, nursery, args.transport, args.role, random.Random(args.seed))
        churn.run(FIRST, args.parallel, "first")
        first = settled(lasting)
        churn.run(args.peers - FIRST, args.parallel, "then")
        last = settled(lasting, first)
        found = args.nofile and surplus.run(lasting.process, nursery, config(args.transport))
        # A crowd leaves the allocator with more memory than it had: what it held is what counts.
        after = _steady(settled(lasting, last)) if found else {}
        close_s = lasting.ask("host.close()")
    grew = grown(first, last) + grown(last, after)
    if close_s > CLOSE_S:
        grew.append("host.close()")
    document = {
        "transport": args.transport,
        "role": args.role,
        "peers": args.peers,
        "nofile": args.nofile,
        "resources": report(first, last, args.peers - FIRST),
        "surplus": asdict(found) if found else None,
        "close_s": round(close_s, 3),
        "forgotten_s": round(max(churn.forgotten_s), 3),
        "grew": grew,
        "wrong": found.wrong(args.nofile) if found else [],
    }
    print(json.dumps(document)) if args.json else show(document)
    return 1 if document["grew"] or document["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
