#!/usr/bin/env python3
"""What Python costs to post and complete an RDMA work request: batches of 64 requests of 64 KiB, no device.

Verbs are the fake of `tent_mock.verbs` in its instant mode, which does nothing but count; what it costs by
itself is measured in turn with the rest and taken out. What is left is ours, in microseconds a request:

- `new batch`: from `submit` of a batch that was not seen before, which is cut and whose keys are looked up,
  until all of it is reported complete;
- `prepared`: the same of a batch that the application prepared once and posts again;
- `by pyverbs`: the loop that hands a batch to pyverbs, over empty stand-ins for pyverbs' own calls (which
  are not taken out). It comes on top of either, and is in the sums.

The figure to reach is 5 microseconds: at 400 Gb/s a slice of 1 MiB takes 21. The exit status is 1 if a sum is
above it. All is measured in turn, round by round, and medians over the rounds are shown.

    python benchmarks/rdma_post.py
    python benchmarks/rdma_post.py --json --rounds 31
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

import tent_rdma.verbs
from tent_core.testing.harness import Context, Side, requests
from tent_core.topology import Gid, RdmaDevice, RdmaPort, Topology
from tent_core.transport import Endpoint
from tent_core.types import Opcode
from tent_core.work import Requests, Work
from tent_mock.verbs import FakeVerbs
from tent_rdma.plugin import tent_transport
from tent_rdma.queue_pairs import ExtendedQueuePair
from tent_rdma.transport import RdmaTransport

GROUP = 64
SIZE = 64 << 10
GOAL_US = 5.0
NIC = "fake0"


@dataclass(frozen=True)
class Rig:
    """What is measured, and the fake below it."""

    fabric: FakeVerbs
    endpoint: Endpoint
    batch: Requests
    columns: Any
    """What the transport posts of `batch`, or as good as that."""


@contextmanager
def rig() -> Iterator[Rig]:
    """Two sides of one process on one NIC, and a batch between them."""
    fabric = FakeVerbs(tent_rdma.verbs, {NIC: "::ffff:10.0.0.1"}, instant=True)
    gid = Gid(1, fabric.nics[NIC].gid_text, "RoCE v2", "eth0")
    port = RdmaPort(1, "ACTIVE", "Ethernet", 100.0, (gid,))
    topology = Topology(rdma_devices=(RdmaDevice(NIC, ports=(port,), node_type="CA"),))
    declaration = replace(tent_transport(), factory=lambda: RdmaTransport(lambda: fabric))
    with ExitStack() as stack:
        sides = []
        for _ in range(2):
            side = Side(declaration, slice=SIZE, group=GROUP)
            side.context = Context(side, declaration.settings(slice=SIZE, group=GROUP), topology)
            sides.append(stack.enter_context(side))
        here, there = sides
        local = here.register(np.ones(GROUP * SIZE, np.uint8))
        remote = there.register(np.zeros(GROUP * SIZE, np.uint8))
        rows = [(local, i * SIZE, remote, i * SIZE, SIZE) for i in range(GROUP)]
        endpoint = here.connect(there)
        columns = np.full((GROUP, 5), 1 << 40, np.uint64)
        columns[:, 1], columns[:, 3], columns[:, 4] = 0x1001, 0x1002, SIZE
        yield Rig(fabric, endpoint, requests(Opcode.WRITE, rows), columns)
        endpoint.close("measured")


class StubQueuePair:
    """Where pyverbs would be: its calls, and nothing in them."""

    qp_num = 1
    wr_id = wr_flags = 0

    def wr_start(self) -> None:
        """Nothing."""

    wr_complete = wr_abort = wr_start

    def wr_rdma_write(self, rkey: int, address: int) -> None:
        """Nothing."""

    wr_rdma_read = wr_rdma_write

    def wr_set_sge(self, sge: Any) -> None:
        """Nothing."""


def by_pyverbs(columns: Any) -> Callable[[], None]:
    """One batch through the real seam, with nothing behind it."""
    library = SimpleNamespace(
        e=SimpleNamespace(IBV_SEND_SIGNALED=2),
        wr=SimpleNamespace(SGE=lambda *_: SimpleNamespace(addr=0, lkey=0, length=0)),
        error=OSError,
        named=nullcontext,
    )
    pair = ExtendedQueuePair(library, StubQueuePair())
    return lambda: pair.post(Opcode.WRITE, columns, 1)


def fake_alone(fabric: FakeVerbs, columns: Any) -> Callable[[], None]:
    """What the fake does for one batch: one post and one poll."""
    device = fabric.open(NIC)
    queue = device.completion_queue(256)
    pair = device.queue_pair(1, queue, queue, send_depth=256)

    def once() -> None:
        pair.post(Opcode.WRITE, columns, 1)
        queue.poll(64)

    return once


def submission(rig: Rig, *, reused: bool) -> Callable[[], None]:
    """One batch through the transport, until all of it is reported."""
    batch = rig.batch
    kept = Requests(
        batch.opcode,
        batch.local,
        batch.remote,
        batch.local_ids,
        batch.remote_ids,
        batch.local_used,
        batch.remote_used,
        batch.remote_generations,
        batch.total,
        reused,
    )

    def once() -> None:
        work = Work(kept, _nothing, may_block=True)
        rig.endpoint.submit(work)
        while not work.finished:  # the first time it connects
            time.sleep(0.001)
        assert not work.causes, work.causes

    return once


def _nothing(work: Work) -> None:
    pass


def microseconds(once: Callable[[], None], batches: int) -> float:
    """Of one work request, over so many batches: time of this thread, which does it all."""
    begin = time.thread_time()
    for _ in range(batches):
        once()
    return (time.thread_time() - begin) * 1e6 / batches / GROUP


def measure(rounds: int, batches: int) -> dict[str, Any]:
    """Medians over the rounds, in microseconds a work request."""
    with rig() as made:
        what = {
            "fake alone": fake_alone(made.fabric, made.columns),
            "by pyverbs": by_pyverbs(made.columns),
            "prepared": submission(made, reused=True),
            "new batch": submission(made, reused=False),
        }
        for once in what.values():
            microseconds(once, 20)
        nic = made.fabric.nics[NIC].counts
        before = nic.posts, nic.posted, nic.polls
        what["prepared"]()
        calls = nic.posts - before[0], nic.posted - before[1], nic.polls - before[2]
        gc.collect()
        gc.disable()
        found: dict[str, list[float]] = {name: [] for name in what}
        for _ in range(rounds):
            for name, once in what.items():
                found[name].append(microseconds(once, batches))
        gc.enable()
    fake, pyverbs = found["fake alone"], found["by pyverbs"]
    ours = {
        name: [value - less for value, less in zip(found[name], fake, strict=True)]
        for name in ("prepared", "new batch")
    }
    sums = {
        name: [value + more for value, more in zip(values, pyverbs, strict=True)]
        for name, values in ours.items()
    }
    return {
        "group": GROUP,
        "bytes": SIZE,
        "rounds": rounds,
        "batches": batches,
        "calls_per_batch": dict(zip(("posts", "work_requests", "polls"), calls, strict=True)),
        "goal_us": GOAL_US,
        "us": {
            "fake_alone": statistics.median(fake),
            "by_pyverbs": statistics.median(pyverbs),
            "prepared": statistics.median(ours["prepared"]),
            "new_batch": statistics.median(ours["new batch"]),
        },
        "sum_us": {
            "prepared": statistics.median(sums["prepared"]),
            "new_batch": statistics.median(sums["new batch"]),
        },
    }


def show(found: dict[str, Any]) -> None:
    """The table for people."""
    us, total, calls = found["us"], found["sum_us"], found["calls_per_batch"]
    print(f"Python per work request of {SIZE >> 10} KiB, in batches of {GROUP}; microseconds")
    print(f"(a batch: {calls['posts']} posts, {calls['polls']} polls)\n")
    print(f"{'':12}{'transport':>11}{'by pyverbs':>12}{'sum':>8}{'goal':>8}")
    for name in ("prepared", "new_batch"):
        print(
            f"{name.replace('_', ' '):12}{us[name]:11.2f}{us['by_pyverbs']:12.2f}"
            f"{total[name]:8.2f}{GOAL_US:8.2f}"
        )
    print(f"\ntaken out of `transport`: {us['fake_alone']:.3f} for the fake alone")


def main() -> int:
    """Measure and print; 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, default=100, help="of 64 requests, in a round")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    options = parser.parse_args()
    found = measure(options.rounds, options.batches)
    if options.json:
        print(json.dumps(found))
    else:
        show(found)
    return int(max(found["sum_us"].values()) > GOAL_US)


if __name__ == "__main__":
    sys.exit(main())
