"""The library, and the wire between its NICs."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Mapping
from typing import Any

from tent_mock.verbs.counts import Counts
from tent_mock.verbs.device import Device
from tent_mock.verbs.faults import Faults
from tent_mock.verbs.nic import Nic
from tent_mock.verbs.queue_pair import QueuePair
from tent_mock.verbs.words import Words

DEFAULT_NICS = {"fake0": "::ffff:10.0.0.1", "fake1": "::ffff:10.0.1.1"}


class FakeVerbs:
    """A stand-in for `tent_rdma.verbs.Verbs`: one fabric, with NICs that all users of it share.

    `words` is the seam's module; `nics` maps the names of devices to their GIDs; `limits` overrides fields of
    `Limits` for all of them. `move=False` checks work requests as ever and moves nothing. `instant=True` is
    for measuring others: posting one-sided requests and polling do nothing but count, nothing is checked.

    Work is carried out inside the call that made it possible (`post`, `post_send`, `post_receive`), unless
    its NIC is held. May be used from any thread. One lock guards everything and is a leaf: gates are waited
    for without it.
    """

    def __init__(
        self,
        words: Words,
        nics: Mapping[str, str] = DEFAULT_NICS,
        *,
        limits: Mapping[str, int] | None = None,
        move: bool = True,
        instant: bool = False,
    ) -> None:
        self.words = words
        self.move = move
        self.instant = instant
        self.faults = Faults()
        self.lock = threading.RLock()
        self.keys = itertools.count(0x1001)
        self.orders = itertools.count()
        self.nics = {
            name: Nic(self, name, gid, self._limits(limits or {})) for name, gid in nics.items()
        }
        self._by_gid = {nic.gid: nic for nic in self.nics.values()}

    def _limits(self, overridden: Mapping[str, int]) -> Any:
        usual = {
            "max_registration": 1 << 40,
            "max_registrations": 1 << 20,
            "max_queue_pairs": 1 << 18,
            "max_work_requests": 1 << 15,
            "max_completions": 1 << 22,
            "max_reads": 16,
        }
        return self.words.Limits(**{**usual, **overridden})

    @property
    def counts(self) -> Counts:
        """The sum over all NICs, as it is now."""
        with self.lock:
            return Counts.total(nic.counts for nic in self.nics.values())

    def devices(self) -> list[str]:
        """Names of the devices."""
        self.faults.enter("devices", "", self.words.VerbsError)
        return list(self.nics)

    def open(self, name: str) -> Device:
        """Open a device; each call is a context of its own, as a process has."""
        if name not in self.nics:
            raise self.words.VerbsError(f"cannot open the RDMA device {name}", errno.ENODEV)
        self.nics[name].enter("open")
        return Device(self.nics[name])

    def hold(self) -> None:
        """From now on no NIC carries out anything until `step`, or `release`."""
        for nic in self.nics.values():
            nic.hold()

    def release(self) -> None:
        """Carry out all that waits, and from now on at once again."""
        for nic in self.nics.values():
            nic.held = False
        self.run()

    def step(self, count: int = 1) -> int:
        """Carry out up to `count` work requests, the oldest post first, held or not; how many there were."""
        return self._step(count, list(self.nics.values()))

    def _step(self, count: int, nics: list[Nic]) -> int:
        with self.lock:
            for done in range(count):
                ready = [qp for nic in nics for qp in nic.pending if qp.runnable()]
                if not ready:
                    return done
                min(ready, key=QueuePair.order).execute()
            return count

    def run(self) -> None:
        """Carry out what can be carried out on the NICs that are not held."""
        with self.lock:
            progress = True
            while progress:
                progress = False
                for nic in self.nics.values():
                    if nic.held:
                        continue
                    for qp in list(nic.pending):
                        while qp.runnable():
                            qp.execute()
                            progress = True

    def nic_at(self, gid: bytes) -> Nic | None:
        """The NIC of a GID; with the lock held."""
        return self._by_gid.get(gid)

    def reach(self, gid: bytes, number: int) -> QueuePair | None:
        """The queue pair at an address, if packets get there; with the lock held."""
        nic = self._by_gid.get(gid)
        if nic is None or not nic.active or nic.dead:
            return None
        return nic.queue_pairs.get(number)
