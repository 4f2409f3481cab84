"""Random rounds: whatever happens in whatever order, every request is reported once, what is said to have
arrived has, nothing else is touched, and nothing is left."""

from __future__ import annotations

import contextlib
import errno
import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from rig import Wire, ended, fabric, link, live, side, transport

from tent_core.errors import TransportError
from tent_core.testing.harness import Row, Side, Submitted
from tent_core.testing.waiting import wait_until
from tent_core.types import Opcode, Status
from tent_rdma.endpoint import RdmaEndpoint
from tent_rdma.verbs import VerbsError
from tent_rdma.wire import Close

SLOT, SLOTS = 512, 2000
SETTINGS = {
    "send_depth": 16,
    "group": 4,
    "max_connections": 4,
    "drain_timeout": "50ms",
    "cooldown": "10ms",
    "longest_cooldown": "20ms",
    "slice": "4KiB",
}


class Peer:
    """One other side, the endpoint for it, and memory in slots: each is used by one request."""

    def __init__(self, a: Side, b: Side, seed: int) -> None:
        self.a, self.b = a, b
        numbers = np.random.default_rng(seed)
        self.endpoint: RdmaEndpoint
        self.wire: Wire
        self.endpoint, self.wire = link(a, b)
        self.next = 0
        self.source = {o: numbers.integers(0, 128, SLOT * SLOTS, np.uint8) for o in Opcode}
        self.target = {o: np.full(SLOT * SLOTS, 255, np.uint8) for o in Opcode}
        write, read = Opcode.WRITE, Opcode.READ
        self.here = {
            write: a.register(self.source[write]),
            read: a.register(self.target[read]),
        }
        self.there = {
            write: b.register(self.target[write]),
            read: b.register(self.source[read]),
        }
        self.made: list[tuple[Opcode, list[int], Submitted]] = []
        self._lock = threading.Lock()

    def submit(self, opcode: Opcode, count: int) -> None:
        with self._lock:
            slots = list(range(self.next, min(self.next + count, SLOTS)))
            self.next += len(slots)
        rows: list[Row] = [
            (self.here[opcode], s * SLOT, self.there[opcode], s * SLOT, SLOT) for s in slots
        ]
        if rows:
            try:
                self.made.append((opcode, slots, Submitted(self.endpoint, opcode, rows)))
            except TransportError:
                assert self.endpoint._closed is not None

    def come_back(self) -> None:
        """The endpoint is closed, the other side releases, and there is a new one."""
        self.endpoint.close("retired")
        self.b.transport.release(self.a.segment.snapshot.key, "it retired")
        self.endpoint, self.wire = link(self.a, self.b)

    def check(self) -> None:
        used: dict[Opcode, set[int]] = {o: set() for o in Opcode}
        for opcode, slots, submitted in self.made:
            work = ended(submitted)
            used[opcode].update(slots)
            for slot, status in zip(slots, work.status.tolist(), strict=True):
                span = slice(slot * SLOT, (slot + 1) * SLOT)
                same = (self.target[opcode][span] == self.source[opcode][span]).all()
                if status == Status.COMPLETED:
                    assert same, (opcode, slot)
                else:
                    assert same or (self.target[opcode][span] == 255).all()
        for opcode in Opcode:
            rest = np.ones(SLOTS, bool)
            rest[list(used[opcode])] = False
            assert (self.target[opcode].reshape(SLOTS, SLOT)[rest] == 255).all()


def refusing(chance: random.Random, share: float) -> Callable[[object, Callable[[], bytes]], bytes]:
    def intercept(message: object, ask: Callable[[], bytes]) -> bytes:
        if isinstance(message, Close) and chance.random() < share:
            raise TransportError("no answer")
        return ask()

    return intercept


@pytest.mark.parametrize("seed", range(12))
def test_random_rounds(seed: int) -> None:
    chance = random.Random(seed)
    verbs = fabric(max_completions=64)
    nics = list(verbs.nics.values())
    a = side(verbs, **SETTINGS).start()
    others = [side(verbs).start() for _ in range(3)]
    peers = [Peer(a, b, seed) for b in others]

    def burst() -> None:
        calls = [
            (chance.choice(peers), chance.choice(list(Opcode)), chance.randint(1, 40))
            for _ in range(3)
        ]
        threads = [threading.Thread(target=p.submit, args=(o, n)) for p, o, n in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def submit() -> None:
        chance.choice(peers).submit(chance.choice(list(Opcode)), chance.randint(1, 40))

    def flap() -> None:
        nic = chance.choice(nics)
        up = not nic.active
        nic.set_port(up, hang=chance.random() < 0.3, status=chance.choice([2, 12]))

    def hold() -> None:
        chance.choice(nics).hold()

    def release() -> None:
        chance.choice(nics).release()

    def step() -> None:
        verbs.step(chance.randint(1, 50))

    def fault() -> None:
        verbs.faults.fail_work(chance.choice([12, 2, 11, 10]), after=chance.randint(0, 20))

    def lack() -> None:
        operation = chance.choice(["queue_pair", "connect", "post", "close_queue_pair", "to_error"])
        number = chance.choice([errno.ENOMEM, errno.EINVAL])
        verbs.faults.fail_next(operation, number, after=chance.randint(0, 3))  # type: ignore[arg-type]

    def silent() -> None:
        peer = chance.choice(peers)
        peer.wire.intercept = refusing(
            random.Random(chance.random()), chance.choice([0, 0, 0.5, 1])
        )

    def come_back() -> None:
        chance.choice(peers).come_back()

    def depart() -> None:
        peer = chance.choice(peers)
        peer.b.transport.release(a.segment.snapshot.key, "it was thought to be gone")

    actions = [submit] * 8 + [burst] * 3 + [flap] * 3 + [step] * 3 + [release] * 3
    actions += [hold, fault, lack, silent, come_back, depart]
    for _ in range(60):
        with contextlib.suppress(VerbsError):  # of a release that was made to fail
            chance.choice(actions)()

    verbs.faults.clear()
    for nic in nics:
        nic.set_port(True)
    verbs.release()
    for peer in peers:
        peer.check()
        rails = peer.endpoint.paths._health.state(time.monotonic())
        assert [rail.in_flight for rail in rails] == [0] * len(rails)
    # It has all healed: work goes through again, over whichever rails are not paused.
    for peer in peers:
        peer.come_back()
        peer.submit(Opcode.WRITE, 8)
        peer.made[-1][2].wait()
        assert not peer.made[-1][2].work.causes
        peer.check()
        peer.endpoint.close("the round ends")
    wait_until(lambda: not any(p.endpoint.paths._connections for p in peers))
    assert not any(p.endpoint.paths._ending for p in peers)
    for each in (a, *others):
        each.transport.stop()
    assert not live(verbs)
    assert verbs.counts.overflows == 0
    assert all(nic._credits == 48 and not nic._starved for nic in transport(a)._nics)
