"""What pluggy finds of this package: the declaration of the transport `mpcomm`, which imports little."""

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
    Retained,
    TransportType,
)
from tent_mpcomm.settings import Settings

if TYPE_CHECKING:
    from tent_core.doctor.finding import Finding

RETAINED = Retained(
    "the connection of the library, at either side: it cannot be closed, only freed with the whole instance",
    pinned_bytes=128 << 10,
)
"""Of a connection over one NIC with one queue pair: 512 work requests of 64 bytes to send and as many to
receive, and 1,024 completions of 64 bytes."""


def capabilities(machine: topology.Topology) -> Capabilities:
    """What it can do on this machine: GPU memory only where `nvidia_peermem` is loaded. All else is at no."""
    return Capabilities(
        memory_pairs=DRAM_AND_GPU if "nvidia_peermem" in machine.modules else DRAM_TO_DRAM,
        reach=Reach.NETWORK,
        self_scheduling=True,
        retained_per_peer=RETAINED,
    )


def _make() -> Transport:
    from tent_mpcomm import adapter
    from tent_mpcomm.transport import MpcommTransport

    return MpcommTransport(adapter.load())


def _obstacle() -> str:
    from tent_mpcomm import adapter

    return adapter.load().obstacle


@hookimpl
def tent_doctor(topology: topology.Topology, settings: Settings) -> list[Finding]:
    """For `tent doctor`: the library, its devices, its environment, and what GPU memory needs."""
    from tent_mpcomm import doctor

    return doctor.findings(topology, settings)


@hookimpl
def tent_transport() -> TransportDeclaration:
    """Declare the transport `mpcomm`, number 12."""
    return TransportDeclaration(
        name="mpcomm",
        number=int(TransportType.MPCOMM),
        factory=_make,
        settings=Settings,
        capabilities=capabilities(topology.Topology(modules=topology.modules())),
        summary="RDMA by UCL-MPComm, which slices and chooses NICs itself",
        obstacle=_obstacle,
    )
