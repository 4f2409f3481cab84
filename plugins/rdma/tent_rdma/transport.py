"""The transport as the engine sees it."""

from __future__ import annotations

from tent_core.errors import TransportUnavailable
from tent_core.transport import Endpoint, Peer, Transport, TransportContext


class RdmaTransport(Transport):
    """In the making."""

    def start(self, context: TransportContext) -> None:
        raise TransportUnavailable("not yet")

    def connect(self, peer: Peer) -> Endpoint:
        raise NotImplementedError

    def stop(self) -> None:
        pass
