"""What is measured: block sizes and batches at random places of a span, as in `benchmarks/peerbench.py`."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tent_core.errors import UsageError
from tent_core.mistakes import NotAllowed
from tent_core.types import Opcode
from tent_core.units import format_size, parse_size

SPAN = 256 << 20
"""Bytes of memory on either side."""

SEED = 7


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` blocks of `block` bytes, moved by one call."""

    block: int
    batch: int

    def __str__(self) -> str:
        return f"{self.batch} x {format_size(self.block)}"

    def slots(self, span: int) -> int:
        """How many places for a block a span has. Raises UsageError if the batch does not fit."""
        if self.block * self.batch > span:
            raise UsageError(
                f"{self} is {format_size(self.block * self.batch)}, "
                f"more than the {format_size(span)} on either side"
            )
        return span // self.block


CASES = (
    Case(4 << 10, 1),
    Case(64 << 10, 1),
    Case(1 << 20, 1),
    Case(16 << 20, 1),
    Case(64 << 20, 1),
    Case(4 << 10, 1000),
    Case(16 << 10, 1000),
    Case(64 << 10, 500),
)

OPCODES = (Opcode.WRITE, Opcode.READ)


class Memory(enum.StrEnum):
    """Whose memory both sides use: the engine's, which peers can map, or the application's."""

    ALLOCATED = "allocated"
    REGISTERED = "registered"


class Busy(enum.StrEnum):
    """Which processes compute in a Python thread all the time."""

    NEITHER = "neither"
    TARGET = "target"
    INITIATOR = "initiator"
    BOTH = "both"

    @property
    def target(self) -> bool:
        """Whether the target computes."""
        return self in (Busy.TARGET, Busy.BOTH)

    @property
    def initiator(self) -> bool:
        """Whether the initiator computes."""
        return self in (Busy.INITIATOR, Busy.BOTH)


def parse_case(text: str) -> Case:
    """A case from `BLOCKxBATCH`, such as `16384x1000` or `16KiBx1000`. Raises UsageError."""
    block, _, batch = text.rpartition("x")
    try:
        case = Case(parse_size(block), int(batch))
    except (NotAllowed, ValueError):
        raise UsageError(f"{text!r} is no case: give BLOCKxBATCH, such as 4KiBx1000") from None
    if case.block < 1 or case.batch < 1:
        raise UsageError(f"{text!r} is no case: block and batch are at least 1")
    return case


@dataclass(frozen=True, slots=True)
class Work:
    """One thing to measure: the offsets of every block, uint64 (batch,), in the spans of both sides."""

    opcode: Opcode
    case: Case
    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]


def works(
    opcodes: tuple[Opcode, ...], cases: tuple[Case, ...], span: int, seed: int
) -> Iterator[Work]:
    """What to measure, in order. The same seed gives the same offsets, and peerbench's for SPAN and SEED."""
    random = np.random.default_rng(seed)
    for opcode in opcodes:
        for case in cases:
            slots = case.slots(span)
            local = random.permutation(slots)[: case.batch] * case.block
            remote = random.permutation(slots)[: case.batch] * case.block
            yield Work(opcode, case, local.astype(np.uint64), remote.astype(np.uint64))
