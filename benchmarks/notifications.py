#!/usr/bin/env python3
"""Notifications over paths that are cut and healed: each arrives once, in order, and after its data.

One engine takes them, each sender is a process in a network namespace of its own, with a link of its own to
the first. Each link is cut again and again, now at one end and now at the other, for less than the grace.
Half of the notifications are plain ones, sent one after the other; the other half are about batches, of which
several are under way, with checksums. Checked: each sender's numbers have no gap and no repetition; plain
ones arrive in the order of the calls, those about batches in the order in which the batches ended; the
data of each was verified; a batch that failed was told as failed, once. The exit status is 1 if anything is
not so.

    python benchmarks/notifications.py                             # 100,000 from 8 senders; needs root
    python benchmarks/notifications.py --resets                    # connections break as well: data fails
    python benchmarks/notifications.py --senders 2 --notes 2000    # a short one
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from star import HUB, Arm, cut, on_a_machine, reset, star

from tent_core.testing.peers import PeerProcess

HERE = Path(__file__).resolve().parent
BEFORE = f"import sys; sys.path.insert(0, {str(HERE)!r}); import notifications_peer as peer"
GRACE_S = 10.0
HEALED_S = (2.5, 4.5)
"""Longer than it takes to connect again: else two cuts are one, as the grace counts."""

FIRST_S = 0.3
"""When each link is cut for the first time."""

QUEUE = 512
PATIENCE_S = 900.0
LAST_S = 30.0


def config(listen: str) -> dict[str, Any]:
    """Of every engine: one transport, and a silent peer is noticed in two seconds."""
    return {
        "control": {"listen": f"{listen}:0", "keepalive_time_s": 1, "keepalive_timeout_s": 1},
        "peers": {"grace_s": GRACE_S},
        "notifications": {"queue": QUEUE},
        "transports": {"tcp": {"enable": True}},
        "policy": [{"name": "all", "transports": ["tcp"]}],
        "log": {"level": "error"},
    }


@dataclass
class Cutter:
    """Cuts the link of one arm until it is told to end."""

    arm: Arm
    longest_s: float
    resets: bool
    random: random.Random
    cuts: int = 0
    seconds: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Cut, heal, and so on."""
        healed = FIRST_S
        while not self.over.wait(healed):
            with cut(self.random.choice(self.arm.ends)):
                began = time.monotonic()
                self.over.wait(self.random.uniform(0.2, self.longest_s))
                self.cuts += 1
                self.seconds += time.monotonic() - began
            healed = self.random.uniform(*HEALED_S)
            if self.resets and not self.over.wait(healed / 2):
                reset(self.arm.ends[1])


Taken = list[tuple[int, str, bool, bool]]
"""Number, name, whether it is well, whether its data was verified."""


def mistakes(taken: Taken, sent: dict[str, Any], plain: int, batches: int) -> list[str]:
    """What is wrong with what arrived from one sender."""
    wrong = list(sent["errors"])
    numbers = [number for number, *_ in taken]
    if numbers != list(range(1, len(taken) + 1)):
        wrong.append("its numbers have gaps or repetitions, or are out of order")
    if [n for _, n, *_ in taken if n[0] == "p"] != [f"p{i}" for i in range(plain)]:
        wrong.append(
            "its plain notifications are not those that it sent, in the order of the calls"
        )
    well = [name for _, name, ok, _ in taken if name[0] == "b" and ok]
    if well != sent["ended"]:
        wrong.append("those about its batches are not in the order in which the batches ended")
    if sorted(well) != sorted(f"b{i}" for i in range(batches)):
        wrong.append("those about its batches are not one for each")
    if not all(verified for _, name, ok, verified in taken if name[0] == "b" and ok):
        wrong.append("data was not verified")
    failed = [name for _, name, ok, _ in taken if not ok]
    if Counter(failed) != Counter(sent["failed"]):
        wrong.append("failures were not told once each")
    return wrong


def measure(
    senders: int, notes: int, longest_cut: float, resets: bool, seed: int
) -> dict[str, Any]:
    """Run it; what was counted, and what is wrong."""
    each = notes // senders
    plain, batches = each - each // 2, each // 2
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hub, arms = stack.enter_context(star(senders))

        def engine(namespace: str, listen: str) -> PeerProcess:
            boot_id = folder / namespace
            boot_id.write_text(f"{uuid.uuid4()}\n")
            wrapper = on_a_machine(namespace, boot_id)
            peer = PeerProcess(config(listen), before=BEFORE, wrapper=wrapper)
            stack.callback(peer.kill)
            return peer

        there = engine(hub, HUB)
        there.run("receiver = peer.Receiver(engine, senders)", senders=senders)
        here = [engine(arm.namespace, arm.address) for arm in arms]
        for number, one in enumerate(here):
            opened = "sender = peer.Sender(engine, owner, number)"
            one.run(opened, owner=there.segment_name, number=number)
        cutters = [
            Cutter(arm, longest_cut, resets, random.Random(seed + i)) for i, arm in enumerate(arms)
        ]
        threads = [threading.Thread(target=cutter.run) for cutter in cutters]
        began = time.monotonic()
        for one in here:
            one.run("sender.start(plain, batches)", plain=plain, batches=batches)
        for thread in threads:
            thread.start()
        try:
            while any(one.run("sender.busy()") for one in here):
                time.sleep(0.2)
                if time.monotonic() - began > PATIENCE_S:
                    break
            seconds = time.monotonic() - began
        finally:
            for cutter in cutters:
                cutter.over.set()
            for thread in threads:
                thread.join(30)
        sent = [one.run("sender.report()") for one in here]
        expected = sum(s["plain"] + len(s["ended"]) + len(s["failed"]) for s in sent)
        until = time.monotonic() + LAST_S  # failures are told in the background
        while there.run("receiver.count()") < expected and time.monotonic() < until:
            time.sleep(0.1)
        taken = there.run("receiver.taken")
        states = there.run("[(p.state, p.handshakes) for p in engine.peers()]")
        wrong = {
            f"sender {i}": found
            for i, (got, said) in enumerate(zip(taken, sent, strict=True))
            if (found := mistakes(got, said, plain, batches))
        }
        for one in (*here, there):
            with contextlib.suppress(AssertionError, TimeoutError):
                one.close()
    return {
        "senders": senders,
        "delivered": sum(map(len, taken)),
        "about_batches": sum(len(s["ended"]) for s in sent),
        "failures_told": sum(len(s["failed"]) for s in sent),
        "seconds": round(seconds, 1),
        "per_second": round(sum(map(len, taken)) / seconds),
        "cuts": sum(c.cuts for c in cutters),
        "longest_cut_s": longest_cut,
        "resets": resets,
        "share_of_time_cut": round(sum(c.seconds for c in cutters) / (seconds * senders), 2),
        "sessions": sorted(Counter(state for state, _ in states).items()),
        "wrong": wrong,
    }


def main() -> int:
    """Print what was counted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--senders", type=int, default=8)
    parser.add_argument("--notes", type=int, default=100_000)
    parser.add_argument("--longest-cut", type=float, default=5.0, help="seconds; the grace is 10")
    parser.add_argument(
        "--resets", action="store_true", help="break all connections between cuts, too: data fails"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = measure(given.senders, given.notes, given.longest_cut, given.resets, given.seed)
    if given.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:18} {value}")
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
