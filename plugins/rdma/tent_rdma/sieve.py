"""Which of many keys to let go first: SIEVE, which keeps what is used and needs no lock to note a use.

After Zhang et al., "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction Algorithm for Web Caches" (NSDI
2024): a queue in the order of arrival, a mark for each key that was used, and a hand that walks from the
oldest key to the newest, taking marks away and stopping at the first key without one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class _Node(Generic[K]):
    __slots__ = ("key", "newer", "older", "visited")

    def __init__(self, key: K) -> None:
        self.key = key
        self.visited = False
        self.older: _Node[K] | None = None
        self.newer: _Node[K] | None = None


class Sieve(Generic[K]):
    """Keys in SIEVE's order of eviction.

    Not thread-safe: its owner calls it under a lock of its own. The exception is `touch`.
    """

    __slots__ = ("_hand", "_newest", "_nodes", "_oldest")

    def __init__(self) -> None:
        self._nodes: dict[K, _Node[K]] = {}
        self._oldest: _Node[K] | None = None
        self._newest: _Node[K] | None = None
        self._hand: _Node[K] | None = None
        """Where the next search begins; None is the oldest."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: K) -> bool:
        return key in self._nodes

    def add(self, key: K) -> None:
        """A new key, the newest, without a mark. One that is here already is only marked as used."""
        if key in self._nodes:
            self.touch(key)
            return
        node = self._nodes[key] = _Node(key)
        node.older = self._newest
        if self._newest is None:
            self._oldest = node
        else:
            self._newest.newer = node
        self._newest = node

    def touch(self, key: K) -> None:
        """`key` is used. From any thread, without the owner's lock: it reads a dictionary and stores one
        attribute, each of which is atomic in CPython. A key that is not (or no longer) here is ignored."""
        node = self._nodes.get(key)
        if node is not None:
            node.visited = True

    def discard(self, key: K) -> None:
        """Forget `key`, if it is here."""
        node = self._nodes.pop(key, None)
        if node is None:
            return
        if self._hand is node:
            self._hand = node.newer
        if node.older is None:
            self._oldest = node.newer
        else:
            node.older.newer = node.newer
        if node.newer is None:
            self._newest = node.older
        else:
            node.newer.older = node.older

    def victim(self, evictable: Callable[[K], bool]) -> K | None:
        """The key to let go first among those for which `evictable` is true, or None if there is none.

        It stays until it is discarded, and the hand stays at it. Others keep their place and their mark. The
        search is bounded, two rounds at most: a key that is used again and again while it is looked at does
        not prolong it. `evictable` must not call `add`, `discard` or `victim`.
        """
        node = self._hand
        used: _Node[K] | None = None
        for _ in range(2 * len(self._nodes)):
            if node is None:
                node = self._oldest
                assert node is not None
            if evictable(node.key):
                if not node.visited:
                    self._hand = node
                    return node.key
                node.visited = False
                used = used or node
            node = node.newer
        if used is None:
            return None
        self._hand = used
        return used.key
