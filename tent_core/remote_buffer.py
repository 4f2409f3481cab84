"""A peer's buffers as an application names them: handles that know when they are gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tent_core.descriptor import BufferDescriptor
from tent_core.errors import BufferRevoked, PeerDeparted, StaleHandle, TentError
from tent_core.inflight import InFlight
from tent_core.memory import slice_bounds

if TYPE_CHECKING:
    from tent_core.peers import LivePeer


class RemoteBuffer:
    """One registration of a peer's buffer. `remote[a:b]` is a slice in bytes. Immutable but for its end.

    After the owner unregistered it (or departed) every use raises StaleHandle; ask the segment again.
    """

    __slots__ = ("descriptor", "inflight", "peer", "trait")

    def __init__(self, peer: LivePeer, descriptor: BufferDescriptor) -> None:
        self.peer = peer
        self.descriptor = descriptor
        self.inflight = InFlight()
        offers = tuple(sorted((a.name, a.number) for a in descriptor.attributes.values()))
        self.trait = (descriptor.location, offers)
        """What selection reads of this buffer: location and who offers it."""

    id = property(lambda self: self.descriptor.id)
    generation = property(lambda self: self.descriptor.generation)
    name = property(lambda self: self.descriptor.name)
    address = property(lambda self: self.descriptor.address)
    length = property(lambda self: self.descriptor.length)
    location = property(lambda self: self.descriptor.location)
    permission = property(lambda self: self.descriptor.permission)

    def __len__(self) -> int:
        return self.descriptor.length

    def __getitem__(self, index: slice) -> RemoteSlice:
        start, stop = slice_bounds(self, index)
        return RemoteSlice(self, start, stop - start)

    def gone(self) -> TentError:
        """Why this buffer takes no requests."""
        if self.peer.departed is not None:
            return PeerDeparted(
                f"buffer {self.name!r} of segment {self.peer.key.name}: "
                f"the peer departed ({self.peer.departed}); "
                "open the segment again"
            )
        now = self.peer.segment.buffers.get(self.id)
        if now is not None and now.generation == self.generation:
            return BufferRevoked(
                f"buffer {self.name!r} of segment {self.peer.key.name} is being unregistered by its owner"
            )
        return StaleHandle(
            f"buffer {self.name!r} of segment {self.peer.key.name} was unregistered by its owner; "
            "ask the segment for its buffers again"
        )

    def __repr__(self) -> str:
        d = self.descriptor
        return (
            f"<RemoteBuffer {d.name!r} id={d.id} of {self.peer.key.name}: {d.length} bytes, "
            f"{d.location} {d.permission.name} {d.state.name}>"
        )


class RemoteSlice:
    """`length` bytes of a peer's buffer from `offset`."""

    __slots__ = ("buffer", "length", "offset")

    def __init__(self, buffer: RemoteBuffer, offset: int, length: int) -> None:
        self.buffer, self.offset, self.length = buffer, offset, length
