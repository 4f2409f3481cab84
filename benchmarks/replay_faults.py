#!/usr/bin/env python3
"""`tent replay` while its transports are broken from outside: no request fails, every byte is right.

    python benchmarks/replay_faults.py [TRACE] [--requests 100] [--order shm,tcp] [--json]

The command itself is run, prefill and decode each as a process, over [shm, tcp] and then over [tcp, shm], and
nothing in those processes knows of what befalls them:

- every second each connection of the receiver of tcp is broken (`pidfd_getfd(2)` gives a descriptor of the
  same socket, and `connect(2)` to AF_UNSPEC resets it);
- from a fifth of the requests to four fifths, or for the last third of them, the first transport of the
  policy is refused what it lives by: strace(1) makes `process_vm_writev(2)` fail with EPERM for shm, and
  `connect(2)` with ECONNREFUSED for tcp, whose streams break beside;
- over [tcp, shm] the process that receives for tcp is stopped for two seconds after a third of the requests.

Checked: both processes end with status 0; every request was replayed, every byte compared at the receiver;
both transports carried some; failovers are counted; each fault has really been made. Exits with status 1 if
not. Needs strace, and to be allowed to trace processes of one's own. Without TRACE the requests are made up:
1 to 4 blocks of which some begin as the one before.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pty
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TENT = (sys.executable, "-m", "tent_core.cli")
CUT_EVERY_S, PAUSED_S = 1.0, 2.0
STALL_S = 0.5
BOUND_S = 900.0
STRACE_S = 10.0
SYSCALLS = {"shm": ("process_vm_writev", "EPERM"), "tcp": ("connect", "ECONNREFUSED")}
ORDERS = (("shm", "tcp"), ("tcp", "shm"))

_PIDFD_GETFD = 438  # of every architecture: asm-generic/unistd.h
_libc = ctypes.CDLL(None, use_errno=True)


# ---------------------------------------------------------------- faults


@contextmanager
def _descriptor_of(pid: int, number: int) -> Iterator[int]:
    """A descriptor of our own of what `number` is in another process. Raises OSError."""
    process = os.pidfd_open(pid)
    try:
        mine = _libc.syscall(_PIDFD_GETFD, process, number, 0)
        if mine < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        try:
            yield mine
        finally:
            os.close(mine)
    finally:
        os.close(process)


def reset_connections(pid: int) -> int:
    """Reset every TCP connection that a process holds; how many there were."""
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it may be closed by now
            if not os.readlink(link).startswith("socket:"):
                continue
            with (
                _descriptor_of(pid, int(link.name)) as mine,
                socket.socket(fileno=os.dup(mine)) as stream,
            ):
                if stream.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                stream.getpeername()  # raises for one that only listens
                unspecified = ctypes.create_string_buffer(16)  # AF_UNSPEC is 0
                if _libc.connect(stream.fileno(), unspecified, 16) == 0:
                    count += 1
    return count


class Refusal:
    """Makes a system call fail in a process from now on, until `end`."""

    def __init__(self, pid: int, call: str, error: str) -> None:
        """Raises RuntimeError if the process cannot be traced."""
        self._log = Path(tempfile.mkstemp(prefix="tent-refusal-")[1])
        command = [
            *("strace", "-f", "-qq", "-o", str(self._log), "-p", str(pid)),
            *("-e", f"trace={call}", "-e", "signal=none", "-e", f"inject={call}:error={error}"),
        ]
        self._strace = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        traced = f"TracerPid:\t{self._strace.pid}\n"
        until = time.monotonic() + STRACE_S
        while traced not in Path(f"/proc/{pid}/status").read_text():
            if self._strace.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"strace could not attach to process {pid}")
            time.sleep(0.01)

    def end(self) -> int:
        """Let the process be; how many calls have failed."""
        self._strace.send_signal(signal.SIGINT)  # it detaches
        self._strace.wait(STRACE_S)
        count = self._log.read_text().count("(INJECTED)")
        self._log.unlink()
        return count


def receiver_of(pid: int) -> int:
    """The process that receives over tcp for the engine of process `pid`."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"tent_tcp.receiver" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise RuntimeError(f"process {pid} has no receiver of tcp")


# ---------------------------------------------------------------- the run


