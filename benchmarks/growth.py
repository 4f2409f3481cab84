#!/usr/bin/env python3
"""What grows: time and memory against the blocks of a call, registered buffers, and peers; and what a
submit costs.

    python benchmarks/growth.py [--seconds 0.3] [--rounds 5] [--json] [--save growth.json]
    python benchmarks/growth.py --part blocks --part submit
    python benchmarks/growth.py --render growth.json                 # only draws docs/growth.svg again

Blocks of 4 KiB, from one process to another. A block's time is measured beside the limit of the machine
(`process_vm_writev` on the same addresses, or one blocking stream), in turn, within one process. The exit
status is 1 unless, by medians,

- 10,000 blocks in one call take at most 1.1 times as long, over that limit, as 1,000 do;
- 100 blocks take at most 1.5 times the time for each block that 1,000 do with shm, and 1.8 times with tcp;
- submitting costs at most 30 microseconds, and 0.08 more for each block of 1,000 and of 10,000 (a mock that
  moves nothing: checks, merging, queues and the report).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, conclude
from footprint import footprint, peak_kib, reset_peak
from peerbench import SPAN, cma, tcp, tcp_target
from surroundings import draw, machine, peers_python

import tent_core as tent
import tent_mock
from tent_core.bench.measure import timed
from tent_core.plugins import Registry
from tent_core.testing.peers import Nursery, PeerProcess
from tent_core.types import Reach

HERE = Path(__file__).resolve().parent
BEFORE = f"import sys; sys.path.insert(0, {str(HERE)!r})"
PICTURE = HERE.parent / "docs" / "growth.svg"
BLOCK = 4096
BLOCKS = (1, 10, 100, 1_000, 10_000, 100_000)
BUFFERS = (1, 10, 100, 1_000, 10_000)
PEERS = (1, 10, 100, 500)
BATCH = 1_000
ENGINES = 100
"""In each process of peers."""

WAIT_S = 300.0
MOST_GROWTH, MOST_SMALL = 1.1, {"shm": 1.5, "tcp": 1.8}
MOST_SUBMIT_US, MOST_BLOCK_US = 30.0, 0.08

Call = Callable[[], object]
Row = dict[str, float]


def config(transport: str, **settings: Any) -> dict[str, Any]:
    """That transport alone."""
    return {
        "transports": {transport: {"enable": True, **settings}},
        "policy": [{"name": "only", "transports": [transport]}],
        "log": {"level": "error"},
    }


def medians(calls: dict[str, Call], seconds: float, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each call, one median for each round; they take turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(statistics.median(timed(call, seconds)) * 1e6)
    return found


def places(random: np.random.Generator, count: int, slots: int) -> np.ndarray[Any, Any]:
    """Byte offsets of so many blocks, at random among so many."""
    return random.permutation(slots)[:count].astype(np.uint64) * np.uint64(BLOCK)


# ------------------------------------------------------------------------- blocks of a call


@contextmanager
def pair(transport: str, blocks: int) -> Iterator[tuple[tent.Segment, tent.Buffer, PeerProcess]]:
    """An engine here and one in another process, each with a buffer `pool` of so many blocks."""
    size = blocks * BLOCK
    with PeerProcess(config(transport)) as owner, tent.Engine(config(transport)) as engine:
        owner.run("pool = engine.allocate(size, name='pool'); pool.array[:] = 1", size=size)
        local = engine.allocate(size)
        local.array[:] = 2
        yield engine.open_segment(owner.segment_name), local, owner


def blocks(transport: str, seconds: float, rounds: int) -> list[Row]:
    """Time and memory for a block, by the blocks of a call, beside the limit of this machine."""
    rows = []
    random = np.random.default_rng(7)
    with pair(transport, max(BLOCKS)) as (segment, local, owner), ExitStack() as stack:
        remote = segment.buffer("pool")
        limit = _cma(local, owner) if transport == "shm" else stack.enter_context(_stream())
        for count in BLOCKS:
            here, far = places(random, count, max(BLOCKS)), places(random, count, max(BLOCKS))
            calls = {"us": _write(segment, local, here, remote, far)}
            if transport == "shm" or count * BLOCK <= SPAN:
                calls["limit_us"] = limit(here, far)
            times = medians(calls, seconds, rounds)
            row = {"blocks": count, "us_per_block": statistics.median(times["us"]) / count}
            if "limit_us" in times:
                row["limit_us_per_block"] = statistics.median(times["limit_us"]) / count
                row["over_limit"] = statistics.median(
                    us / least for us, least in zip(times["us"], times["limit_us"], strict=True)
                )
            row["bytes_per_block"] = _peak(calls["us"]) / count
            rows.append(row)
    return rows


def _cma(local: tent.Buffer, owner: PeerProcess) -> Callable[[Any, Any], Call]:
    """`process_vm_writev` between the same memories."""
    mine, theirs = local.array.ctypes.data, owner.run("pool.array.ctypes.data")
    case = cma(owner.pid, theirs, mine)

    def limit(here: Any, far: Any) -> Call:
        places_ = (here + np.uint64(mine)).tolist(), (far + np.uint64(theirs)).tolist()
        return case("write", *places_, BLOCK)

    return limit


@contextmanager
def _stream() -> Iterator[Callable[[Any, Any], Call]]:
    """As many bytes over one blocking stream, in one piece."""
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    other = spawn.Process(target=tcp_target, args=(theirs,), daemon=True)
    other.start()
    case = tcp(ours.recv()[0], 0, 0)
    yield lambda here, far: case("write", here.tolist(), far.tolist(), BLOCK)
    other.kill()


def _write(
    segment: tent.Segment, local: Any, here: Any, remote: Any, far: Any, size: int = BLOCK
) -> Call:
    return lambda: segment.write_many(local, here, remote, far, size)


def _peak(call: Call) -> float:
    """Bytes by which resident memory is higher at some time of the call than before it."""
    before = footprint().resident_kib
    reset_peak()
    call()
    return max(0, peak_kib() - before) * 1024


# ------------------------------------------------------------------------- registered buffers

CARVE = """
def carve(engine, count, size):
    memory = np.ones(size, np.uint8)
    names = [f"b{i}" for i in range(count)]
    return engine.register_many(np.split(memory, count), names=names)
