#!/usr/bin/env python3
"""Puts TENT beside what a user would pick instead, and beside this machine's limits, in one run.

Each round runs every contender once, in a fresh process: `peerbench.py` with the peers' Python, `tent
bench` with this one. Times drift from run to run, so only medians over the rounds of one run are compared. A
peer whose processes come in a fast and a slow kind is shown as two.

    python benchmarks/compare.py                                     # all cases, 5 rounds: about 40 minutes
    python benchmarks/compare.py --case 4096x1000 --op write
    python benchmarks/compare.py --case 4096x1000 --busy target --rounds 7 --json

The peers get an environment of their own, made on first use beside this file; --peers-python names another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE / ".venv-peers"
PEERS = ("mooncake", "nixl", "nixl-tcp", "cma", "tcp")
LIMITS = {"cma": "limit: process_vm_*", "tcp": "limit: tcp stream", "memmove": "limit: memcpy"}
TWO_KINDS = 1.6
"""A gap this large between neighbouring processes' times makes two kinds of them."""


class Case(NamedTuple):
    """One thing that every contender does."""

    op: str
    block: int
    batch: int

    def __str__(self) -> str:
        return f"{self.op} {self.batch} x {self.block:,} B"


@dataclass(frozen=True)
class Contender:
    """Something that is measured: what it is called, and the command that measures it once."""

    label: str
    command: tuple[str, ...]

    @property
    def is_tent(self) -> bool:
        """Whether it is TENT."""
        return self.label.startswith("tent ")


Times = dict[Case, dict[str, list[float]]]
"""Median microseconds of a call, by case and contender, one for each round."""


def peers_python(given: str | None) -> str:
    """The Python that has the peers; makes an environment for them if none is given."""
    python = ENVIRONMENT / "bin" / "python"
    if given is not None or python.exists():
        return given or str(python)
    print(f"making {ENVIRONMENT} for the peers", file=sys.stderr)
    venv.create(ENVIRONMENT, with_pip=True)
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run((*pip, "numpy", "mooncake-transfer-engine-non-cuda"), check=True, timeout=600)
    subprocess.run((*pip, "--no-deps", "nixl-cu12"), check=True, timeout=600)
    return str(python)


def contenders(args: argparse.Namespace, python: str) -> list[Contender]:
    """Everything that is to be measured."""
    work = [f"--seconds={args.seconds}"]
    work += [f"--case={case}" for case in args.case or ()] + [f"--op={op}" for op in args.op or ()]
    work += [f"--busy={args.busy}"] if args.busy else []
    bench = (sys.executable, "-m", "tent_core.cli", "bench", "--json")
    tent = [
        Contender(
            f"tent {transport} {memory}",
            (*bench, f"--transport={transport}", f"--memory={memory}", *work),
        )
        for transport in args.transport or ("shm", "tcp")
        for memory in args.memory or ("allocated",)
    ]
    script = str(HERE / "peerbench.py")
    peers = [
        Contender(peer, (python, script, f"--peer={peer}", *work)) for peer in args.peer or PEERS
    ]
    return tent + peers


def measure(
    everybody: list[Contender], rounds: int, timeout: float
) -> tuple[Times, dict[str, str]]:
    """Times of every contender in every round, and why one could not be measured."""
    times: Times = {}
    failed: dict[str, str] = {}
    for number in range(rounds):
        # Every round begins with another contender, so that none always runs after the same one.
        start = number % len(everybody)
        for contender in everybody[start:] + everybody[:start]:
            print(f"round {number + 1} of {rounds}: {contender.label}", file=sys.stderr)
            lines, reason = run(contender, timeout)
            if reason:
                failed[contender.label] = reason
            for line in lines:
                case = Case(line["op"], line["block"], line["batch"])
                times.setdefault(case, {}).setdefault(contender.label, []).append(line["p50_us"])
    return times, failed


