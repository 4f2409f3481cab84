"""Two hosts, made of two network namespaces joined by a veth pair: nothing assumes loopback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

BOUND_S = 50
TINY = ("--pool-size", "1MiB", "--json")


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, timeout=BOUND_S)


def can_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"tent-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True)
    if made.returncode == 0:
        ip("netns", "delete", name)
    return made.returncode == 0


pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(not can_make_namespaces(), reason="needs root and ip-netns(8)"),
]


class Host(NamedTuple):
    """A network namespace, with an IPv4 and an IPv6 address."""

    name: str
    v4: str
    v6: str

    def command(self, *args: object) -> list[str]:
        tent = (sys.executable, "-m", "tent_core.cli", *map(str, args))
        return ["ip", "netns", "exec", self.name, *tent]


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other and nobody else; their loopbacks are up."""
    tag = f"{os.getpid():x}"
    pair = (
        Host(f"tent-a{tag}", "10.77.0.1", "fd77::1"),
        Host(f"tent-b{tag}", "10.77.0.2", "fd77::2"),
    )
    try:
        for host in pair:
            ip("netns", "add", host.name)
            ip("-netns", host.name, "link", "set", "lo", "up")
        ends = [f"tv{tag}a", f"tv{tag}b"]
        ip("link", "add", ends[0], "netns", pair[0].name, "type", "veth",
           "peer", "name", ends[1], "netns", pair[1].name)  # fmt: skip
        for host, end in zip(pair, ends, strict=True):
            ip("-netns", host.name, "address", "add", f"{host.v4}/24", "dev", end)
            # Without `nodad` the address cannot be bound for a second or two.
            ip("-netns", host.name, "address", "add", f"{host.v6}/64", "dev", end, "nodad")
            ip("-netns", host.name, "link", "set", end, "up")
        yield pair
    finally:
        for host in pair:
            subprocess.run(["ip", "netns", "delete", host.name], check=False, capture_output=True)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a command, which is killed at the end if it still runs."""
    running: list[subprocess.Popen[str]] = []

    def call(*command: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        running.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True))
        return running[-1]

    yield call
    for process in running:
        process.kill()
        process.communicate(timeout=BOUND_S)


@pytest.mark.parametrize("family", ["v4", "v6"])
def test_a_trace_is_replayed_by_tcp_between_two_hosts(
    hosts: tuple[Host, Host], start: Any, trace: Path, family: str
) -> None:
    here, there = ((h.v4 if family == "v4" else f"[{h.v6}]") for h in hosts)
    decode = start(*hosts[0].command("replay", "--role", "decode", "--listen", f"{here}:0", *TINY))
    peer = json.loads(decode.stdout.readline())["segment"]
    assert peer.startswith(f"{here}:")

    prefill = start(
        *hosts[1].command("replay", trace, "--role", "prefill", "--peer", peer, *TINY),
        *("--listen", f"{there}:0", "--bytes-per-token", "256", "--transport", "tcp"),
    )
    out, errors = prefill.communicate(timeout=BOUND_S)
    assert prefill.returncode == 0, errors
    sent = json.loads(out)
    assert sent["verified"]
    assert sent["transports"] == {"tcp": sent["bytes"]}
    received = json.loads(decode.communicate(timeout=BOUND_S)[0])
    assert received["verified"]
    assert received["bytes"] == sent["bytes"] > 0
