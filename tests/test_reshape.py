"""Requests that travel in another shape: whatever happens to the rows, each request's result is exact."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tent_core.batch import Rows, Try
from tent_core.errors import TransportError
from tent_core.reshape import MergedSink, PartsSink, merge, part, parts
from tent_core.types import Opcode, Status
from tent_core.work import Requests

TRIES = (Try("tcp", TransportError("cut"), 0.1),)
U64 = np.uint64


class Results:
    """The last sink: what was told of each request."""

    def __init__(self, count: int) -> None:
        self.status = np.zeros(count, np.uint8)
        self.moved = np.zeros(count, U64)
        self.told = np.zeros(count, np.intp)

    def __len__(self) -> int:
        return len(self.status)

    def requests(self, rows: Rows) -> int:
        return len(self) if rows is None else len(rows)

    def settle(
        self,
        rows: Rows,
        status: NDArray[np.uint8] | Status,
        moved: NDArray[np.uint64] | None,
        transport: str,
    ) -> None:
        where = slice(None) if rows is None else rows
        self.status[where] = status
        if moved is not None:
            self.moved[where] = moved
        self.told[where] += 1

    def settle_failed(
        self,
        rows: Rows,
        status: Status,
        moved: NDArray[np.uint64] | None,
        tries: tuple[Try, ...],
        credited: bool = False,
    ) -> None:
        self.settle(rows, status, moved, "")

    def credit(self, transport: str, moved: int) -> None:
        """Not looked at here."""


def requests(
    lengths: list[int],
    gaps: list[tuple[int, int]],
    ids: list[tuple[int, int]] | None = None,
) -> Requests:
    """Rows of these lengths, each behind the one before after gaps at either side."""
    local, remote = 1 << 20, 1 << 30
    here, there = [], []
    for length, (a, b) in zip(lengths, gaps, strict=True):
        here.append((local + a, length))
        there.append((remote + b, length))
        local, remote = local + a + length, remote + b + length
    ids = ids or [(0, 0)] * len(lengths)
    local_ids = np.array([i for i, _ in ids], np.int32)
    remote_ids = np.array([i for _, i in ids], np.int32)
    return Requests(
        Opcode.WRITE,
        np.array(here, U64).reshape(-1, 2),
        np.array(there, U64).reshape(-1, 2),
        local_ids,
        remote_ids,
        tuple(sorted(set(local_ids.tolist()))),
        tuple(sorted(set(remote_ids.tolist()))),
        {},
        sum(lengths),
    )


def bytes_of(rows: Requests) -> list[tuple[int, int]]:
    """Where each byte comes from and goes to, in order."""
    return [
        (int(a) + i, int(b) + i)
        for (a, n), (b, _) in zip(rows.local.tolist(), rows.remote.tolist(), strict=True)
        for i in range(n)
    ]


ROWS = st.lists(
    st.tuples(
        st.integers(1, 9),
        st.tuples(st.sampled_from([0, 0, 0, 3]), st.sampled_from([0, 0, 0, 5])),
        st.tuples(st.sampled_from([0, 0, 1]), st.sampled_from([0, 0, 1])),
    ),
    min_size=1,
    max_size=30,
)


@given(ROWS, st.one_of(st.none(), st.integers(1, 40)))
def test_joined_rows_move_the_same_bytes_and_stay_within_one_buffer(
    rows: list[tuple[int, tuple[int, int], tuple[int, int]]], largest: int | None
) -> None:
    asked = requests(*(list(column) for column in zip(*rows, strict=True)))
    joined = merge(asked, lambda: largest)
    follows = [
        gap == (0, 0) and ids == before
        for (_, gap, ids), (_, _, before) in zip(rows[1:], rows, strict=False)
    ]
    if joined is None:
        assert largest is not None or not any(follows)
        return
    merged, shape = joined
    assert bytes_of(merged) == bytes_of(asked)
    assert len(merged) == len(rows) - sum(follows)
    assert largest is None or int(merged.local[:, 1].max()) <= largest
    firsts = shape.starts.tolist()
    assert merged.local_ids.tolist() == [rows[i][2][0] for i in firsts]
    assert merged.remote_ids.tolist() == [rows[i][2][1] for i in firsts]


@given(ROWS, st.data())
def test_of_joined_rows_each_request_gets_its_own_status_and_bytes(
    rows: list[tuple[int, tuple[int, int], tuple[int, int]]], data: st.DataObject
) -> None:
    asked = requests(*(list(column) for column in zip(*rows, strict=True)))
    joined = merge(asked, lambda: None)
    if joined is None:
        return
    merged, shape = joined
    results = Results(len(rows))
    sink = MergedSink(results, None, shape)
    assert sink.requests(None) == len(rows)
    moved = np.array([data.draw(st.integers(0, n)) for n in merged.local[:, 1].tolist()], U64)
    whole = moved == merged.local[:, 1]
    done, undone = np.flatnonzero(whole), np.flatnonzero(~whole)
    assert sink.requests(done) + sink.requests(undone) == len(rows)
    if len(done):
        sink.settle(done, Status.COMPLETED, moved[done], "tcp")
    if len(undone):
        sink.settle_failed(undone, Status.FAILED, moved[undone], TRIES)
    assert (results.told == 1).all()
    at = 0
    for j, arrived in enumerate(moved.tolist()):
        stop = shape.starts[j + 1] if j + 1 < len(shape.starts) else len(rows)
        for request in range(int(shape.starts[j]), int(stop)):
            assert request == at
            assert results.moved[request] == min(arrived, rows[request][0])
            assert results.status[request] == (Status.COMPLETED if whole[j] else Status.FAILED)
            arrived = max(0, arrived - rows[request][0])
            at += 1


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 16), st.data())
def test_parts_cover_every_byte_and_each_request_ends_once_with_the_sum_of_its_pieces(
    lengths: list[int], size: int, data: st.DataObject
) -> None:
    asked = requests(lengths, [(1, 1)] * len(lengths))
    pieces, spans = parts(asked, size)
    some = [part(asked, pieces, start, stop) for start, stop in spans]
    assert [byte for one in some for byte in bytes_of(one)] == bytes_of(asked)
    assert all(one.total < 2 * size for one in some)
    results = Results(len(lengths))
    whole = PartsSink(results, None, pieces)
    sinks = [whole.part(start, stop) for start, stop in spans]
    assert sum(sink.requests(None) for sink in sinks) == len(lengths)
    expected = np.zeros(len(lengths), np.int64)
    failed: set[int] = set()
    for i in data.draw(st.permutations(range(len(spans)))):
        start, stop = spans[i]
        sizes = pieces.length[start:stop]
        if data.draw(st.booleans()):
            sinks[i].settle(None, Status.COMPLETED, sizes, "tcp")
            np.add.at(expected, pieces.request[start:stop], sizes.astype(np.int64))
        else:
            sinks[i].settle_failed(None, Status.FAILED, np.zeros(stop - start, U64), TRIES)
            failed |= set(pieces.request[start:stop].tolist())
    assert (results.told == 1).all()
    assert results.moved.tolist() == expected.tolist()
    assert set(np.flatnonzero(results.status == Status.FAILED).tolist()) == failed
