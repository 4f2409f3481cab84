"""What pluggy finds of this package: the declaration of the transport `shm`, which imports little."""

from __future__ import annotations

from tent_core.hookspecs import hookimpl
from tent_core.transport import Transport, TransportDeclaration
from tent_core.types import DRAM_TO_DRAM, Capabilities, Reach, TransportType
from tent_shm.settings import Settings

CAPABILITIES = Capabilities(memory_pairs=DRAM_TO_DRAM, reach=Reach.HOST, cancellation=True)
"""Peers copy by themselves, so the owner checks nothing: a revocation waits for every one of them."""


def _make() -> Transport:
    from tent_shm.transport import ShmTransport

    return ShmTransport()


@hookimpl
def tent_transport() -> TransportDeclaration:
    """Declare the transport `shm`, number 3."""
    return TransportDeclaration(
        name="shm",
        number=int(TransportType.SHM),
        factory=_make,
        settings=Settings,
        capabilities=CAPABILITIES,
        summary="one copy between two processes of one host",
    )
