"""Two engines' worth of the transport in one process, over a fabric of fake NICs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tent_rdma.verbs
from numpy.typing import NDArray
from tent_mock.verbs import FakeVerbs
from tent_rdma import plugin
from tent_rdma.transport import RdmaTransport

from tent_core.testing.harness import Context, Row, Side, Submitted
from tent_core.topology import Gid, RdmaDevice, RdmaPort, Topology
from tent_core.transport import Endpoint, LocalBuffer
from tent_core.types import Opcode, Permission

KIB, MIB = 1 << 10, 1 << 20
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
    made = Side(declaration, **{"spin": 0, **settings})
    made.context = Context(made, declaration.settings(**{"spin": 0, **settings}), topology(verbs))
    return made


@dataclass
class Rig:
    """Both sides, `a` connected to `b`."""

    verbs: FakeVerbs
    a: Side
    b: Side
    endpoint: Endpoint

    def buffer(
        self,
        of: Side,
        size: int,
        permission: Permission = Permission.GLOBAL_READ_WRITE,
    ) -> tuple[LocalBuffer, NDArray[np.uint8]]:
        """Random bytes, registered."""
        array = np.random.default_rng(next(_seeds)).integers(0, 256, size, np.uint8)
        return of.register(array, permission=permission), array

    def submit(self, opcode: Opcode, *rows: Row) -> Submitted:
        """From a to b."""
        return Submitted(self.endpoint, opcode, rows)


@contextmanager
def connected(verbs: FakeVerbs | None = None, **settings: Any) -> Iterator[Rig]:
    """Two started sides; at the end both stop, and nothing of either may be left on the fabric."""
    verbs = verbs or fabric()
    with side(verbs, **settings) as b, side(verbs, **settings) as a:
        endpoint = a.connect(b)
        yield Rig(verbs, a, b, endpoint)
        endpoint.close("the test ends")
