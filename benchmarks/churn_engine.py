"""What the process of the long-lived engine does in `churn.py`, beside being opened."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
from churn_peer import POOL, write_for_ever

import tent_core as tent


class Host:
    """An engine, and what its application does with it when the driver says so."""

    def __init__(self, engine: tent.Engine) -> None:
        self._engine = engine
        self._pool = engine.allocate(POOL, name="pool")
        self._source = engine.register(np.arange(POOL, dtype=np.uint8))
        self._writing: dict[str, tuple[tent.Segment, threading.Thread]] = {}
        self.notified = 0

    def use(self, name: str, writes_on: bool) -> None:
        """Open a peer, move data both ways, notify; then let go of it, or go on writing."""
        segment = self._engine.open_segment(name)
        remote = segment.buffer("pool")
        segment.write(self._source, remote)
        segment.read(self._pool, remote)
        segment.notify("used")
        if not writes_on:
            segment.close()
            return
        thread = threading.Thread(target=write_for_ever, args=(segment, self._source), daemon=True)
        self._writing[name] = segment, thread
        thread.start()

    def let_go(self, name: str) -> None:
        """The peer has left: what wrote to it fails by itself."""
        if name in self._writing:
            segment, thread = self._writing.pop(name)
            thread.join(15)
            assert not thread.is_alive(), f"still writing to {name}, which has left"
            segment.close()

    def states(self) -> dict[str, str]:
        """The peers that the engine knows, and how they are; takes the notifications that came."""
        self.notified += len(self._engine.poll_notifications())
        return {peer.name: peer.state for peer in self._engine.peers()}

    def held(self) -> dict[str, int]:
        """What Python keeps alive, and what the transports say that they hold."""
        gc.collect()
        held = {"objects": len(gc.get_objects())}
        for name, numbers in self._engine.stats()["transports"].items():
            held.update({f"{name} {what}": count for what, count in numbers["holdings"].items()})
        return held

    def close(self) -> float:
        """Close the engine; the seconds that it took."""
        began = time.perf_counter()
        self._engine.close()
        return time.perf_counter() - began
