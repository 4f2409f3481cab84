"""Which host id stands for a peer in the present instance of the library, and what follows when one fails."""

from __future__ import annotations

import secrets
import threading

from tent_core.descriptor import PeerKey
from tent_mpcomm.adapter import Comm
from tent_mpcomm.registry import Registry


class Link:
    """The way to one peer. `failures` are transfers that failed since the last one that did not.

    `life` is that of the peer's instance of the library: what was connected ends with it.
    """

    __slots__ = ("failures", "host_id", "key", "life", "number")

    def __init__(self, key: PeerKey, number: int) -> None:
        self.key = key
        self.number = number
        again = f".{number}" if number else ""
        self.host_id = f"{key.name}#{key.incarnation.hex()}{again}"
        self.life = ""
        self.failures = 0


class Instance:
    """One instance of the library and all that is known of its connections; another one knows none of them.

    Thread-safe; its lock is a leaf. A host id, once connected, is remembered as long as the instance lives.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.registry = Registry()
        self.life = secrets.token_hex(8)
        """Tells this instance from those before and after it in the same engine."""
        self._links: dict[PeerKey, Link] = {}
        self._lock = threading.Lock()

    def link(self, key: PeerKey) -> Link:
        """The present link to a peer."""
        with self._lock:
            link = self._links.get(key)
            if link is None:
                link = self._links[key] = Link(key, 0)
            return link

    def renew(self, old: Link) -> bool:
        """Go on under a new host id; False if somebody has seen to that already."""
        with self._lock:
            if self._links.get(old.key) is not old:
                return False
            self._links[old.key] = Link(old.key, old.number + 1)
            return True
