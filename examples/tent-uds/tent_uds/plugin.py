"""What TENT finds of this package: the declaration of the transport `uds`, and its settings."""

from __future__ import annotations

from dataclasses import dataclass

from tent_core.hookspecs import hookimpl
from tent_core.section import Section
from tent_core.transport import TransportDeclaration
from tent_core.types import DRAM_TO_DRAM, Capabilities, Reach

from .transport import NAME, UdsTransport


@dataclass(frozen=True, slots=True)
class Settings(Section):
    """What YAML may say under `transports.uds`: nothing but `enable`, which is the core's."""


@hookimpl
def tent_transport() -> TransportDeclaration:
    """Declare the transport. Claim only what it does: the conformance suite tries each claim."""
    return TransportDeclaration(
        name=NAME,
        number=1043,
        factory=UdsTransport,
        settings=Settings,
        capabilities=Capabilities(memory_pairs=DRAM_TO_DRAM, reach=Reach.HOST, owner_checked=True),
        summary="frames over a Unix-domain socket",
    )
