"""What TENT finds of this package: the declaration of the transport `files`, and its settings."""

from __future__ import annotations

from dataclasses import dataclass

from tent_core.hookspecs import hookimpl
from tent_core.section import Section
from tent_core.transport import TransportDeclaration
from tent_core.types import Capabilities, MemoryKind, MemoryPair, Reach

from .transport import NAME, FilesTransport


@dataclass(frozen=True, slots=True)
class Settings(Section):
    """What YAML may say under `transports.files`. With `sync` a WRITE is complete when it is on the disk."""

    sync: bool = False


@hookimpl
def tent_transport() -> TransportDeclaration:
    """Declare the transport: memory of the initiator, files of the owner, on one machine."""
    return TransportDeclaration(
        name=NAME,
        number=1044,
        factory=FilesTransport,
        settings=Settings,
        capabilities=Capabilities(
            memory_pairs=frozenset({MemoryPair(MemoryKind.DRAM, MemoryKind.FILE)}),
            reach=Reach.HOST,
            cancellation=True,
            partial_progress=True,
        ),
        summary="pread and pwrite of files that a peer of this machine offers",
    )
