"""Two network namespaces joined by a veth pair, with IPv4 and IPv6 addresses, for the time of a test."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Side:
    """One namespace: its name, its end of the link to the other one, and its addresses there."""

    namespace: str
    device: str
    v4: str
    v6: str

    @property
    def wrapper(self) -> tuple[str, ...]:
        """What goes before a command line, so that it runs in there."""
        return ("ip", "netns", "exec", self.namespace)

    def on_a_machine(self, boot_id: Path) -> tuple[str, ...]:
        """As `wrapper`, and what runs there finds this boot id: to TENT the sides are then two machines."""
        into = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'
        return (*self.wrapper, "sh", "-c", into, str(boot_id))

    def address(self, family: int) -> str:
        """The host part of a listen address, of IPv4 (4) or IPv6 (6)."""
        return self.v4 if family == 4 else f"[{self.v6}]"


def why_not() -> str | None:
    """Why namespaces cannot be made here, or None."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if shutil.which("ip") is None:
        return "needs the command ip, of the package iproute2"
    name = f"tent-{secrets.token_hex(4)}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=30)
    if tried.returncode:
        return f"network namespaces cannot be made: {tried.stderr.strip()}"
    _ip("netns", "delete", name)
    return None


@contextmanager
def cut(side: Side) -> Iterator[None]:
    """Take this side's end of the link down: it finds no route, the other one hears nothing more."""
    _ip("-n", side.namespace, "link", "set", side.device, "down")
    try:
        yield
    finally:
        _ip("-n", side.namespace, "link", "set", side.device, "up")


@contextmanager
def joined() -> Iterator[tuple[Side, Side]]:
    """Two fresh namespaces with a link between them; the loopback of each reaches nobody else."""
    token = secrets.token_hex(3)
    sides = tuple(
        Side(f"tent-{token}-{n}", f"tent{token}{n}", f"10.77.0.{n}", f"fd77::{n}") for n in (1, 2)
    )
    with ExitStack() as stack:
        for side in sides:
            _ip("netns", "add", side.namespace)
            stack.callback(_ip, "netns", "delete", side.namespace)
        _ip("link", "add", sides[0].device, "type", "veth", "peer", "name", sides[1].device)
        for side in sides:
            end = side.device
            _ip("link", "set", end, "netns", side.namespace)
            within = ("-n", side.namespace)
            _ip(*within, "address", "add", f"{side.v4}/24", "dev", end)
            # Without nodad the address could not be bound during the first second.
            _ip(*within, "address", "add", f"{side.v6}/64", "dev", end, "nodad")
            _ip(*within, "link", "set", end, "up")
            _ip(*within, "link", "set", "lo", "up")
        yield sides[0], sides[1]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)