"""
REGISTER = """
import time
began = time.perf_counter()
there = carve(engine, count, size)
time.perf_counter() - began
"""
MORE = "engine.register(np.ones(4096, np.uint8)).unregister()"


def buffers(transport: str, seconds: float, rounds: int) -> list[Row]:
    """The same memory, registered as ever more buffers on both sides, and a pool beside them."""
    rows = []
    for count in BUFFERS:
        with PeerProcess(config(transport)) as owner, tent.Engine(config(transport)) as engine:
            rows.append(_with_buffers(owner, engine, count, seconds, rounds))
    return rows


def _with_buffers(
    owner: PeerProcess, engine: tent.Engine, count: int, seconds: float, rounds: int
) -> Row:
    size = max(BUFFERS) * BLOCK
    here: dict[str, Any] = {"np": np}
    exec(CARVE, here)
    owner.run(CARVE)
    owner.run("pool = engine.register(np.ones(size, np.uint8), name='pool')", size=size)
    pool = engine.register(np.ones(size, np.uint8))
    segment = engine.open_segment(owner.segment_name)
    segment.write(pool[:BLOCK], segment.buffer("pool")[:BLOCK])  # what the first use makes
    held, known = footprint(owner.pid).resident_kib, footprint().resident_kib
    took = owner.run(REGISTER, count=count, timeout=WAIT_S)
    began = time.perf_counter()
    segment.buffer(f"b{count - 1}", WAIT_S)
    theirs = {buffer.name: buffer for buffer in segment.buffers()}
    learned = time.perf_counter() - began
    owner_kib = footprint(owner.pid).resident_kib - held - size / 1024
    opener_kib = footprint().resident_kib - known
    mine = here["carve"](engine, count, size)
    random = np.random.default_rng(7)
    near, far = places(random, BATCH, size // BLOCK), places(random, BATCH, size // BLOCK)
    one = segment.prepare("write", mine[-1][:BLOCK], theirs[f"b{count - 1}"][:BLOCK])
    times = medians(
        {
            "one_us": one.run,
            "batch_us": _write(segment, pool, near, theirs["pool"], far),
            "spread_us": _spread(segment, mine, near, theirs, far, size // count),
            "register_another_us": lambda: owner.run(MORE),
        },
        seconds,
        rounds,
    )
    return {
        "buffers": count,
        **{name: statistics.median(found) for name, found in times.items()},
        "register_us_per_buffer": took * 1e6 / count,
        "learn_us_per_buffer": learned * 1e6 / count,
        "owner_bytes_per_buffer": owner_kib * 1024 / count,
        "opener_bytes_per_buffer": opener_kib * 1024 / count,
    }


def _spread(
    segment: tent.Segment,
    mine: list[tent.Buffer],
    near: Any,
    theirs: dict[str, tent.RemoteBuffer],
    far: Any,
    each: int,
) -> Call:
    """The blocks of a batch lie in as many buffers of `each` bytes as there are."""
    size = np.uint64(each)
    ours, local_index = np.unique(near // size, return_inverse=True)
    others, remote_index = np.unique(far // size, return_inverse=True)
    local = [mine[i] for i in ours]
    remote = [theirs[f"b{i}"] for i in others]
    near, far = near % size, far % size
    index = {"local_index": local_index, "remote_index": remote_index}
    return lambda: segment.write_many(local, near, remote, far, BLOCK, **index)


# ------------------------------------------------------------------------- peers


def peers(transport: str, seconds: float, rounds: int) -> list[Row]:
    """One engine that has ever more peers open, in processes of a hundred engines."""
    rows = []
    settings = config(transport)
    with ExitStack() as stack:
        nursery = stack.enter_context(Nursery())
        names: list[str] = []
        for _ in range(-(-max(PEERS) // ENGINES)):
            crowd = stack.enter_context(PeerProcess(settings, before=BEFORE, nursery=nursery))
            names += crowd.run(
                "from crowd import Crowd\ncrowd = Crowd(config, n)\ncrowd.offer()",
                config=settings,
                n=ENGINES,
                timeout=WAIT_S,
            )
            stack.callback(crowd.run, "crowd.close()", timeout=WAIT_S)
        engine = stack.enter_context(tent.Engine(settings))
        local = engine.allocate(BATCH * BLOCK)
        held, known = footprint().resident_kib, 0
        prepared: list[tent.Prepared] = []
        for count in PEERS:
            began = time.perf_counter()
            for name in names[known:count]:
                segment = engine.open_segment(name)
                prepared.append(
                    segment.prepare("write", local[:BLOCK], segment.buffer("pool")[:BLOCK])
                )
                prepared[-1].run()
            opened, fresh, known = time.perf_counter() - began, count - known, count
            times = medians(_turns(prepared), seconds, rounds)
            rows.append(
                {
                    "peers": count,
                    "same_us": statistics.median(times["same_us"]),
                    "turns_us": statistics.median(times["turns_us"]) / count,
                    "open_ms_per_peer": opened * 1e3 / fresh,
                    "bytes_per_peer": (footprint().resident_kib - held) * 1024 / count,
                    "threads": footprint().threads,
                }
            )
    return rows


def _turns(prepared: list[tent.Prepared]) -> dict[str, Call]:
    def turns() -> None:
        for each in prepared:
            each.run()

    return {"same_us": prepared[0].run, "turns_us": turns}


# ------------------------------------------------------------------------- submitting


def submit(seconds: float, rounds: int) -> list[Row]:
    """Microseconds of `submit` alone, by the blocks of the call; a mock that moves nothing."""
    registry = Registry.of(tent_mock.declare("mock", 1000, reach=Reach.NETWORK))
    settings = config("mock", move=False)
    random = np.random.default_rng(7)
    slots = 4 * max(BLOCKS)
    rows = []
    with (
        tent.Engine(settings, plugins=registry) as there,
        tent.Engine(settings, plugins=registry) as engine,
    ):
        there.allocate(slots * BLOCK, name="pool")
        local = engine.allocate(slots * BLOCK)
        segment = engine.open_segment(there.segment_name)
        remote = segment.buffer("pool")
        segment.submit("write", local, [0], remote, [0], BLOCK).wait(10)
        for count in BLOCKS:
            here, far = places(random, count, slots), places(random, count, slots)
            times = medians({"us": _submit(segment, local, here, remote, far)}, seconds, rounds)
            rows.append({"blocks": count, "us": statistics.median(times["us"])})
    return rows


def _submit(segment: tent.Segment, local: Any, here: Any, remote: Any, far: Any) -> Call:
    return lambda: segment.submit("write", local, here, remote, far, BLOCK)


# ------------------------------------------------------------------------- what is said of it


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every part that is asked for, by transport."""
    parts: dict[str, Callable[[str, float, int], list[Row]]] = {
        "blocks": blocks,
        "buffers": buffers,
        "peers": peers,
    }
    found: dict[str, Any] = {"machine": machine()}
    asked = args.part or [*parts, "submit"]
    for name, part in parts.items():
        if name in asked:
            found[name] = {}
            for transport in args.transport or ("shm", "tcp"):
                print(f"{name}, {transport}", file=sys.stderr)
                found[name][transport] = fresh(part, transport, args.seconds, args.rounds)
    if "submit" in asked:
        print("submit", file=sys.stderr)
        found["submit"] = {"mock": fresh(submit, args.seconds, args.rounds)}
    return found


