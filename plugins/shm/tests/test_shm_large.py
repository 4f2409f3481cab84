"""Large copies: every byte of them, and none beside them."""

from __future__ import annotations

import numpy as np
import pytest
from shm_harness import noise

from tent_shm import large

ROW = large.ROW_BYTES
SIZES = [2 * ROW - 1, 2 * ROW, 2 * ROW + 1, 3_000_001, 8 * ROW]


@pytest.mark.parametrize("size", [1, 64, ROW - 1, ROW, ROW + 1, *SIZES])
def test_every_byte_is_copied_and_none_beside_them(size: int) -> None:
    source, target = noise(size + 100, 1), np.zeros(size + 100, np.uint8)
    large.copy(target.ctypes.data + 13, source.ctypes.data + 7, size)
    assert np.array_equal(target[13 : 13 + size], source[7 : 7 + size])
    assert not target[:13].any()
    assert not target[13 + size :].any()


@pytest.mark.parametrize("size", SIZES)
def test_rows_do_not_follow_one_another_which_would_make_one_of_them(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def look(to: np.ndarray, _: np.ndarray) -> None:
        seen.append((to.shape, to.strides))

    monkeypatch.setattr(np, "copyto", look)
    memory = np.zeros(size, np.uint8)
    large.copy(memory.ctypes.data, memory.ctypes.data, size)
    [((rows, row), (step, one))] = seen
    assert rows > 1
    assert one == 1
    assert step < row < ROW * 1.1
    assert (rows - 1) * step + row == size
