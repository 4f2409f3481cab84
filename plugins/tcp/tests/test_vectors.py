"""Iovec arrays over a socket: short counts, more pieces than a call takes, pieces larger than the bound."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tent_tcp.syscalls import HOLDING, RELEASING
from tent_tcp.vectors import WOULD_BLOCK, EndOfStream, Piece, Vector, address_of

NOW = socket.MSG_DONTWAIT


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def pieces_of(memory: np.ndarray, lengths: list[int], gap: int = 1) -> np.ndarray:
    """Iovecs of these lengths, one after the other in `memory`, with a gap between them."""
    starts = np.cumsum([0] + [n + gap for n in lengths[:-1]])
    iovecs = np.empty((len(lengths), 2), np.uint64)
    iovecs[:, 0] = starts + address_of(memory)
    iovecs[:, 1] = lengths
    return iovecs


def vector(iovecs: np.ndarray) -> Vector:
    return Vector(address_of(iovecs), len(iovecs), int(iovecs[:, 1].sum()), iovecs)


def content(memory: np.ndarray, iovecs: np.ndarray) -> bytes:
    base = address_of(memory)
    return b"".join(memory[a - base : a - base + n].tobytes() for a, n in iovecs.tolist())


def exchange(
    pair: tuple[socket.socket, socket.socket],
    out: Vector | Piece,
    into: Vector | Piece,
    bound: int | None,
) -> None:
    """Move everything, a little at a time."""
    while out.left or into.left:
        if out.left:
            out.send(pair[0].fileno(), NOW, HOLDING, bound)
        if into.left:
            into.receive(pair[1].fileno(), NOW, RELEASING, bound)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    st.sampled_from([None, 1, 7, 1000, 4096]),
    st.integers(0, 2**32 - 1),
)
def test_pieces_of_any_lengths_arrive_in_pieces_of_any_other(
    pair: tuple[socket.socket, socket.socket],
    sent: list[int],
    received: list[int],
    bound: int | None,
    seed: int,
) -> None:
    total = min(sum(sent), sum(received))
    if bound is not None:
        total = min(total, 200 * bound)
    source = np.random.default_rng(seed).integers(0, 256, 4000 * 60, np.uint8)
    target = np.zeros_like(source)
    out, into = (pieces_of(m, fit(n, total)) for m, n in ((source, sent), (target, received)))
    before = out.copy(), into.copy()
    exchange(pair, vector(out), vector(into), bound)
    assert content(target, into) == content(source, out)
    assert int(np.count_nonzero(target)) <= total  # and nothing between the pieces
    assert np.array_equal(out, before[0])
    assert np.array_equal(into, before[1])


def fit(lengths: list[int], total: int) -> list[int]:
    """These lengths as far as they are needed for `total`, the last one shortened."""
    kept = []
    for length in lengths:
        kept.append(min(length, total))
        total -= kept[-1]
        if total == 0:
            break
    return kept


@pytest.mark.parametrize("count", [1023, 1024, 1025, 5000])
def test_more_pieces_than_one_call_takes(
    pair: tuple[socket.socket, socket.socket], count: int
) -> None:
    source = np.random.default_rng(count).integers(0, 256, 8 * count, np.uint8)
    target = np.zeros_like(source)
    out, into = pieces_of(source, [7] * count), pieces_of(target, [7] * count)
    exchange(pair, vector(out), vector(into), None)
    assert content(target, into) == content(source, out)


def test_a_piece_alone_moves_as_a_vector_does(pair: tuple[socket.socket, socket.socket]) -> None:
    source = np.arange(100_000, dtype=np.uint8)
    target = np.zeros_like(source)
    out, into = (Piece(address_of(a), a.nbytes) for a in (source, target))
    exchange(pair, out, into, 9999)
    assert np.array_equal(source, target)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=2000), st.data())
def test_a_window_is_what_comes_next(lengths: list[int], data: st.DataObject) -> None:
    memory = np.zeros(51 * len(lengths), np.uint8)
    iovecs = pieces_of(memory, lengths)
    v = vector(iovecs)
    position = 0
    flat = np.concatenate([np.arange(a, a + n) for a, n in iovecs.tolist()])
    while v.left:
        bound = data.draw(st.integers(1, 2000))
        address, count, size = v.window(bound)
        shown = np.frombuffer(
            (np.ctypeslib.ctypes.c_uint64 * (2 * count)).from_address(address), np.uint64
        )
        expected = np.concatenate([np.arange(a, a + n) for a, n in shown.reshape(-1, 2).tolist()])
        assert len(expected) == size <= bound
        assert np.array_equal(flat[position : position + size], expected)
        position += size
        v.advance(size)


def test_an_empty_stream_would_block_and_a_closed_one_has_ended() -> None:
    memory = np.zeros(8, np.uint8)
    one, other = socket.socketpair()
    with other:
        for part in (vector(pieces_of(memory, [4, 3])), Piece(address_of(memory), 8)):
            assert part.receive(other.fileno(), NOW, HOLDING) == WOULD_BLOCK
        one.close()
        for part in (vector(pieces_of(memory, [4, 3])), Piece(address_of(memory), 8)):
            with pytest.raises(EndOfStream):
                part.receive(other.fileno(), NOW, HOLDING)


def test_a_bad_descriptor_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        Piece(0, 1).send(-1, NOW, HOLDING)
