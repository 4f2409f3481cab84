"""What pages hold: bytes that follow from the block's hash, so that a receiver can check them all.

Every piece has a key of 64 bits, mixed from the block's hash, the page's place in the block and the
plane; word i of the piece is that key XOR word i of one random sequence. So two pieces differ in
every word, and a piece that is shifted, mixed up or left over from another block is found. Filling
and checking go at the speed of memory, in chunks that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tent_core.replay.geometry import PAGES_PER_BLOCK, Geometry, Pages

_CHUNK_BYTES = (
    256 << 10
)  # measured: from 64 KiB to 1 MiB alike, below slower for the calls, above for the cache

Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One piece that did not hold what it must; `byte` is the first wrong one in the piece."""

    block: int
    layer: int
    part: int
    page: int
    byte: int
    expected: int
    found: int

    def __str__(self) -> str:
        return (
            f"block {self.block}, layer {self.layer}, {'KV'[self.part]}, page {self.page}, byte {self.byte}: "
            f"expected {self.expected:#04x}, found {self.found:#04x}"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many pieces were checked, how many were wrong, and the first of those."""

    pieces: int
    mismatches: int
    first: Mismatch | None = None


class PoolView:
    """A pool's memory, uint8 of any length, seen as planes of pages of words. For one thread."""

    def __init__(self, memory: NDArray[np.uint8], geometry: Geometry) -> None:
        self.geometry = geometry
        self.pages = geometry.pages_in(memory.nbytes)
        used = memory[: self.pages * geometry.page_bytes].view(np.uint64)
        self.planes: Words = used.reshape(geometry.planes, self.pages, geometry.piece_bytes // 8)
        self._sequence = _mix(np.arange(1, geometry.piece_bytes // 8 + 1, dtype=np.uint64))
        rows = max(1, _CHUNK_BYTES // geometry.piece_bytes)
        self._scratch = np.empty((rows, geometry.piece_bytes // 8), np.uint64)

    def fill(self, hashes: NDArray[np.uint64], pages: Pages) -> None:
        """Write into each page what its block's hash says. `hashes` (n,), `pages` (n, PAGES_PER_BLOCK)."""
        for plane, rows, keys in self._chunks(hashes, pages):
            scratch = self._scratch[: len(rows)]
            np.bitwise_xor(keys[:, None], self._sequence, out=scratch)
            plane[rows] = scratch

    def scrub(self, pages: Pages) -> None:
        """Write zeros into every piece of these pages, so that nothing of an earlier block is found there."""
        rows = pages.reshape(-1)
        for plane in self.planes:
            plane[rows] = 0

    def verify(self, hashes: NDArray[np.uint64], pages: Pages) -> Verdict:
        """Compare every byte of these blocks with what their hashes say."""
        pieces, wrong = 0, 0
        first: Mismatch | None = None
        for number, (plane, rows, keys) in enumerate(self._chunks(hashes, pages)):
            scratch = self._scratch[: len(rows)]
            # `clip` because `raise` makes numpy copy once more; rows come from the pool and are in range.
            np.take(plane, rows, axis=0, out=scratch, mode="clip")
            scratch ^= self._sequence
            bad = np.flatnonzero((scratch != keys[:, None]).any(axis=1))
            pieces += len(rows)
            wrong += len(bad)
            if len(bad) and first is None:
                first = self._locate(number, int(bad[0]), rows, keys, hashes)
        return Verdict(pieces, wrong, first)

    def _chunks(
        self, hashes: NDArray[np.uint64], pages: Pages
    ) -> Iterator[tuple[Words, NDArray[np.int64], Words]]:
        """Plane, page numbers and keys, chunk by chunk; plane by plane, for the sake of the TLB."""
        rows, keys = pages.reshape(-1), _page_keys(hashes)
        step = len(self._scratch)
        for index, plane in enumerate(self.planes):
            own = _mix(keys ^ np.uint64(index + 1))
            for start in range(0, len(rows), step):
                yield plane, rows[start : start + step], own[start : start + step]

    def _locate(
        self, chunk: int, row: int, rows: NDArray[np.int64], keys: Words, hashes: NDArray[np.uint64]
    ) -> Mismatch:
        step = len(self._scratch)
        per_plane = -(-len(hashes) * PAGES_PER_BLOCK // step)
        plane, position = chunk // per_plane, chunk % per_plane * step + row
        difference = (self._scratch[row] ^ keys[row]).view(np.uint8)
        byte = int(np.flatnonzero(difference)[0])
        expected = int((self._sequence ^ keys[row]).view(np.uint8)[byte])
        return Mismatch(
            block=int(hashes[position // PAGES_PER_BLOCK]),
            layer=plane // self.geometry.parts,
            part=plane % self.geometry.parts,
            page=int(rows[row]),
            byte=byte,
            expected=expected,
            found=expected ^ int(difference[byte]),
        )


def _page_keys(hashes: NDArray[np.uint64]) -> Words:
    """One key per page of each block, shape (n * PAGES_PER_BLOCK,)."""
    places = np.arange(1, PAGES_PER_BLOCK + 1, dtype=np.uint64) << np.uint64(32)
    return _mix((_mix(hashes)[:, None] ^ places[None, :]).reshape(-1))


def _mix(words: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection that mixes well."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
