"""The page that receiver and engine have both mapped: counters that the receiver writes, and a pledge of the
engine's (`pledge`)."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct

from tent_tcp import pledge

NAMES = ("streams", "accepted", "refused")
"""Streams that are open, that were ever accepted, that were closed for what they did."""

_LAYOUT = struct.Struct(f"={len(NAMES)}Q")
_PLEDGE = slice(1024, 1024 + pledge.SIZE)


class Counters:
    """The page, by its descriptor, which the maker owns. One process writes."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("tent-tcp-counters") if descriptor is None else descriptor
        os.ftruncate(self.descriptor, mmap.PAGESIZE)
        self._page = mmap.mmap(self.descriptor, mmap.PAGESIZE)

    def write(self, *values: int) -> None:
        """Set all counters, in the order of NAMES."""
        _LAYOUT.pack_into(self._page, 0, *values)

    def read(self) -> dict[str, int]:
        """All counters by name; none after `close`."""
        if self._page.closed:
            return {}
        return dict(zip(NAMES, _LAYOUT.unpack_from(self._page), strict=True))

    def pledge(self) -> bytes:
        """Mark the page for as long as the calling thread lives: what `pledged` has until then."""
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        pledge.pledge(first + _PLEDGE.start)
        return self.pledged

    @property
    def pledged(self) -> bytes:
        """The mark."""
        return self._page[_PLEDGE]

    def close(self) -> None:
        """Release descriptor and mapping. Idempotent."""
        if self.descriptor >= 0:
            self._page.close()
            os.close(self.descriptor)
            self.descriptor = -1
