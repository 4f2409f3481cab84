#!/usr/bin/env python3
"""Puts TENT beside what a user would pick instead, and beside this machine's limits, in one run.

Each round runs every contender once, in a fresh process: `peerbench.py` with the peers' Python, `tent
bench` with this one. Times drift from run to run, so only medians over the rounds of one run are compared.
A peer whose processes come in a fast and a slow kind is shown as two, and TENT is held against the fast
kind. With --busy everything is measured again beside a thread that computes. The exit status is 1 if TENT
could not be measured, or is below a floor or beyond a limit of `floors.py`.

    python benchmarks/compare.py                                     # all cases, 7 rounds: about 25 minutes
    python benchmarks/compare.py --case 4096x1000 --op write
    python benchmarks/compare.py --busy all --seconds 0.3 --save speed.json --draw  # docs/speed.md, .svg
    python benchmarks/compare.py --render speed.json --draw                         # again, from the result

The peers get an environment of their own, made on first use beside this file; --peers-python names another.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import floors
import page
import tables
from figures import Figure, conclude
from figures import of_json as of_document
from results import IDLE, STATES, Case, Result, Run, of_json
from surroundings import draw, machine, peers_python

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
MEMORY = {"shm": ("registered", "allocated")}
"""Of whose memory a transport is measured, where it makes a difference; else it is allocated."""
PEERS = ("mooncake", "nixl", "nixl-prepped", "nixl-tcp", "memmove", "cma", "tcp")


@dataclass(frozen=True)
class Contender:
    """Something that is measured: what it is called, and the command that measures it once."""

    label: str
    command: tuple[str, ...]

    @property
    def is_tent(self) -> bool:
        """Whether it is TENT."""
        return self.label.startswith("tent ")


def contenders(args: argparse.Namespace, python: str) -> list[Contender]:
    """Everything that is to be measured."""
    work = [f"--seconds={args.seconds}"]
    work += [f"--case={case}" for case in args.case or ()] + [f"--op={op}" for op in args.op or ()]
    bench = (sys.executable, "-m", "tent_core.cli", "bench", "--json")
    found = []
    for transport in args.transport or ("shm", "tcp"):
        for memory in args.memory or MEMORY.get(transport, ("allocated",)):
            command = (*bench, f"--transport={transport}", f"--memory={memory}", *work)
            found.append(Contender(f"tent {transport} {memory}", command))
    script = str(HERE / "peerbench.py")
    for peer in args.peer or PEERS:
        found.append(Contender(peer, (python, script, f"--peer={peer}", *work)))
    return found


def measure(everybody: list[Contender], states: list[str], result: Result, timeout: float) -> None:
    """Run every contender in every round and state, and add what it measured, or why it did not."""
    for number in range(result.rounds):
        # Every round begins with another contender, so that none always runs after the same one.
        start = number % len(everybody)
        for contender in everybody[start:] + everybody[:start]:
            for state in states:
                where = f"{contender.label}, {state}"
                print(f"round {number + 1} of {result.rounds}: {where}", file=sys.stderr)
                busy = () if state == IDLE else (f"--busy={state}",)
                lines, reason = run((*contender.command, *busy), timeout)
                if reason:
                    result.failed[where] = reason
                us = {_key(line): line["p50_us"] for line in lines}
                result.runs.append(Run(contender.label, state, number, us))


def _key(line: dict[str, Any]) -> str:
    return Case(line["op"], line["block"], line["batch"]).key


def run(command: tuple[str, ...], timeout: float) -> tuple[list[dict[str, Any]], str]:
    """What one process printed, and why it failed or the empty string."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
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


def saved(path: str) -> tuple[str, Any]:
    """The name of a saved result and its document: read before anything is measured."""
    try:
        return Path(path).stem, json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path} is no result that was saved: {error}") from None


def measured(args: argparse.Namespace) -> Result:
    """A result, from what was saved or from measuring now."""
    if args.render:
        return of_json(args.render[1])
    python = peers_python(args.peers_python)
    result = Result(machine(python), args.seconds, args.rounds)
    busy = STATES[1:] if "all" in (args.busy or ()) else args.busy or ()
    measure(contenders(args, python), [IDLE, *busy], result, 60 + 16 * (args.seconds + 10))
    return result


def publish(result: Result, figures: list[Figure], args: argparse.Namespace) -> None:
    """Write the page and the picture."""
    others = {name: of_document(document) for name, document in args.others or ()}
    (DOCS / "speed.md").write_text(page.speed(result, figures, others))
    rows = page.picture(result)
    draw("speed", rows, DOCS / "speed.svg", peers_python(args.peers_python))


def main() -> int:
    """Measure or read, and print, save and draw as asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several: dict[str, Any] = {"action": "append"}
    parser.add_argument("--rounds", type=int, default=7, help="how often each contender runs (7)")
    parser.add_argument("--transport", **several, help="of TENT; default: shm and tcp")
    memories = ["allocated", "registered"]
    parser.add_argument("--memory", **several, choices=memories, help="default: both with shm")
    parser.add_argument("--peer", **several, choices=PEERS, help="default: all")
    parser.add_argument(
        "--case", **several, metavar="BLOCKxBATCH", help="such as 4096x1000; default: all"
    )
    parser.add_argument("--op", **several, choices=["write", "read"], help="default: both")
    parser.add_argument("--seconds", type=float, default=1.0, help="per case (1)")
    parser.add_argument(
        "--busy", **several, choices=[*STATES[1:], "all"], help="measure that as well; repeatable"
    )
    parser.add_argument(
        "--peers-python", metavar="PATH", help="a Python in which the peers are installed"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--save", metavar="PATH", help="keep the result there")
    parser.add_argument(
        "--render", type=saved, metavar="PATH", help="measure nothing: read what was saved"
    )
    parser.add_argument(
        "--draw", action="store_true", help="write docs/speed.md and docs/speed.svg"
    )
    parser.add_argument(
        "--others",
        nargs="+",
        type=saved,
        metavar="NAME.json",
        help="with --draw: what other benchmarks printed with --json, for the page",
    )
    args = parser.parse_args()
    result = measured(args)
    figures = floors.judge(result)
    if args.save:
        Path(args.save).write_text(json.dumps(result.as_json(), indent=1) + "\n")
    if args.json:
        found = {**result.as_json(), "figures": [figure.as_json() for figure in figures]}
        print(json.dumps(found))
    else:
        print("\n\n".join(tables.document(result, figures)))
    if args.draw:
        publish(result, figures, args)
    broken = any(where.startswith("tent ") for where in result.failed)
    return max(conclude(figures), int(broken))


if __name__ == "__main__":
    raise SystemExit(main())
