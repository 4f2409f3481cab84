"""What TENT finds of this package: the declaration of the transport `newname`, and its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from tent_core.hookspecs import hookimpl
from tent_core.section import Section
from tent_core.transport import TransportDeclaration
from tent_core.types import DRAM_TO_DRAM, Capabilities, Reach

from .transport import NAME, NewnameTransport


@dataclass(frozen=True, slots=True)
class Settings(Section):
    """What YAML may say under `transports.newname`. `port` is the data port; 0 is any that is free."""

    port: Annotated[int, Interval(ge=0, le=65535)] = 0


@hookimpl
def tent_transport() -> TransportDeclaration:
    """Declare the transport. Claim only what it does: the conformance suite tries each claim."""
    return TransportDeclaration(
        name=NAME,
        number=1999,
        factory=NewnameTransport,
        settings=Settings,
        capabilities=Capabilities(
            memory_pairs=DRAM_TO_DRAM, reach=Reach.NETWORK, owner_checked=True
        ),
        summary="frames over a TCP stream",
    )