@dataclass
class Outcome:
    """What one replay said and went through."""

    order: tuple[str, ...]
    sent: dict[str, Any] = field(default_factory=dict)
    received: dict[str, Any] = field(default_factory=dict)
    cuts: int = 0
    refusals: int = 0
    paused_s: float = 0.0
    wall_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def judge(self, requests: int) -> None:
        """Say what is not as it has to be."""
        sent, received, wrong = self.sent, self.received, self.wrong
        if not sent or not received:
            return  # said already
        if sent["requests"] != requests:
            wrong.append(f"{sent['requests']} of {requests} requests were replayed")
        if not (sent["verified"] and received["verified"]):
            wrong.append(f"{sent['mismatches']} pieces do not hold what was sent")
        if sent["pieces"] != received["pieces"]:
            wrong.append("the two sides do not agree on what was sent")
        if set(sent["transports"]) != set(self.order):
            wrong.append(f"only {', '.join(sent['transports'])} carried anything")
        for what, count in (
            ("failover was counted", sent["failovers"]),
            ("connection was cut", self.cuts),
            ("call was refused", self.refusals),
        ):
            if not count:
                wrong.append(f"no {what}")
        if self.order[0] == "tcp" and not self.paused_s:
            wrong.append("the receiver was not paused")


class Progress:
    """Reads how many requests are done from the bar that `tent replay` shows on a terminal."""

    def __init__(self, terminal: int, total: int) -> None:
        self._terminal = terminal
        self._pattern = re.compile(rb"(\d+)/%d\b" % total)
        self.done = 0
        self.text = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with suppress(OSError):  # EIO when the other end is closed
            while chunk := os.read(self._terminal, 4096):
                self.text = (self.text + chunk)[-8192:]
                if found := self._pattern.findall(self.text):
                    self.done = int(found[-1])


