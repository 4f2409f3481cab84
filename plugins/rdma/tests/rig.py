"""Two engines' worth of the transport in one process, over a fabric of fake NICs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tent_rdma.verbs
from tent_core import models
from tent_core.errors import TransportError
from tent_core.testing.harness import Context, DirectPeer, Row, Side, Submitted
from tent_core.testing.waiting import wait_until
from tent_core.topology import Gid, RdmaDevice, RdmaPort, Topology
from tent_core.transport import LocalBuffer
from tent_core.types import Opcode, Permission, Status
from tent_core.work import Work
from tent_mock.verbs import FakeVerbs
from tent_rdma import plugin
from tent_rdma.endpoint import RdmaEndpoint
from tent_rdma.settings import PoolSettings
from tent_rdma.transport import RdmaTransport
from tent_rdma.wire import asked

KIB, MIB = 1 << 10, 1 << 20
QUEUE_PAIRS = PoolSettings().queue_pairs
"""That a connection has at either end, where a test does not say."""
ONE_QUEUE_PAIR: dict[str, Any] = {"pools": {"default": {"queue_pairs": 1}}}
"""Settings of both sides, where what happens on one is meant."""
_seeds = itertools.count(1)


def fabric(nics: int = 2, **limits: int) -> FakeVerbs:
    """NICs fake0 at 10.0.0.1, fake1 at 10.0.1.1, and so on."""
    names = {f"fake{i}": f"::ffff:10.0.{i}.1" for i in range(nics)}
    return FakeVerbs(tent_rdma.verbs, names, limits=limits)


def topology(verbs: FakeVerbs) -> Topology:
    """What sysfs would say of the fabric's NICs."""
    return Topology(
        rdma_devices=tuple(
            RdmaDevice(
                name,
                ports=(
                    RdmaPort(
                        1,
                        "ACTIVE",
                        "Ethernet",
                        100.0,
                        (Gid(0, nic.gid_text, "RoCE v2", f"eth-{name}"),),
                    ),
                ),
            )
            for name, nic in verbs.nics.items()
        )
    )


def side(verbs: FakeVerbs, **settings: Any) -> Side:
    """One engine's worth, not started yet."""
    declaration = replace(plugin.tent_transport(), factory=lambda: RdmaTransport(lambda: verbs))
    settings = {"spin": 0, "probe_every": 1_000_000, **settings}
    made = Side(declaration, **settings)
    made.context = Context(made, models.make(declaration.settings, **settings), topology(verbs))
    return made


class Wire(DirectPeer):
    """The other side as a transport sees it, with the test in between: `intercept(message, ask)` answers for
    it, or raises, or has `ask()` answer. `asked` counts messages by their kind."""

    def __init__(self, here: Side, there: Side) -> None:
        super().__init__(here, there)
        self.intercept: Callable[[Any, Callable[[], bytes]], bytes] | None = None
        self.asked: Counter[str] = Counter()

    def bootstrap(self, payload: bytes, timeout: float) -> bytes:
        """Ask the transport of the other side, in this thread."""
        message = asked(payload)
        self.asked[message.kind] += 1
        ask = partial(super().bootstrap, payload, timeout)
        return ask() if self.intercept is None else self.intercept(message, ask)

    def refuse(self, *kinds: type[Any], cause: str = "the peer does not answer") -> None:
        """From now on messages of these kinds fail."""

        def intercept(message: Any, ask: Callable[[], bytes]) -> bytes:
            if isinstance(message, kinds):
                raise TransportError(cause)
            return ask()

        self.intercept = intercept


def transport(of: Side) -> RdmaTransport:
    """The transport of a side, by its own type."""
    assert isinstance(of.transport, RdmaTransport)
    return of.transport


def link(here: Side, there: Side) -> tuple[RdmaEndpoint, Wire]:
    """An endpoint of one side for another, and the peer that it was made for."""
    wire = Wire(here, there)
    endpoint = here.transport.connect(wire)
    assert isinstance(endpoint, RdmaEndpoint)
    return endpoint, wire


def ended(submitted: Submitted) -> Work:
    """The work when it has ended: every request was reported once."""
    work = submitted.wait()
    assert work.surplus == 0
    assert submitted.finished == 1
    return work


def completed(submitted: Submitted) -> Work:
    """The work when it has ended well."""
    work = ended(submitted)
    assert not work.causes, work.causes
    assert (work.status == Status.COMPLETED).all()
    return work


@dataclass
class Rig:
    """Both sides, `a` connected to `b`."""

    verbs: FakeVerbs
    a: Side
    b: Side
    endpoint: RdmaEndpoint
    wire: Wire

    def buffer(
        self,
        of: Side,
        size: int,
        permission: Permission = Permission.GLOBAL_READ_WRITE,
    ) -> tuple[LocalBuffer, NDArray[np.uint8]]:
        """Random bytes, registered."""
        array = np.random.default_rng(next(_seeds)).integers(0, 256, size, np.uint8)
        return of.register(array, permission=permission), array

    def submit(self, opcode: Opcode, *rows: Row, timeout: float = 30.0) -> Submitted:
        """From a to b."""
        return Submitted(self.endpoint, opcode, rows, timeout)

    def work_through(self) -> None:
        """A transfer, after which every rail is connected and nothing is under way."""
        size = 256 * KIB
        here, ours = self.buffer(self.a, size)
        there, theirs = self.buffer(self.b, size)
        completed(self.submit(Opcode.WRITE, (here, 0, there, 0, size)))
        assert (ours == theirs).all()
        paths = self.endpoint.paths
        wait_until(lambda: len(paths._connections) == paths.primary)
        self.a.unregister(here)
        self.b.unregister(there)


def live(verbs: FakeVerbs) -> dict[str, int]:
    """What there is on a fabric, by kind, without what there is none of."""
    return {kind: count for kind, count in verbs.counts.live.items() if count}


@contextmanager
def connected(verbs: FakeVerbs | None = None, **settings: Any) -> Iterator[Rig]:
    """Two started sides; at the end both stop, and nothing of either may be left on the fabric."""
    verbs = verbs or fabric()
    with side(verbs, **settings) as b, side(verbs, **settings) as a:
        endpoint, wire = link(a, b)
        yield Rig(verbs, a, b, endpoint, wire)
        verbs.release()
        endpoint.close("the test ends")
    assert not live(verbs)
    assert not verbs.counts.overflows