def fresh(part: Callable[..., list[Row]], *arguments: Any) -> list[Row]:
    """What a part finds in a process of its own, whose memory no other part has used."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(part, *arguments).result()


def judge(found: dict[str, Any]) -> list[Figure]:
    """What was found, beside its bounds."""
    figures = []
    for transport, rows in found.get("blocks", {}).items():
        by = {row["blocks"]: row for row in rows}
        if "over_limit" in by[1_000]:
            # Faster than the limit counts as at the limit: it is none for what runs on two cores.
            growth = by[10_000]["over_limit"] / max(1.0, by[1_000]["over_limit"])
            figures.append(
                Figure(f"{transport}: over the limit, 10,000 blocks to 1,000", growth, MOST_GROWTH)
            )
        small = by[100]["us_per_block"] / by[1_000]["us_per_block"]
        figures.append(
            Figure(f"{transport}: a block of 100 to one of 1,000", small, MOST_SMALL[transport])
        )
    if "submit" in found:
        us = {row["blocks"]: row["us"] for row in found["submit"]["mock"]}
        figures.append(Figure("submit of one block", us[1], MOST_SUBMIT_US, "us"))
        figures += [
            Figure(f"submit, a block of {n:,}", (us[n] - us[1]) / n, MOST_BLOCK_US, "us")
            for n in (1_000, 10_000)
        ]
    return figures


def show(found: dict[str, Any]) -> None:
    """A table for each part and transport."""
    for part, tables in found.items():
        if part in ("machine", "figures"):
            continue
        for transport, rows in tables.items():
            print(f"\n{part}, {transport}")
            print("".join(f"{name:>25}" for name in rows[0]))
            for row in rows:
                cells = (f"{row[name]:,.4g}" if name in row else "" for name in rows[0])
                print("".join(f"{cell:>25}" for cell in cells))
    print()


def main() -> int:
    """Measure, print, save and draw as asked; the exit status is 1 if a figure is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several: dict[str, Any] = {"action": "append"}
    parts = ("blocks", "buffers", "peers", "submit")
    parser.add_argument("--part", **several, choices=parts, help="default: all")
    parser.add_argument("--transport", **several, choices=["shm", "tcp"], help="default: both")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each number (0.3)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--save", metavar="PATH", help="keep the result there")
    parser.add_argument("--render", metavar="PATH", help="measure nothing: show and draw that one")
    parser.add_argument("--draw", action="store_true", help=f"write {PICTURE.name}")
    parser.add_argument("--peers-python", metavar="PATH", help="a Python that has matplotlib")
    args = parser.parse_args()
    found = json.loads(Path(args.render).read_text()) if args.render else measure(args)
    figures = judge(found)
    found["figures"] = [figure.as_json() for figure in figures]
    if args.save:
        Path(args.save).write_text(json.dumps(found, indent=1) + "\n")
    if args.json:
        print(json.dumps(found))
    else:
        show(found)
        print(*figures, sep="\n")
    if args.draw or args.render:
        draw("growth", found, PICTURE, peers_python(args.peers_python))
    return conclude(figures)


if __name__ == "__main__":
    raise SystemExit(main())
