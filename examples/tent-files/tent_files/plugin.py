"""What TENT finds of this package: the declaration of the transport `files`, and its settings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from tent_core.hookspecs import hookimpl
from tent_core.transport import TransportDeclaration
from tent_core.types import Capabilities, MemoryKind, MemoryPair, Reach

from .transport import NAME, FilesTransport


class Settings(BaseModel):
    """What YAML may say under `transports.files`. With `sync` a WRITE is complete when it is on the disk."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
