"""What the kernel says: its own count of RDMA resources by process, pinned memory, packets by device."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path

RESOURCES = ("qp", "mr", "pd", "cq")
_LIMIT_S = 30


def resources(pid: int) -> Counter[str]:
    """Queue pairs, registrations, domains and completion queues of a process, and its pinned KiB."""
    counts = Counter(
        {
            kind: sum(1 for one in _show("resource", "show", kind) if one.get("pid") == pid)
            for kind in RESOURCES
        }
    )
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmPin:\s+(\d+) kB", status)
    assert found is not None
    counts["pinned_kib"] = int(found[1])
    return counts


def of_all() -> Counter[str]:
    """The same counts over all processes; the kernel's own are among them."""
    return Counter(
        one for kind in RESOURCES for one in [kind] * len(_show("resource", "show", kind))
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


def _show(*what: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(run("rdma", "-j", *what) or "[]")
    return found
