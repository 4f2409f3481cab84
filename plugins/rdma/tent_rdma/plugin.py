"""What pluggy finds of this package: the declaration of the transport `rdma`, which imports little."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tent_core import topology
from tent_core.hookspecs import hookimpl
from tent_core.transport import Transport, TransportDeclaration
from tent_core.types import (
    DRAM_AND_GPU,
    DRAM_TO_DRAM,
    Capabilities,
    Reach,
    TransportType,
)
from tent_rdma.settings import Settings

if TYPE_CHECKING:
    from tent_core.doctor.finding import Finding


def capabilities(machine: topology.Topology) -> Capabilities:
    """What it can do on this machine: GPU memory only where a loaded module lets NICs reach it."""
    return Capabilities(
        memory_pairs=DRAM_AND_GPU if machine.peer_memory else DRAM_TO_DRAM,
        reach=Reach.NETWORK,
        owner_checked=True,  # a deregistered key is dead
        notifications=True,
        device_choice=True,
        qp_pools=True,
    )


def _make() -> Transport:
    from tent_rdma.transport import RdmaTransport

    return RdmaTransport()


def _obstacle() -> str:
    from tent_rdma import doctor

    return doctor.obstacle(topology.discover())


@hookimpl
def tent_doctor(topology: topology.Topology, settings: Settings) -> list[Finding]:
    """For `tent doctor`: which devices are used and why, how near they are, what would fail."""
    from tent_rdma import doctor

    return doctor.findings(topology, settings)


@hookimpl
def tent_transport() -> TransportDeclaration:
    """Declare the transport `rdma`, number 1."""
    return TransportDeclaration(
        name="rdma",
        number=int(TransportType.RDMA),
        factory=_make,
        settings=Settings,
        capabilities=capabilities(topology.Topology(modules=topology.modules())),
        summary="one-sided reads and writes by RDMA over every usable NIC",
        obstacle=_obstacle,
    )
