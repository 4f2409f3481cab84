"""Messages in slots of one contiguous buffer: where each slot is, and how a message lies in it.

Both sides, senders and receivers, read and write slots by this module alone, so that neighbours cannot mix:
nothing outside [offset, offset + SLOT_BYTES) of the slot is touched, a payload that does not fit is refused
before a byte is written, and decoding looks at no byte beyond what the completion says has arrived, whatever
the slot held before.

A message is a header of 24 bytes, little-endian, and the payload:

    0   4   magic "TENn"
    4   1   version, 1
    5   1   kind
    6   2   0
    8   8   id, which an answer repeats
    16  4   bytes of payload
    20  4   CRC-32 (that of zlib) of the 20 bytes before and of the payload
"""

from __future__ import annotations

import enum
import mmap
import struct
import zlib
from typing import NamedTuple

import numpy as np

from tent_core.errors import TransportError

SLOTS = 256
SLOT_BYTES = 64 << 10

_HEADER = struct.Struct("<4sBBHQI")
_CHECK = struct.Struct("<I")
_MAGIC, _VERSION = b"TENn", 1
HEADER_BYTES = _HEADER.size + _CHECK.size
PAYLOAD_LIMIT = SLOT_BYTES - HEADER_BYTES


class Malformed(TransportError):
    """What arrived in a slot is no message."""


class Oversized(TransportError):
    """A payload does not fit into a slot."""


class Kind(enum.IntEnum):
    """What a message is."""

    REQUEST = 1
    ANSWER = 2
    REFUSAL = 3
    """An answer whose payload says in words why there is none."""


class Message(NamedTuple):
    """A message out of a slot; the payload is a copy."""

    kind: Kind
    id: int
    payload: bytes


class Slots:
    """`count` slots of SLOT_BYTES in memory of their own, on pages that a forked child does not get.

    Not thread-safe for one and the same slot: its owner gives each slot to one user at a time.
    """

    def __init__(self, count: int = SLOTS) -> None:
        """Raises OSError when there is no memory."""
        self.count = count
        self._memory = mmap.mmap(-1, count * SLOT_BYTES)
        self._memory.madvise(mmap.MADV_DONTFORK)
        # The address is read from an array that is gone right away: one that stays would keep the memory.
        self.start: int = np.frombuffer(self._memory, np.uint8).ctypes.data
        self.length = count * SLOT_BYTES

    def offset(self, slot: int) -> int:
        """Where `slot` begins, in bytes from the start. Raises IndexError for what is none."""
        if not 0 <= slot < self.count:
            raise IndexError(f"slot {slot} of {self.count}")
        return slot * SLOT_BYTES

    def address(self, slot: int) -> int:
        """Where `slot` begins in memory."""
        return self.start + self.offset(slot)

    def encode(self, slot: int, kind: Kind, id: int, payload: bytes) -> int:
        """Write a message into `slot`; its bytes, header included. Raises Oversized with nothing written."""
        begin = self.offset(slot)
        length = len(payload)
        if length > PAYLOAD_LIMIT:
            raise Oversized(
                f"a message of {length} bytes does not fit into a slot: {PAYLOAD_LIMIT} are the most"
            )
        head = _HEADER.pack(_MAGIC, _VERSION, kind, 0, id, length)
        check = _CHECK.pack(zlib.crc32(payload, zlib.crc32(head)))
        end = begin + HEADER_BYTES + length
        self._memory[begin:end] = b"".join((head, check, payload))
        return end - begin

    def decode(self, slot: int, length: int) -> Message:
        """The message in `slot`, of which `length` bytes have arrived. Raises Malformed."""
        begin = self.offset(slot)
        if not HEADER_BYTES <= length <= SLOT_BYTES:
            raise Malformed(
                f"{length} bytes in slot {slot}, where a message has {HEADER_BYTES} or more"
            )
        arrived = self._memory[begin : begin + length]
        magic, version, kind, _, id, size = _HEADER.unpack_from(arrived)
        if magic != _MAGIC or version != _VERSION:
            raise Malformed(f"no message of version {_VERSION} in slot {slot}: {arrived[:6]!r}")
        if size != length - HEADER_BYTES:
            raise Malformed(
                f"a message that says {size} bytes in slot {slot}, and {length - HEADER_BYTES} arrived"
            )
        payload = arrived[HEADER_BYTES:]
        (check,) = _CHECK.unpack_from(arrived, _HEADER.size)
        if check != zlib.crc32(payload, zlib.crc32(arrived[: _HEADER.size])):
            raise Malformed(f"a message with a wrong checksum in slot {slot}")
        try:
            return Message(Kind(kind), id, payload)
        except ValueError:
            raise Malformed(f"a message of the unknown kind {kind} in slot {slot}") from None

    def close(self) -> None:
        """Unmap. Only when no device can write to it any more. Idempotent."""
        self._memory.close()
