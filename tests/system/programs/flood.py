"""Run by a peer, with the segment name of an `owner` and the `name` of a buffer: writes all of it for ever."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import tent_core as tent

    engine: tent.Engine
    owner: str
    name: str

segment = engine.open_segment(owner)
remote = segment.buffer(name)
local = engine.register(np.ones(remote.length, np.uint8))


def flood() -> None:
    while True:
        segment.write(local, remote)


threading.Thread(target=flood, daemon=True).start()
