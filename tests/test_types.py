"""The wire-stable vocabulary: every number and name is pinned by literal and through the conversions."""

from __future__ import annotations

import pytest

from tent_core.types import (
    PRIVATE_NUMBERS,
    BufferState,
    Capabilities,
    Intent,
    MemoryKind,
    MemoryPair,
    Opcode,
    Permission,
    Priority,
    Reach,
    Status,
    TransportType,
    memory_kind,
    transport_name,
    transport_number,
)

TRANSPORTS = {
    "unspec": 0,
    "rdma": 1,
    "mnnvl": 2,
    "shm": 3,
    "nvlink": 4,
    "gds": 5,
    "io_uring": 6,
    "tcp": 7,
    "ascend": 8,
    "sunrise_link": 9,
    "tpu": 10,
    "ub": 11,
    "mpcomm": 12,
}

ENUMS = {
    Status: {
        "INITIAL": 0,
        "PENDING": 1,
        "INVALID": 2,
        "CANCELED": 3,
        "COMPLETED": 4,
        "TIMEOUT": 5,
        "FAILED": 6,
    },
    Priority: {"HIGH": 0, "MEDIUM": 1, "LOW": 2},
    Intent: {
        "UNSPEC": 0,
        "FOREGROUND_GET": 1,
        "BACKGROUND_PREFETCH": 2,
        "MIGRATION": 3,
        "CHECKPOINT": 4,
        "WEIGHT_LOADING": 5,
        "STAGING_INTERNAL": 6,
    },
    Permission: {"LOCAL_READ_WRITE": 0, "GLOBAL_READ_ONLY": 1, "GLOBAL_READ_WRITE": 2},
    Opcode: {"READ": 0, "WRITE": 1},
    BufferState: {"LIVE": 0, "REVOKING": 1},
    Reach: {"NONE": 0, "PROCESS": 1, "HOST": 2, "NETWORK": 3},
}


def test_the_known_transports_are_exactly_these_13() -> None:
    assert {member.name.lower(): int(member) for member in TransportType} == TRANSPORTS
    assert len(TransportType.__members__) == 13  # no aliases either


@pytest.mark.parametrize(("name", "number"), TRANSPORTS.items())
def test_a_transport_converts_between_number_and_yaml_name(name: str, number: int) -> None:
    assert TransportType(number).name.lower() == name
    if name == "unspec":  # what is unspecified can be neither named nor selected
        assert transport_number(name) is None
        assert transport_name(number) is None
    else:
        assert transport_number(name) == number
        assert transport_name(number) == name


@pytest.mark.parametrize("name", ["TCP", "Tcp", "tpc", "", "0", "7", "mock", "io-uring"])
def test_a_name_that_nobody_knows_is_no_number_and_never_unspec(name: str) -> None:
    assert transport_number(name) is None


@pytest.mark.parametrize("number", [-1, 13, 999, 1000, 1999, 2**32])
def test_a_number_of_a_newer_version_has_no_name(number: int) -> None:
    assert transport_name(number) is None


@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
def test_the_other_enums_are_pinned_by_name_and_number(kind: type[Status]) -> None:
    expected = ENUMS[kind]
    assert {name: int(member) for name, member in kind.__members__.items()} == expected
    for name, number in expected.items():
        assert kind(number).name == name


def test_private_numbers_are_1000_to_1999() -> None:
    assert (PRIVATE_NUMBERS[0], PRIVATE_NUMBERS[-1]) == (1000, 1999)
    assert not any(number in PRIVATE_NUMBERS for number in TransportType)


def test_a_status_is_terminal_when_it_can_never_change_again() -> None:
    terminal = {status for status in Status if status.terminal}
    assert terminal == {
        Status.INVALID,
        Status.CANCELED,
        Status.COMPLETED,
        Status.TIMEOUT,
        Status.FAILED,
    }


@pytest.mark.parametrize(
    ("location", "kind"),
    [
        ("cpu", "dram"),
        ("cpu:1", "dram"),
        ("*", "dram"),
        ("cuda:0", "gpu"),
        ("npu:3", "gpu"),
        ("file:/kv", "file"),
    ],
)
def test_a_location_tells_its_kind_of_memory(location: str, kind: str) -> None:
    assert memory_kind(location) == kind
    assert MemoryKind(kind).value == kind


def test_capabilities_default_to_no() -> None:
    nothing = Capabilities()
    assert nothing.reach is Reach.NONE
    assert not nothing.memory_pairs
    assert nothing.largest_request is None
    assert nothing.retained_per_peer is None
    flags = {name: value for name, value in vars_of(nothing).items() if isinstance(value, bool)}
    assert len(flags) == 9
    assert not any(flags.values())


def test_capabilities_tell_which_memory_they_move_and_touch() -> None:
    can = Capabilities(memory_pairs=frozenset({MemoryPair(MemoryKind.DRAM, MemoryKind.GPU)}))
    assert can.moves(MemoryKind.DRAM, MemoryKind.GPU)
    assert not can.moves(MemoryKind.GPU, MemoryKind.DRAM)
    assert can.touches(MemoryKind.GPU)
    assert not can.touches(MemoryKind.FILE)


def vars_of(capabilities: Capabilities) -> dict[str, object]:
    return {name: getattr(capabilities, name) for name in Capabilities.__slots__}
