"""The keys of a peer's buffers, read from its snapshots when they are first used."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from tent_core.descriptor import BufferDescriptor, SegmentDescriptor
from tent_core.errors import TransportError
from tent_core.transport import Peer
from tent_core.types import BufferState
from tent_core.work import Requests
from tent_rdma.registrations import Keys
from tent_rdma.wire import BufferAttribute, Malformed, decode

NAME = "rdma"


class RemoteKeys:
    """Thread-safe; its lock is a leaf. Keys of a buffer that a snapshot takes away are forgotten with it."""

    def __init__(self, peer: Peer, nics: int) -> None:
        """`nics`: how many the peer has."""
        self._peer = peer
        self._nics = nics
        self._lock = threading.Lock()
        self._known: dict[int, Keys] = {}

    def lookup(self, requests: Requests) -> list[Keys]:
        """The keys of the buffers that are used, of the very registrations that the caller named.

        Raises TransportError when the newest snapshot has another registration, revokes it, or has no key."""
        if gone := self.gone(requests):
            raise TransportError(f"buffers {gone} of {self._peer.key} are not registered any more")
        return [self._one(id, requests.remote_generations[id]) for id in requests.remote_used]

    def gone(self, requests: Requests) -> list[int]:
        """The buffers that the newest snapshot does not have any more, or revokes: their keys are dead, or
        about to be."""
        buffers = self._peer.segment.buffers
        return [
            id
            for id in requests.remote_used
            if (buffer := buffers.get(id)) is None
            or buffer.generation != requests.remote_generations[id]
            or buffer.state is not BufferState.LIVE
        ]

    def refresh(self, new: SegmentDescriptor) -> None:
        """Forget the keys of what `new` does not have, or revokes."""
        with self._lock:
            self._known = {
                id: keys
                for id, keys in self._known.items()
                if (buffer := new.buffers.get(id)) is not None
                and buffer.generation == keys.generation
                and buffer.state is BufferState.LIVE
            }

    def _one(self, id: int, generation: int) -> Keys:
        with self._lock:
            keys = self._known.get(id)
        if keys is None or keys.generation != generation:
            keys = self._read(self._peer.segment.buffers, id, generation)
            with self._lock:
                self._known[id] = keys
        return keys

    def _read(self, buffers: Mapping[int, BufferDescriptor], id: int, generation: int) -> Keys:
        buffer = buffers.get(id)
        if buffer is None or buffer.generation != generation:  # since `gone` was asked
            raise TransportError(f"buffer {id} of {self._peer.key} is not registered any more")
        attribute = buffer.attributes.get(NAME)
        if attribute is None:
            raise TransportError(f"buffer {id} of {self._peer.key} is not offered by rdma")
        said = decode(BufferAttribute, attribute.payload)
        chunks = -(-buffer.length // said.chunk)
        if len(said.rkeys) != self._nics or any(len(row) != chunks for row in said.rkeys):
            raise Malformed(
                f"buffer {id} of {self._peer.key}: keys for {self._nics} NICs and {chunks} chunks "
                f"were expected, and {[len(row) for row in said.rkeys]} came"
            )
        return Keys(
            id,
            generation,
            buffer.address,
            buffer.length,
            said.chunk,
            buffer.location,
            np.array(said.rkeys, np.uint64).reshape(self._nics, chunks),
        )
