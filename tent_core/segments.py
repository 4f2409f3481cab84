"""The local segment: one owner of the descriptor, changed only by publishing a new snapshot."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from tent_core.descriptor import SegmentDescriptor

Watcher = Callable[[SegmentDescriptor], None]


class LocalSegment:
    """What this engine offers. Snapshots are immutable; `update` is the only way to change what is offered.

    Thread-safe. Watchers are called in the updating thread after the lock was released; they must not block.
    """

    def __init__(self, descriptor: SegmentDescriptor) -> None:
        self._snapshot = descriptor
        self._lock = threading.Lock()
        self._watchers: tuple[Watcher, ...] = ()

    @property
    def snapshot(self) -> SegmentDescriptor:
        """The newest snapshot."""
        return self._snapshot

    def update(self, change: Callable[[SegmentDescriptor], SegmentDescriptor]) -> SegmentDescriptor:
        """Publish `change(snapshot)` under the next version and tell the watchers. Returns the new snapshot.

        `change` is a pure function; a change that returns its argument publishes nothing.
        """
        with self._lock:
            old = self._snapshot
            changed = change(old)
            if changed is old:
                return old
            new = replace(changed, version=old.version + 1)
            self._snapshot = new
            watchers = self._watchers
        for watcher in watchers:
            watcher(new)
        return new

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Call `watcher(snapshot)` after every update (it may see versions out of order from racing updates,
        and then the newest is `snapshot`). Returns a function that ends it."""
        with self._lock:
            self._watchers = (*self._watchers, watcher)

        def end() -> None:
            with self._lock:
                self._watchers = tuple(w for w in self._watchers if w is not watcher)

        return end
