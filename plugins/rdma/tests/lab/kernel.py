"""What the kernel says: its own count of RDMA resources by process, pinned memory, packets by device."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

_LIMIT_S = 30


def resources(pid: int) -> Counter[str]:
    """Queue pairs, registrations, domains, completion queues and contexts of a process, and its pinned KiB.

    The kernel names the thread that made a thing, and nobody once that has ended; so what is counted hangs on
    the contexts, which live as long as the thread that opened the devices.
    """
    threads = {int(name) for name in os.listdir(f"/proc/{pid}/task")}
    contexts = {_of(one, "ctxn") for one in _show("ctx") if one.get("pid") in threads}
    domains = {_of(one, "pdn") for one in _show("pd") if _of(one, "ctxn") in contexts}
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmPin:\s+(\d+) kB", status)
    assert found is not None
    return Counter(
        ctx=len(contexts),
        pd=len(domains),
        cq=sum(_of(one, "ctxn") in contexts for one in _show("cq")),
        qp=sum(_of(one, "pdn") in domains for one in _show("qp")),
        mr=sum(_of(one, "pdn") in domains for one in _show("mr")),
        pinned_kib=int(found[1]),
    )


def sent(device: str) -> int:
    """Packets that a device has sent."""
    counter = Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters/sent_pkts")
    return int(counter.read_text())


def set_link(netdev: str, state: str) -> None:
    """`up` or `down`."""
    run("ip", "link", "set", netdev, state)


def run(*command: str) -> str:
    """The output of a command that has to succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def _show(what: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(run("rdma", "-j", "resource", "show", what) or "[]")
    return found


def _of(one: dict[str, object], key: str) -> tuple[object, object]:
    """What a number of this kind names: numbers are unique on one device only."""
    return one["ifname"], one.get(key)
