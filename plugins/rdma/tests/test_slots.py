"""Slots of notifications: neighbours never mix, and what is no message is refused."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tent_core.transport import EXCHANGE_LIMIT
from tent_rdma.slots import (
    HEADER_BYTES,
    PAYLOAD_LIMIT,
    SLOT_BYTES,
    SLOTS,
    Kind,
    Malformed,
    Message,
    Oversized,
    Slots,
)

LENGTHS = (0, 1, HEADER_BYTES, 4095, 4096, EXCHANGE_LIMIT, PAYLOAD_LIMIT - 1, PAYLOAD_LIMIT)
kinds = st.sampled_from(Kind)
ids = st.integers(0, (1 << 64) - 1)


@pytest.fixture(scope="module")
def slots() -> Iterator[Slots]:
    made = Slots(4)
    yield made
    made.close()


def raw(slots: Slots, slot: int) -> bytes:
    return ctypes.string_at(slots.address(slot), SLOT_BYTES)


def fill(slots: Slots, value: int) -> None:
    ctypes.memset(slots.start, value, slots.length)


def payload(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def test_the_largest_message_of_the_engine_fits() -> None:
    assert PAYLOAD_LIMIT >= EXCHANGE_LIMIT


def test_slots_lie_one_after_the_other_in_one_buffer(slots: Slots) -> None:
    assert [slots.offset(slot) for slot in range(4)] == [
        0,
        SLOT_BYTES,
        2 * SLOT_BYTES,
        3 * SLOT_BYTES,
    ]
    assert slots.length == 4 * SLOT_BYTES
    for slot in (-1, 4):
        with pytest.raises(IndexError, match=f"slot {slot} of 4"):
            slots.offset(slot)
        with pytest.raises(IndexError):
            slots.encode(slot, Kind.REQUEST, 1, b"")
        with pytest.raises(IndexError):
            slots.decode(slot, HEADER_BYTES)


@pytest.mark.parametrize("length", LENGTHS)
def test_every_slot_full_at_once_gives_back_what_was_put_into_it(length: int) -> None:
    slots = Slots()
    sizes = {
        slot: slots.encode(slot, Kind.REQUEST, slot, payload(slot, length)) for slot in range(SLOTS)
    }
    assert set(sizes.values()) == {HEADER_BYTES + length}
    for slot in range(SLOTS):
        message = slots.decode(slot, sizes[slot])
        assert message == Message(Kind.REQUEST, slot, payload(slot, length))
    slots.close()


@given(kind=kinds, id=ids, length=st.integers(0, PAYLOAD_LIMIT), slot=st.integers(0, 3))
@example(kind=Kind.ANSWER, id=0, length=PAYLOAD_LIMIT, slot=1)
def test_a_message_comes_back_and_its_neighbours_stay_as_they_were(
    slots: Slots, kind: Kind, id: int, length: int, slot: int
) -> None:
    fill(slots, 0xA5)
    sent = payload(length, length)
    size = slots.encode(slot, kind, id, sent)
    assert size == HEADER_BYTES + length <= SLOT_BYTES
    assert slots.decode(slot, size) == (kind, id, sent)
    for other in range(4):
        untouched = raw(slots, other)[size if other == slot else 0 :]
        assert untouched == b"\xa5" * len(untouched)


@given(
    lengths=st.lists(
        st.sampled_from(LENGTHS) | st.integers(0, PAYLOAD_LIMIT), min_size=2, max_size=2
    )
)
def test_decoding_stops_at_what_arrived_whatever_the_slot_held_before(
    slots: Slots, lengths: list[int]
) -> None:
    before, now = lengths
    slots.encode(2, Kind.REQUEST, 7, payload(1, before))
    size = slots.encode(2, Kind.ANSWER, 8, payload(2, now))
    assert slots.decode(2, size) == (Kind.ANSWER, 8, payload(2, now))


@pytest.mark.parametrize("excess", [1, 2, SLOT_BYTES])
def test_a_payload_that_does_not_fit_is_refused_and_nothing_is_written(
    slots: Slots, excess: int
) -> None:
    fill(slots, 0x5A)
    with pytest.raises(Oversized, match=f"a message of {PAYLOAD_LIMIT + excess} bytes"):
        slots.encode(1, Kind.REQUEST, 1, bytes(PAYLOAD_LIMIT + excess))
    assert {raw(slots, slot) for slot in range(4)} == {b"\x5a" * SLOT_BYTES}


@given(
    length=st.integers(0, 300),
    said=st.integers(0, 400) | st.sampled_from([SLOT_BYTES, SLOT_BYTES + 1]),
)
def test_a_completion_of_another_length_than_the_message_is_refused(
    slots: Slots, length: int, said: int
) -> None:
    size = slots.encode(0, Kind.REQUEST, 1, payload(3, length))
    if said == size:
        assert slots.decode(0, said).payload == payload(3, length)
    else:
        with pytest.raises(Malformed):
            slots.decode(0, said)


@given(length=st.integers(0, 200), where=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_byte_that_was_changed_is_noticed(
    slots: Slots, length: int, where: int, flip: int
) -> None:
    size = slots.encode(0, Kind.REQUEST, 1, payload(3, length))
    byte = ctypes.c_ubyte.from_address(slots.address(0) + where % size)
    byte.value ^= flip
    with pytest.raises(Malformed):
        slots.decode(0, size)


@given(noise=st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused(slots: Slots, noise: bytes) -> None:
    ctypes.memmove(slots.address(3), noise, len(noise))
    with pytest.raises(Malformed):
        slots.decode(3, len(noise))


def test_a_kind_of_a_newer_version_is_refused(slots: Slots) -> None:
    size = slots.encode(0, 9, 1, b"")  # type: ignore[arg-type]
    with pytest.raises(Malformed, match="unknown kind 9"):
        slots.decode(0, size)


def test_closing_gives_the_memory_back_and_may_be_repeated() -> None:
    slots = Slots(2)
    slots.close()
    slots.close()
    with pytest.raises(ValueError):
        slots.encode(0, Kind.REQUEST, 1, b"")