class Saboteur:
    """Breaks what it is to break, as the requests go by, until it is told to end."""

    def __init__(self, outcome: Outcome, prefill: int, decode: int, requests: int) -> None:
        self._outcome, self._prefill = outcome, prefill
        self._receiver = receiver_of(decode)
        self._requests = requests
        self._over = threading.Event()
        self._cutter = threading.Thread(target=self._cut)
        self._refusal: Refusal | None = None

    def __enter__(self) -> Saboteur:
        self._cutter.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._cutter.join()
        self._refuse(False)

    def look(self, done: int) -> None:
        """So many requests are done."""
        first, n = self._outcome.order[0], self._requests
        if first == "shm":
            self._refuse(n // 5 <= done < 4 * n // 5)
            return
        if done >= n // 3 and not self._outcome.paused_s:
            self._pause()
        self._refuse(done >= 2 * n // 3)

    def _refuse(self, wanted: bool) -> None:
        if wanted and self._refusal is None:
            self._refusal = Refusal(self._prefill, *SYSCALLS[self._outcome.order[0]])
        elif not wanted and self._refusal is not None:
            self._outcome.refusals += self._refusal.end()
            self._refusal = None

    def _pause(self) -> None:
        began = time.monotonic()
        os.kill(self._receiver, signal.SIGSTOP)
        time.sleep(PAUSED_S)
        os.kill(self._receiver, signal.SIGCONT)
        self._outcome.paused_s = time.monotonic() - began

    def _cut(self) -> None:
        while not self._over.wait(CUT_EVERY_S):
            with suppress(OSError):
                self._outcome.cuts += reset_connections(self._receiver)


def configuration(order: tuple[str, ...]) -> str:
    """YAML: these transports in this order; what stalls for half a second moves on."""
    return json.dumps(
        {
            "transports": {name: {"enable": True} for name in order},
            "policy": [{"name": "-".join(order), "transports": list(order), "stall_s": STALL_S}],
            "log": {"level": "error"},
        }
    )


def made_up(requests: int, seed: int) -> str:
    """A trace: prompts of 1 to 4 blocks, of which some begin as the one before."""
    draw, lines = random.Random(seed), []
    before: list[int] = []
    for i in range(requests):
        own = [1000 * i + 1 + n for n in range(draw.randint(1, 4))]
        hashes = [*(before[:1] if before and draw.random() < 0.3 else []), *own]
        before = hashes
        lines.append(
            {
                "timestamp": 0,
                "input_length": 512 * len(hashes),
                "output_length": 1,
                "hash_ids": hashes,
            }
        )
    return "\n".join(map(json.dumps, lines))


def replay(
    trace: Path, requests: int, model: str, pool: str, order: tuple[str, ...], folder: Path
) -> Outcome:
    """Run the command over `order` and break its transports; what came of it."""
    config = folder / f"{'-'.join(order)}.yaml"
    config.write_text(configuration(order))
    common = ("--config", str(config), "--pool-size", pool, "--memory", "registered", "--json")
    outcome = Outcome(order)
    began = time.monotonic()
    with ExitStack() as stack:

        def start(*words: str, errors: Any) -> subprocess.Popen[str]:
            command = [*TENT, "replay", *words, *common]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            stack.callback(_end, process)
            return process

        complaints = stack.enter_context((folder / "decode.log").open("w+"))
        decode = start("--role", "decode", errors=complaints)
        assert decode.stdout is not None
        first = decode.stdout.readline()
        if not first:
            raise RuntimeError("decode did not start: " + (folder / "decode.log").read_text())
        terminal, theirs = pty.openpty()
        stack.callback(os.close, terminal)
        words = ("--role", "prefill", "--peer", json.loads(first)["segment"], "--model", model)
        prefill = start(str(trace), "--requests", str(requests), *words, errors=theirs)
        os.close(theirs)
        progress = Progress(terminal, requests)
        with Saboteur(outcome, prefill.pid, decode.pid, requests) as saboteur:
            until = time.monotonic() + BOUND_S
            while prefill.poll() is None and time.monotonic() < until:
                saboteur.look(progress.done)
                time.sleep(0.01)
        outcome.sent = _document("prefill", prefill, outcome)
        outcome.received = _document("decode", decode, outcome)
        if not outcome.sent:
            outcome.wrong.append(progress.text.decode(errors="replace").strip()[-400:])
        if not outcome.received:
            outcome.wrong.append((folder / "decode.log").read_text().strip()[-400:])
    outcome.wall_s = time.monotonic() - began
    outcome.judge(requests)
    return outcome


def _document(name: str, process: subprocess.Popen[str], outcome: Outcome) -> dict[str, Any]:
    """What a process of `tent replay` printed, if it has ended as it should."""
    try:
        text, _ = process.communicate(timeout=60.0)
    except subprocess.TimeoutExpired:
        outcome.wrong.append(f"{name} did not end")
        return {}
    if process.returncode:
        outcome.wrong.append(f"{name} ended with status {process.returncode}")
        return {}
    document: dict[str, Any] = json.loads(text)
    return document


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ---------------------------------------------------------------- what people see


def show(outcomes: list[Outcome]) -> None:
    """A table, a line for each run, and what is wrong."""
    head = ("order", "requests", "MB", "by shm", "by tcp", "failovers", "cuts", "refused calls")
    head = (*head, "paused s", "p99 ms", "wall s", "verdict")
    rows = [head]
    for one in outcomes:
        sent = one.sent or {"requests": 0, "bytes": 0, "transports": {}, "failovers": 0}
        by = [f"{sent['transports'].get(name, 0) / 1e6:.0f}" for name in ("shm", "tcp")]
        numbers = (sent["requests"], f"{sent['bytes'] / 1e6:.0f}", *by, sent["failovers"])
        faults = (one.cuts, one.refusals, f"{one.paused_s:.1f}")
        p99 = sent.get("latency_ms", {}).get("p99", 0.0)
        end = (f"{p99:.0f}", f"{one.wall_s:.0f}", "wrong" if one.wrong else "well")
        rows.append(tuple(map(str, (",".join(one.order), *numbers, *faults, *end))))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    for one in outcomes:
        for text in one.wrong:
            print(f"{','.join(one.order)}: {text}")


def main() -> None:
    """Run it as told by the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", nargs="?", type=Path, metavar="TRACE")
    parser.add_argument("--requests", type=int, default=100, metavar="N")
    parser.add_argument("--model", default="Qwen2.5-7B", help="as of tent replay")
    parser.add_argument("--pool-size", default="512MiB", metavar="SIZE", help="likewise")
    parser.add_argument("--order", choices=[",".join(order) for order in ORDERS])
    parser.add_argument("--seed", type=int, default=11, help="of the requests that are made up")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if shutil.which("strace") is None:
        parser.error("strace is not installed; Debian has it in the package strace")
    chosen = [order for order in ORDERS if options.order in (None, ",".join(order))]
    with tempfile.TemporaryDirectory() as folder:
        trace = options.trace
        if trace is None:
            trace = Path(folder) / "trace.jsonl"
            trace.write_text(made_up(options.requests, options.seed))
        what = (trace, options.requests, options.model, options.pool_size)
        outcomes = [replay(*what, order, Path(folder)) for order in chosen]
    if options.json:
        print(json.dumps([vars(outcome) for outcome in outcomes], indent=2))
    else:
        show(outcomes)
    sys.exit(any(outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    main()
