"""Who uses the present instance of the library, what it keeps of peers that have gone, when to replace it.

The library cannot close a connection, so that each peer that comes and goes leaves one, at both sides.
Nothing but a new instance frees them, and that ends every connection: it has to wait until nobody needs any.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

from tent_core.descriptor import PeerKey

K = TypeVar("K", bound=Hashable)


class Usage:
    """Pure counts. Not thread-safe.

    An *outgoing* connection is one that this engine made, by host id; an *incoming* one was made by a peer,
    by its key and the host id that it uses for this engine.
    """

    def __init__(self, most_retained: int) -> None:
        self._most = most_retained
        self._outgoing: dict[str, bool] = {}
        self._incoming: dict[tuple[PeerKey, str], bool] = {}
        self._users = 0
        self._retained = 0
        self.replacing = False
        """Nobody may begin to use it, since it is being replaced."""

    # ---------------------------------------------------------------- uses

    def begin(self) -> bool:
        """Count a use that must end before the instance does; False while it is being replaced."""
        if self.replacing:
            return False
        self._users += 1
        return True

    def end(self) -> None:
        """A use has ended."""
        self._users -= 1

    @property
    def users(self) -> int:
        """Uses that have not ended."""
        return self._users

    # ---------------------------------------------------------------- connections

    def connected(self, host_id: str) -> None:
        """This engine connected to a host id, for an endpoint that lives."""
        self._note(self._outgoing, host_id, True)

    def unused(self, host_id: str) -> None:
        """No endpoint uses it any more."""
        if host_id in self._outgoing:
            self._note(self._outgoing, host_id, False)

    def announced(self, peer: PeerKey, host_id: str) -> bool:
        """A peer is about to connect here; False while the instance is being replaced."""
        if self.replacing:
            return False
        self.left(peer)  # if it was here under another host id
        self._note(self._incoming, (peer, host_id), True)
        return True

    def left(self, peer: PeerKey) -> None:
        """A peer has departed, or was retired."""
        for known in self._incoming:
            if known[0] == peer:
                self._note(self._incoming, known, False)

    @property
    def incoming(self) -> int:
        """Connections of peers that are there."""
        return sum(self._incoming.values())

    @property
    def outgoing(self) -> int:
        """Connections that endpoints use."""
        return sum(self._outgoing.values())

    @property
    def retained(self) -> int:
        """Connections that nobody uses and the library keeps."""
        return self._retained

    def _note(self, table: dict[K, bool], key: K, used: bool) -> None:
        """Whether a connection is used; at the end of each transfer somebody asks how many are not."""
        self._retained += (not used) - (not table.get(key, True))
        table[key] = used

    # ---------------------------------------------------------------- replacing

    @property
    def over(self) -> bool:
        """Whether more is kept than was allowed."""
        return self.retained > self._most

    def try_replace(self) -> bool:
        """Begin to replace the instance, if that is due and nobody would notice. `replaced` ends it."""
        if self.replacing or not self.over or self._users or self.incoming:
            return False
        self.replacing = True
        return True

    def replaced(self) -> None:
        """There is another instance, which keeps nothing; endpoints connect again when they are used."""
        self._outgoing.clear()
        self._incoming.clear()
        self._retained = 0
        self.replacing = False
