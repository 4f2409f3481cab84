"""A hub and its arms: network namespaces, each arm joined to the hub by a link of its own. Needs root."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

HUB = "10.78.0.1"
"""The hub's address, which every arm reaches over its own link."""


@dataclass(frozen=True)
class End:
    """One end of a link: its namespace and its device there."""

    namespace: str
    device: str


@dataclass(frozen=True)
class Arm:
    """An arm's namespace and address, and both ends of its link."""

    namespace: str
    address: str
    ends: tuple[End, End]


def on_a_machine(namespace: str, boot_id: Path) -> tuple[str, ...]:
    """What goes before a command line so that it runs in there, on what is to TENT a machine of its own."""
    into = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'
    return ("ip", "netns", "exec", namespace, "sh", "-c", into, str(boot_id))


@contextmanager
def cut(end: End) -> Iterator[None]:
    """Take one end of a link down: it finds no route, the other one hears nothing more."""
    _ip("-n", end.namespace, "link", "set", end.device, "down")
    try:
        yield
    finally:
        _ip("-n", end.namespace, "link", "set", end.device, "up")
        restore(end)


def reset(end: End) -> None:
    """Break every connection of an arm to the hub, at the arm's end, where the kernel can (`ss -K`)."""
    command = ["ip", "netns", "exec", end.namespace, "ss", "-K", "dst", HUB]
    subprocess.run(command, check=False, capture_output=True, timeout=30)


def restore(end: End) -> None:
    """Routes go with the link: give an arm its way to the hub again."""
    if end.device.endswith("a"):
        number = int(end.device[:-1].rsplit("n", 1)[1])
        _ip("-n", end.namespace, "route", "replace", HUB, "via", f"10.77.{number}.1")


@contextmanager
def star(arms: int) -> Iterator[tuple[str, list[Arm]]]:
    """The hub's namespace, and the arms."""
    token = secrets.token_hex(2)
    with ExitStack() as stack:
        hub = _namespace(stack, f"tent-{token}-hub")
        _ip("-n", hub, "address", "add", f"{HUB}/32", "dev", "lo")
        made = []
        for n in range(1, arms + 1):
            arm = _namespace(stack, f"tent-{token}-{n}")
            ends = (End(hub, f"t{token}n{n}h"), End(arm, f"t{token}n{n}a"))
            _ip("link", "add", ends[0].device, "type", "veth", "peer", "name", ends[1].device)
            for end, last in zip(ends, (1, 2), strict=True):
                _ip("link", "set", end.device, "netns", end.namespace)
                within = ("-n", end.namespace)
                _ip(*within, "address", "add", f"10.77.{n}.{last}/24", "dev", end.device)
                _ip(*within, "link", "set", end.device, "up")
            restore(ends[1])
            made.append(Arm(arm, f"10.77.{n}.2", ends))
        yield hub, made


def _namespace(stack: ExitStack, name: str) -> str:
    _ip("netns", "add", name)
    stack.callback(_ip, "netns", "delete", name)
    _ip("-n", name, "link", "set", "lo", "up")
    return name


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)
