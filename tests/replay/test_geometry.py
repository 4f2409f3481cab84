"""Models have the geometries that their authors published, and pieces never overlap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tent_core.replay.errors import PoolTooSmall, ReplayError
from tent_core.replay.geometry import (
    DEFAULT_MODEL,
    MODELS,
    PAGES_PER_BLOCK,
    Geometry,
    of_bytes_per_token,
)


def test_the_two_models_of_the_traces_documentation_have_its_sizes() -> None:
    qwen, llama = MODELS["Qwen2.5-0.5B"], MODELS["Llama-3.1-8B"]
    assert (qwen.bytes_per_token, qwen.piece_bytes) == (12 << 10, 4 << 10)
    assert (llama.bytes_per_token, llama.piece_bytes) == (128 << 10, 32 << 10)
    assert qwen.pieces_per_block == 32 * 24 * 2
    assert qwen.model == DEFAULT_MODEL


def test_a_model_with_one_latent_vector_has_one_plane_a_layer() -> None:
    assert MODELS["DeepSeek-V3"].planes == 61
    assert MODELS["DeepSeek-V3"].bytes_per_token == 70_272


def test_128_kib_a_token_looks_like_the_8b_model() -> None:
    geometry = of_bytes_per_token(128 << 10)
    assert (geometry.layers, geometry.piece_bytes) == (32, 32 << 10)


@given(st.integers(1, 1 << 20).map(lambda n: 2 * n))
def test_any_even_size_a_token_is_met_exactly(size: int) -> None:
    geometry = of_bytes_per_token(size)
    assert geometry.bytes_per_token == size
    assert 1 <= geometry.layers <= 32


@pytest.mark.parametrize("size", [0, -2, 4097])
def test_an_odd_size_or_none_is_refused(size: int) -> None:
    with pytest.raises(ReplayError, match="positive, even number"):
        of_bytes_per_token(size)


def test_a_pool_that_holds_no_block_says_how_large_one_is() -> None:
    with pytest.raises(PoolTooSmall, match=r"holds no block of Qwen2.5-0.5B: one is 6MiB"):
        MODELS["Qwen2.5-0.5B"].pages_in(5 << 20)


def test_a_request_that_does_not_fit_says_which_pool_would_do() -> None:
    geometry = MODELS["Qwen2.5-0.5B"]
    geometry.check_fits(10, 60 << 20, "request 3")
    with pytest.raises(PoolTooSmall, match=r"request 3 has 11 blocks .* --pool-size 66MiB or more"):
        geometry.check_fits(11, 60 << 20, "request 3")


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 2), st.data())
def test_pieces_lie_inside_the_pool_and_never_overlap(
    layers: int, blocks: int, parts: int, data: st.DataObject
) -> None:
    geometry = Geometry("any", layers, 4, parts)
    pool_pages = blocks * PAGES_PER_BLOCK + data.draw(st.integers(0, 9))
    chosen = data.draw(st.permutations(range(pool_pages)))[: blocks * PAGES_PER_BLOCK]
    offsets = geometry.offsets(np.array(chosen).reshape(blocks, -1), pool_pages)
    assert offsets.dtype == np.uint64
    assert len(offsets) == blocks * geometry.pieces_per_block
    assert len(set((offsets // geometry.piece_bytes).tolist())) == len(offsets)
    assert (offsets % geometry.piece_bytes == 0).all()
    assert int(offsets.max()) + geometry.piece_bytes <= pool_pages * geometry.page_bytes


def test_offsets_beyond_two_to_the_53_are_exact() -> None:
    geometry = Geometry("huge", 1, 1 << 40)
    page = (1 << 8) + 1
    offsets = geometry.offsets(np.array([[page]]), 1)
    assert int(offsets[0]) == page * geometry.piece_bytes
