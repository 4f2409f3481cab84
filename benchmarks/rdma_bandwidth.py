#!/usr/bin/env python3
"""Bandwidth of RDMA writes: this transport beside ib_write_bw, on the same device at the same depth.

Both go from one process of this machine to another over one device, in turn, with as many work requests
outstanding; the medians of the alternations are compared. The bytes of the transport's last round are
verified. The exit status is 1 if a median is below the floor.

    python benchmarks/rdma_bandwidth.py --device mlx5_0 --gid-index 3
    python benchmarks/rdma_bandwidth.py --mooncake /path/to/python-with-its-wheel
    scripts/rdma-lab -- python benchmarks/rdma_bandwidth.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np

import tent_core as tent
from tent_core.testing.peers import PeerProcess

MIB = 1 << 20
PATIENCE_S = 120.0
SPAN = 64 * MIB


@dataclass
class Row:
    """One size: bandwidths in MiB/s, one of each kind per alternation."""

    size: int
    count: int
    perftest: list[float]
    mooncake: list[float]
    tent: list[float]

    @property
    def ratio(self) -> float:
        """Median over median; above 1 this transport is faster."""
        return statistics.median(self.tent) / statistics.median(self.perftest)

    @property
    def beside_mooncake(self) -> float | None:
        """The same beside the reference engine, if it took part."""
        if not self.mooncake:
            return None
        return statistics.median(self.tent) / statistics.median(self.mooncake)


def main() -> int:
    """Measure, print, and say whether the floor was reached."""
    options = _options()
    if shutil.which("ib_write_bw") is None:
        sys.exit("ib_write_bw is missing: it is in the package perftest")
    rows = measure(options)
    if options.json:
        found = [
            {**asdict(r), "ratio": r.ratio, "beside_mooncake": r.beside_mooncake} for r in rows
        ]
        print(json.dumps({"rows": found}))
    else:
        show(rows)
    return int(any(row.ratio < options.floor or (row.beside_mooncake or 1) < 1 for row in rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="rxe0")
    parser.add_argument("--gid-index", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64 << 10, 1 << 20])
    parser.add_argument("--total", type=int, default=32, help="MiB in each measurement (32)")
    parser.add_argument("--depth", type=int, default=128, help="work requests outstanding (128)")
    parser.add_argument(
        "--queue-pairs", type=int, default=2, help="that share the depth, for this transport (2)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="alternations (7)")
    parser.add_argument("--floor", type=float, default=0.9, help="lowest ratio of medians (0.9)")
    parser.add_argument(
        "--mooncake", metavar="PYTHON", help="an interpreter that has the reference engine's wheel"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> list[Row]:
    """All sizes, alternating."""
    rdma = {
        "enable": True,
        "devices": [options.device],
        "device": {options.device: {"gid_index": options.gid_index}},
        "send_depth": options.depth // options.queue_pairs,
        "group": min(64, options.depth // options.queue_pairs),
        "pools": {"default": {"queue_pairs": options.queue_pairs}},
    }
    config = {
        "transports": {"rdma": rdma},
        "policy": [{"name": "all", "transports": ["rdma"]}],
        "log": {"level": "warning"},
    }
    rows = []
    with (
        _mooncake(options) as mooncake,
        PeerProcess(config, start_timeout=PATIENCE_S) as peer,
        tent.Engine(config) as engine,
        engine.open_segment(peer.segment_name) as segment,
    ):
        peer.run(f"span = engine.allocate({SPAN}, name='span')", timeout=PATIENCE_S)
        source = engine.allocate(SPAN)
        source.array[:] = np.random.default_rng(1).integers(0, 256, SPAN, np.uint8)
        target = segment.buffer("span")
        for size in options.sizes:
            row = Row(size, max(options.total * MIB // size, 1), [], [], [])
            if mooncake is not None:
                mooncake(row)
            _write(segment, source, target, row)  # connects, and touches every page
            for number in range(options.rounds):
                _progress(f"{size} bytes: {number + 1} of {options.rounds}", options.json)
                row.perftest.append(_perftest(options, row))
                if mooncake is not None:
                    row.mooncake.append(mooncake(row))
                row.tent.append(_write(segment, source, target, row))
            _verify(peer, source, row)
            rows.append(row)
    _progress("", options.json)
    return rows


def _write(
    segment: tent.Segment, source: tent.Buffer, target: tent.RemoteBuffer, row: Row
) -> float:
    offsets = np.arange(row.count, dtype=np.int64) * row.size % SPAN
    began = time.perf_counter()
    segment.write_many(source, offsets, target, offsets, row.size, timeout=PATIENCE_S)
    return row.count * row.size / MIB / (time.perf_counter() - began)


def _verify(peer: PeerProcess, source: tent.Buffer, row: Row) -> None:
    span = min(row.count * row.size, SPAN)
    there = peer.run(f"span.array[:{span}].tobytes()", timeout=PATIENCE_S)
    if there != source.array[:span].tobytes():
        sys.exit(f"the bytes written in pieces of {row.size} are not those that were sent")


@contextlib.contextmanager
def _mooncake(options: argparse.Namespace) -> Iterator[Callable[[Row], float] | None]:
    """Measures the reference engine, in processes of its own, if it is there."""
    if options.mooncake is None:
        yield None
        return
    command = [options.mooncake, str(Path(__file__).with_name("rdma_mooncake.py")), options.device]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines = process.stdout

        def measure(row: Row) -> float:
            print(row.size, row.count, file=process.stdin, flush=True)
            return float(_answer(lines))

        try:
            while _answer(lines) != "ready":
                pass
            yield measure
        finally:
            process.kill()


def _answer(lines: IO[str]) -> str:
    """The next line that is an answer: the library logs to the same place."""
    for line in lines:
        word = line.strip()
        if word == "ready" or word.replace(".", "", 1).isdecimal() or word == "nan":
            return word
    sys.exit("the reference engine ended: does it run on this device by itself?")


def _perftest(options: argparse.Namespace, row: Row) -> float:
    """The average column of one run of ib_write_bw, server and client here."""
    command = ["ib_write_bw", "-d", options.device, "-x", str(options.gid_index), "-F"]
    command += ["-s", str(row.size), "-n", str(max(row.count, 5)), "-t", str(options.depth)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(100):
                client = subprocess.run(
                    [*command, "127.0.0.1"], capture_output=True, text=True, timeout=PATIENCE_S
                )
                if "Couldn't connect" not in client.stdout + client.stderr:
                    break
                time.sleep(0.1)  # it does not listen yet
        finally:
            server.kill()
    for line in client.stdout.splitlines():
        fields = line.split()
        if fields and fields[0] == str(row.size):
            return float(fields[3])
    sys.exit(f"ib_write_bw printed no result:\n{client.stdout}{client.stderr}")


def show(rows: list[Row]) -> None:
    """A table for people."""
    heads = ("ib_write_bw MiB/s", "mooncake MiB/s", "tent MiB/s")
    print(f"{'bytes':>9} " + " ".join(f"{head:>26}" for head in heads) + "  tent / each")
    for row in rows:
        cells = [_spread(v) if v else "-" for v in (row.perftest, row.mooncake, row.tent)]
        beside = f" {row.beside_mooncake:.2f}" if row.beside_mooncake is not None else ""
        print(
            f"{row.size:>9} "
            + " ".join(f"{cell:>26}" for cell in cells)
            + f"  {row.ratio:.2f}{beside}"
        )


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _progress(text: str, quiet: bool) -> None:
    if not quiet and sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
