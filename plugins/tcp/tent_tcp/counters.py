"""Counters that the receiver writes and its engine reads, in one page that both have mapped."""

from __future__ import annotations

import mmap
import os

import numpy as np

NAMES = ("streams", "accepted", "refused", "messages", "bytes_in", "bytes_out")
"""What is counted: streams: open, ever accepted, closed for misbehaviour; requests; bytes of payload."""


class Counters:
    """The page, by its descriptor, which the maker owns. One process writes."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = (
            os.memfd_create("tent-tcp-counters") if descriptor is None else descriptor
        )
        os.ftruncate(self._descriptor, mmap.PAGESIZE)
        self._page = mmap.mmap(self._descriptor, mmap.PAGESIZE)
        self._values = np.frombuffer(self._page, np.uint64, len(NAMES))

    @property
    def descriptor(self) -> int:
        """The descriptor to hand to the other process."""
        return self._descriptor

    def write(self, values: tuple[int, ...]) -> None:
        """Set all counters, in the order of NAMES."""
        self._values[:] = values

    def read(self) -> dict[str, int]:
        """All counters by name."""
        return dict(zip(NAMES, self._values.tolist(), strict=True))

    def close(self) -> None:
        """Release descriptor and mapping. Idempotent."""
        if self._descriptor >= 0:
            del self._values
            self._page.close()
            os.close(self._descriptor)
            self._descriptor = -1
