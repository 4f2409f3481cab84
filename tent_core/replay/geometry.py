"""The shape of a model's KV cache in memory: how many bytes a block is, and where its pieces lie in a pool.

A pool is one range of memory that holds, for each layer and for K and for V, an array of small pages. One
*plane* is one such array; a *piece* is one page of one plane: contiguous, and what a transfer moves.

    pool = planes x pages x piece_bytes        plane = layer * parts + (0 for K, 1 for V)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tent_core.replay.errors import PoolTooSmall, ReplayError
from tent_core.replay.trace import BLOCK_TOKENS
from tent_core.units import format_size

PAGE_TOKENS = 16
"""Tokens in one page of a paged pool: vLLM's default `block_size`."""

PAGES_PER_BLOCK = BLOCK_TOKENS // PAGE_TOKENS

Pages = NDArray[np.int64]
"""Page numbers, shape (blocks, PAGES_PER_BLOCK)."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The KV cache of one model. `token_bytes` is what one token takes in one plane.

    `parts` is 2 (K and V), or 1 for models that keep one latent vector instead of both.
    """

    model: str
    layers: int
    token_bytes: int
    parts: int = 2

    @property
    def planes(self) -> int:
        """Arrays of pages in a pool."""
        return self.layers * self.parts

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers."""
        return self.planes * self.token_bytes

    @property
    def piece_bytes(self) -> int:
        """Bytes of one page of one plane; always a multiple of 16."""
        return PAGE_TOKENS * self.token_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all planes."""
        return self.planes * self.piece_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one 512-token block."""
        return PAGES_PER_BLOCK * self.page_bytes

    @property
    def pieces_per_block(self) -> int:
        """Pieces of one 512-token block: pages x layers x parts."""
        return PAGES_PER_BLOCK * self.planes

    def pages_in(self, pool_bytes: int) -> int:
        """How many pages fit into that many bytes. Raises PoolTooSmall if not even a block does."""
        pages = pool_bytes // self.page_bytes
        if pages < PAGES_PER_BLOCK:
            raise PoolTooSmall(
                f"a pool of {format_size(pool_bytes)} holds no block of {self.model}: "
                f"one is {format_size(self.block_bytes)}; give a larger --pool-size"
            )
        return pages

    def check_fits(self, blocks: int, pool_bytes: int, what: str) -> None:
        """Raise PoolTooSmall, with the size that would do, unless `blocks` fit into the pool at once."""
        if blocks * PAGES_PER_BLOCK > pool_bytes // self.page_bytes:
            raise PoolTooSmall(
                f"{what} has {blocks} blocks of {format_size(self.block_bytes)} ({self.model}), and "
                f"the pool only {format_size(pool_bytes)}: it needs --pool-size "
                f"{-(-blocks * self.block_bytes >> 20)}MiB or more"
            )

    def offsets(self, pages: Pages, pool_pages: int) -> NDArray[np.uint64]:
        """Offsets in bytes of all pieces of `pages`, shape (planes * pages.size,), plane by plane.

        The order depends on the shape of `pages` alone, so the offsets of a sender's and of a receiver's
        pages belong together row by row.
        """
        rows = pages.reshape(-1).astype(np.uint64) * np.uint64(self.piece_bytes)
        starts = np.arange(self.planes, dtype=np.uint64) * np.uint64(pool_pages * self.piece_bytes)
        return (starts[:, None] + rows[None, :]).reshape(-1)


def _attention(model: str, layers: int, kv_heads: int, head_size: int) -> Geometry:
    return Geometry(model, layers, kv_heads * head_size * _BF16)


_BF16 = 2

# Layers, KV heads and head size as in the `config.json` that each model's authors publish with its weights
# (num_hidden_layers, num_key_value_heads, head_dim or hidden_size / num_attention_heads), in bf16.
# DeepSeek-V3 caches one latent vector a layer: kv_lora_rank 512 and qk_rope_head_dim 64.
MODELS: dict[str, Geometry] = {
    geometry.model: geometry
    for geometry in (
        _attention("Qwen2.5-0.5B", 24, 2, 64),
        _attention("Qwen2.5-1.5B", 28, 2, 128),
        _attention("Qwen2.5-7B", 28, 4, 128),
        _attention("Qwen2.5-72B", 80, 8, 128),
        _attention("Qwen3-8B", 36, 8, 128),
        _attention("Qwen3-32B", 64, 8, 128),
        _attention("Llama-3.2-1B", 16, 8, 64),
        _attention("Llama-3.1-8B", 32, 8, 128),
        _attention("Llama-3.1-70B", 80, 8, 128),
        _attention("Llama-3.1-405B", 126, 8, 128),
        _attention("Mistral-7B-v0.3", 32, 8, 128),
        _attention("gemma-2-9b", 42, 8, 256),
        Geometry("DeepSeek-V3", 61, (512 + 64) * _BF16, parts=1),
    )
}

DEFAULT_MODEL = "Qwen2.5-0.5B"

_MOST_LAYERS = 32


def of_bytes_per_token(size: int) -> Geometry:
    """A geometry of that many bytes per token: K and V over the most layers, up to 32, that divide it.

    So 128 KiB is 32 layers with pieces of 32 KiB, as Llama-3.1-8B has. Raises ReplayError for an
    odd size.
    """
    if size <= 0 or size % 2:
        raise ReplayError(
            f"{size} bytes per token cannot be K and V alike: give a positive, even number"
        )
    layers = next(n for n in range(_MOST_LAYERS, 0, -1) if size % (2 * n) == 0)
    return Geometry(f"{format_size(size)} a token", layers, size // (2 * layers))
