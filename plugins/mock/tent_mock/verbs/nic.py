"""A NIC as its test sees it: what all contexts that were opened on it share."""

from __future__ import annotations

import errno
import itertools
import socket
from typing import TYPE_CHECKING, Any

from tent_mock.verbs.counts import Counts
from tent_mock.verbs.faults import Operation

if TYPE_CHECKING:
    from tent_mock.verbs.device import Device, Registration
    from tent_mock.verbs.fabric import FakeVerbs
    from tent_mock.verbs.queue_pair import QueuePair


def packed(gid: str) -> bytes:
    """A GID's 16 bytes. Raises ValueError for what is none."""
    try:
        return socket.inet_pton(socket.AF_INET6, gid)
    except OSError:
        raise ValueError(f"{gid!r} is no GID: eight groups of hexadecimal digits") from None


class Nic:
    """One NIC with one port. Its methods may be called from any thread."""

    def __init__(self, fabric: FakeVerbs, name: str, gid: str, limits: Any) -> None:
        self.fabric = fabric
        self.name = name
        self.gid = packed(gid)
        self.gid_text = ":".join(self.gid.hex()[i : i + 4] for i in range(0, 32, 4))
        self.limits = limits
        self.ethernet = True
        self.lid = 0
        self.mtu = 1024
        self.counts = Counts()
        self.active = True
        self.held = False
        self.hangs = False
        self.dead = False
        self.port_status = 12
        self.contexts: list[Device] = []
        self.by_lkey: dict[int, Registration] = {}
        self.by_rkey: dict[int, Registration] = {}
        self.queue_pairs: dict[int, QueuePair] = {}
        self.pending: dict[QueuePair, None] = {}
        """Queue pairs with something to carry out."""
        self._numbers = itertools.count(17)

    def set_port(self, active: bool, *, hang: bool = False, status: int = 12) -> None:
        """Up or down; all contexts are told. While it is down work ends with `status`, or waits if it hangs.

        A real one retries first (12, retries exceeded); soft-RoCE fails at once with 2.
        """
        with self.fabric.lock:
            self.active, self.hangs, self.port_status = active, hang and not active, status
            self.emit("PORT_ACTIVE" if active else "PORT_DOWN")
        self.fabric.run()

    def expire(self) -> None:
        """Retries are used up: what hangs on the port that is down fails."""
        with self.fabric.lock:
            self.hangs = False
        self.fabric.run()

    def fatal(self) -> None:
        """The device breaks: every queue pair goes to ERR, and all but closing fails with EIO."""
        with self.fabric.lock:
            self.dead = True
            for qp in self.queue_pairs.values():
                qp.fail()
            self.emit("FATAL")
        self.fabric.run()

    def emit(self, event: str) -> None:
        """Queue an asynchronous event, by its name in `Event`, to all contexts."""
        with self.fabric.lock:
            for context in self.contexts:
                context.tell(self.fabric.words.Event[event])

    def hold(self) -> None:
        """Carry out nothing until `step` or `release`; flushing waits too."""
        with self.fabric.lock:
            self.held = True

    def release(self) -> None:
        """Carry out what waits, and from now on at once again."""
        with self.fabric.lock:
            self.held = False
        self.fabric.run()

    def step(self, count: int = 1) -> int:
        """Carry out up to `count` work requests posted to this NIC, the oldest first; how many there were."""
        return self.fabric._step(count, [self])

    def enter(self, operation: Operation) -> None:
        """Where each verb begins: count it, wait at the gates, fail if that is due."""
        fabric = self.fabric
        with fabric.lock:
            self.counts.calls[operation] += 1
        fabric.faults.enter(operation, self.name, fabric.words.VerbsError)
        if self.dead and not operation.startswith("close") and operation not in _OF_THE_DEAD:
            raise self.error(operation, errno.EIO)

    def error(self, what: str, number: int) -> Exception:
        """The seam's error."""
        return self.fabric.words.VerbsError(f"cannot {what} on {self.name}", number)

    def number(self) -> int:
        """The next number of a queue pair."""
        return next(self._numbers)

    def refuse_beyond(self, kind: str, more_bytes: int = 0) -> None:
        """ENOMEM where a limit of the device or of the test is reached; with the lock held."""
        faults, counts = self.fabric.faults, self.fabric.counts
        if kind == "registration":
            most, quota = self.limits.max_registrations, faults.max_registrations
        else:
            most, quota = self.limits.max_queue_pairs, faults.max_queue_pairs
        alive = self.counts.made[kind] - self.counts.closed[kind]
        all_alive = counts.made[kind] - counts.closed[kind]
        pinned = faults.max_pinned
        if (
            alive >= most
            or (quota is not None and all_alive >= quota)
            or (more_bytes and pinned is not None and counts.pinned + more_bytes > pinned)
        ):
            raise self.error(f"make a {kind.replace('_', ' ')}", errno.ENOMEM)


_OF_THE_DEAD = ("poll", "arm", "take", "next_event", "to_error", "port")
"""Operations that user space does by itself or that still answer when the device has failed."""
