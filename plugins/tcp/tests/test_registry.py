"""The check of requests at the owner: the array version agrees with one that anybody can read."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tent_tcp.protocol import READ, WRITE, Verdict
from tent_tcp.receiver.registry import Registry

START, LENGTH = 2**46, 2**20


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    """Ids 0 to 4: writable, read-only, private, mapped, removed; 5 was replaced; 6 is at the top."""
    made = Registry()
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, LENGTH)
    for buffer, permission in ((0, 2), (1, 1), (2, 0), (4, 2), (5, 2)):
        made.add(buffer, 10 + buffer, START, LENGTH, permission, -1)
    made.add(3, 13, START, LENGTH, 2, descriptor)
    os.close(descriptor)
    made.remove(4, 14)
    made.remove(5, 15)
    made.add(5, 99, START, LENGTH, 2, -1)
    made.add(6, 16, 2**63 - LENGTH, LENGTH, 2, -1)
    yield made
    made.remove(3, 13)


def model(opcode: int, buffer: int, generation: int, address: int, length: int) -> Verdict:
    """What must come out, with Python's own numbers."""
    known = {0: 10, 1: 11, 2: 12, 3: 13, 4: 14, 5: 99, 6: 16}
    if buffer not in known:
        return Verdict.UNKNOWN_BUFFER
    if generation != known[buffer]:
        return Verdict.STALE_BUFFER
    if buffer == 4:
        return Verdict.REVOKED
    if buffer == 2 or (buffer == 1 and opcode == WRITE):
        return Verdict.DENIED
    start = 2**63 - LENGTH if buffer == 6 else START
    inside = start <= address and address + length <= start + LENGTH
    return Verdict.OK if inside else Verdict.OUT_OF_RANGE


edges = [0, 1, START - 1, START, START + 1, START + LENGTH - 1, START + LENGTH, 2**63 - LENGTH]
edges += [2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - LENGTH, 2**64 - 1]
addresses = st.one_of(st.sampled_from(edges), st.integers(START, START + LENGTH))
lengths = st.one_of(
    st.sampled_from([1, LENGTH - 1, LENGTH, LENGTH + 1, 2**48]), st.integers(1, 4096)
)
ids = st.one_of(st.integers(0, 7), st.sampled_from([63, 64, 2**31, 2**63, 2**64 - 1]))
generations = st.sampled_from([10, 11, 12, 13, 14, 15, 16, 99, 0, 2**64 - 1])
rows = st.tuples(ids, generations, addresses, lengths)
good_rows = st.integers(START, START + LENGTH - 4096).map(lambda a: (0, 10, a, 17))


@given(st.sampled_from([READ, WRITE]), rows)
def test_a_single_block_is_judged_like_the_model(
    registry: Registry, opcode: int, row: tuple[int, int, int, int]
) -> None:
    assert registry.admit_one(opcode, row).verdict == model(opcode, *row)


@given(
    st.sampled_from([READ, WRITE]),
    st.lists(st.one_of(good_rows, rows), min_size=2, max_size=8),
)
def test_many_blocks_are_judged_like_the_model_and_the_first_bad_one_is_named(
    registry: Registry, opcode: int, blocks: list[tuple[int, int, int, int]]
) -> None:
    columns = np.array(blocks, np.uint64).T.copy()
    admission = registry.admit(opcode, columns, sum(b[3] for b in blocks))
    verdicts = [model(opcode, *b) for b in blocks]
    bad = [i for i, v in enumerate(verdicts) if v is not Verdict.OK]
    if not bad:
        assert admission.verdict is Verdict.OK
        assert admission.mapped == all(b[0] == 3 for b in blocks)
    else:
        assert admission.verdict is not Verdict.OK
        assert admission.vector is None
        assert verdicts[admission.position] is admission.verdict


def test_what_is_mapped_has_addresses_of_this_process(registry: Registry) -> None:
    admission = registry.admit_one(WRITE, (3, 13, START + 100, 50))
    assert admission.mapped
    columns = np.array([(3, 13, START + 100 * i, 50) for i in (1, 2)], np.uint64).T.copy()
    many = registry.admit(WRITE, columns, 100)
    assert many.vector is not None
    assert admission.vector is not None
    address, count, _ = many.vector.window(1000)
    shown = np.frombuffer((np.ctypeslib.ctypes.c_uint64 * 4).from_address(address), np.uint64)
    assert count == 2
    one = np.frombuffer(
        (np.ctypeslib.ctypes.c_uint64 * 2).from_address(admission.vector.window(50)[0]), np.uint64
    )
    assert shown[0] == one[0] != START + 100
    assert shown[2] - shown[0] == 100


def test_ids_may_come_in_any_order() -> None:
    registry = Registry()
    for buffer in (500, 3, 64):
        registry.add(buffer, 1, START, LENGTH, 2, -1)
    for buffer in (500, 3, 64):
        assert registry.admit_one(WRITE, (buffer, 1, START, 1)).verdict is Verdict.OK
    assert registry.admit_one(WRITE, (4, 1, START, 1)).verdict is Verdict.UNKNOWN_BUFFER
