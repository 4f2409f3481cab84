"""What pluggy finds of this package: the declaration of the transport `tcp`, which imports little."""

from __future__ import annotations

from tent_core.hookspecs import hookimpl
from tent_core.transport import Transport, TransportDeclaration
from tent_core.types import DRAM_TO_DRAM, Capabilities, Reach, TransportType
from tent_tcp.settings import Settings

CAPABILITIES = Capabilities(
    memory_pairs=DRAM_TO_DRAM,
    reach=Reach.NETWORK,
    owner_checked=True,
    cancellation=True,
    partial_progress=True,
)
"""The receiver checks each request, so a revocation needs to wait for nobody who can only come by tcp."""


def _make() -> Transport:
    from tent_tcp.transport import TcpTransport

    return TcpTransport()


@hookimpl
def tent_transport() -> TransportDeclaration:
    """Declare the transport `tcp`, number 7."""
    return TransportDeclaration(
        name="tcp",
        number=int(TransportType.TCP),
        factory=_make,
        settings=Settings,
        capabilities=CAPABILITIES,
        summary="any two processes that a TCP connection can join; one host or many",
    )
