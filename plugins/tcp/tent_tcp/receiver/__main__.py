"""Start of the receiver process: `python -m tent_tcp.receiver LINK LISTENER PIDFD COUNTERS`, by its engine.

The arguments are descriptors. What is secret comes as the first order, since others can see arguments.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import sys
import traceback

from tent_tcp.counters import Counters
from tent_tcp.receiver.connection import Desk
from tent_tcp.receiver.loop import Receiver
from tent_tcp.receiver.orders import Outbox, receive
from tent_tcp.receiver.owner import Owner
from tent_tcp.receiver.payload import Scratch
from tent_tcp.receiver.registry import Registry

_OTHER_DESCRIPTORS = 64


def main(arguments: list[str]) -> int:
    """Serve until the engine ends; the exit status."""
    link_number, listener_number, owner_process, page = map(int, arguments)
    counters = Counters(page)
    # A terminal's Ctrl-C and a service manager's SIGTERM reach the whole group; the engine decides.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    link = socket.socket(fileno=link_number)
    link.settimeout(10)
    first = receive(link)
    if first is None:
        return 0
    order, _ = first
    link.setblocking(False)
    listener = socket.socket(fileno=listener_number)
    listener.setblocking(False)
    _raise_limit(order["max_streams"] + _OTHER_DESCRIPTORS)
    pledge = bytes.fromhex(order["pledge"])
    owner = Owner(
        order["task"],
        order["page"],
        bytes.fromhex(order["token"]),
        lambda: counters.pledged == pledge,
    )
    desk = Desk(
        secret=bytes.fromhex(order["secret"]),
        registry=Registry(),
        owner=owner,
        scratch=Scratch(),
        handshake_s=order["handshake_s"],
        stall_s=order["stall_s"],
        socket_buffer=order["socket_buffer"],
    )
    receiver = Receiver(
        listener,
        link,
        owner_process,
        desk,
        counters,
        max_streams=order["max_streams"],
        spin_s=order["spin_s"],
    )
    Outbox(link).answer(order["number"], obstacle=owner.obstacle)
    try:
        receiver.run()
    except BaseException:
        Outbox(link).tell("receiver_failed", trace=traceback.format_exc()[-4000:])
        return 1
    return 0


def _raise_limit(needed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