def run(contender: Contender, timeout: float) -> tuple[list[dict[str, Any]], str]:
    """What one process printed, and why it failed or the empty string."""
    process = subprocess.Popen(
        contender.command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its targets as well
        process.communicate()
        return [], f"it took more than {timeout:.0f} s"
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    last = (errors.strip().splitlines() or ["it said nothing"])[-1]
    return lines, last if process.returncode else ""


def kinds(label: str, times: list[float]) -> Iterator[tuple[str, list[float]]]:
    """The times of one contender, as those of a fast and a slow kind of process if there are two."""
    ordered = sorted(times)
    gaps = [high / low for low, high in itertools.pairwise(ordered)]
    if not label.startswith("nixl") or not gaps or max(gaps) < TWO_KINDS:
        yield label, ordered
        return
    cut = gaps.index(max(gaps)) + 1
    yield f"{label}, fast kind", ordered[:cut]
    yield f"{label}, slow kind", ordered[cut:]


def show(times: Times, failed: dict[str, str]) -> None:
    """Print a table for each case: medians, and how many times longer each contender takes than TENT."""
    for case, found in times.items():
        tent = {
            label: statistics.median(own)
            for label, own in found.items()
            if label.startswith("tent ")
        }
        head = "".join(f"{f'x {label}':>22}" for label in tent)
        print(f"\n{case}\n{'':24}{'median us':>12}{'lowest':>12}{'highest':>12}{'runs':>6}{head}")
        for label, own in found.items():
            for kind, ordered in kinds(label, own):
                median = statistics.median(ordered)
                ratios = "".join(f"{median / base:>22.2f}" for base in tent.values())
                print(
                    f"{LIMITS.get(kind, kind):24}{median:>12.1f}{ordered[0]:>12.1f}{ordered[-1]:>12.1f}"
                    f"{len(ordered):>6}{ratios}"
                )
    for label, reason in failed.items():
        print(f"\n{label} could not be measured: {reason}")


def document(times: Times, failed: dict[str, str], args: argparse.Namespace) -> dict[str, object]:
    """The same for machines."""
    return {
        "rounds": args.rounds,
        "busy": args.busy,
        "seconds": args.seconds,
        "results": [
            {
                **case._asdict(),
                "contender": kind,
                "median_us": statistics.median(ordered),
                "p50_us": ordered,
            }
            for case, found in times.items()
            for label, own in found.items()
            for kind, ordered in kinds(label, own)
        ],
        "failed": failed,
    }


def main() -> int:
    """Measure, and print; the exit status is 1 if TENT could not be measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several: dict[str, Any] = {"action": "append"}
    parser.add_argument("--rounds", type=int, default=5, help="how often each contender runs (5)")
    parser.add_argument("--transport", **several, help="of TENT; default: shm and tcp")
    parser.add_argument(
        "--memory",
        **several,
        choices=["allocated", "registered"],
        help="of TENT; default: allocated",
    )
    parser.add_argument("--peer", **several, help=f"default: {', '.join(PEERS)}")
    parser.add_argument(
        "--case", **several, metavar="BLOCKxBATCH", help="such as 4096x1000; default: all"
    )
    parser.add_argument("--op", **several, choices=["write", "read"], help="default: both")
    parser.add_argument("--seconds", type=float, default=1.0, help="per case (1)")
    parser.add_argument("--busy", choices=["target", "initiator", "both"])
    parser.add_argument(
        "--peers-python", metavar="PATH", help="a Python in which the peers are installed"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    timeout = 60 + 16 * (args.seconds + 10)
    everybody = contenders(args, peers_python(args.peers_python))
    times, failed = measure(everybody, args.rounds, timeout)
    if args.json:
        print(json.dumps(document(times, failed, args)))
    else:
        show(times, failed)
    return (
        1 if any(contender.label in failed for contender in everybody if contender.is_tent) else 0
    )


if __name__ == "__main__":
    raise SystemExit(main())
