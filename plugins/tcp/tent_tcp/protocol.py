"""The wire format: what travels over a stream, packed and strictly parsed. Pure functions; all little-endian.

Initiator to receiver:

    hello      once: HELLO_SIZE bytes, then the initiator's segment name and the stream's identity, which is
               random: by it the initiator can ask, through the control plane, that the stream be stopped
    request    REQUEST_SIZE bytes, then a row of ROW_SIZE bytes for each block, then for WRITE the payload

Receiver to initiator:

    answer     ANSWER_SIZE bytes and an explanation: the verdict on a hello, a WRITE, or a refused READ
    READ       an answer that says OK (the lead), the payload, and another answer, which is the verdict

What an initiator sends is taken by a process of its peer that trusts nobody; what it answers is checked here
as well. Neither side ever makes room for more than the limits below because a number in a message says so.
"""

from __future__ import annotations

import enum
import hmac
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

VERSION = 2
"""Version of everything in this module. It stands in the hello and in the segment's attribute."""

SECRET_SIZE = 32
INCARNATION_SIZE = 16
STREAM_SIZE = 16
"""Bytes of the identity of a stream."""
MAX_NAME = 512
MAX_HOST = 255
MAX_TEXT = 512
MAX_REQUESTS = 1024
"""Blocks in one message: as many as one recvmsg(2) takes. Larger batches are several messages."""
MAX_TOTAL = 1 << 48
"""Bytes in one message; as no address space is larger, a valid sum of lengths cannot overflow."""

_HELLO = struct.Struct("<8sHHI16s32s")
_HELLO_MAGIC = b"TENT/TCP"
_WORDS = struct.Struct("<4Q")
_REQUEST = struct.Struct("<8Q")
_REQUEST_MAGIC = 0x52544E54  # "TNTR"
_ANSWER_MAGIC = 0x41544E54  # "TNTA"
_SAME_MACHINE = 1
_OK = _ANSWER_MAGIC  # and the verdict is 0, and no text follows

_FENCE = struct.Struct("<8sHI16s")
_FENCE_MAGIC = b"TENT/TCF"
_MAX_MILLISECONDS = 60_000
STOPPED = b"stopped"
"""The answer to a fence: nothing that was sent on that stream is or will be written any more."""

HELLO_SIZE = _HELLO.size
HEAD_SIZE = _WORDS.size
ROW_SIZE = _WORDS.size
REQUEST_SIZE = _REQUEST.size
"""The head of a request and its first row: the shortest request, and what a receiver reads first."""
ANSWER_SIZE = _WORDS.size

READ, WRITE = 0, 1
"""The directions, with the numbers of `types.Opcode`."""

Rows = NDArray[np.uint64]
"""Shape (n, 4): buffer id, generation, address in the owner's address space, length."""

Columns = NDArray[np.uint64]
"""The same transposed, shape (4, n), C-contiguous."""

_WIRE = np.dtype("<u8")


class Malformed(ValueError):
    """Bytes that no version of this protocol sends. The stream they came from is of no more use."""


class Verdict(enum.IntEnum):
    """What a receiver says of a message. What is not OK may not have moved, or only in part."""

    OK = 0
    UNKNOWN_BUFFER = 1
    STALE_BUFFER = 2
    REVOKED = 3
    DENIED = 4
    OUT_OF_RANGE = 5
    FAILED = 6


class Hello(NamedTuple):
    """Who opens a stream. The secret is that of the receiver's attribute, the identity only a claim."""

    secret: bytes
    incarnation: bytes
    same_machine: bool
    name_size: int


class Request(NamedTuple):
    """The head of a request and its first row, which every request has."""

    opcode: int
    blocks: int
    number: int
    total: int
    row: tuple[int, int, int, int]


class Answer(NamedTuple):
    """`position`: the first block refused; `moved`: bytes; `text_size`: bytes of text that follow."""

    verdict: Verdict
    position: int
    number: int
    moved: int
    text_size: int


class Attribute(NamedTuple):
    """Where the receiver of a segment listens, and the secret that opens it."""

    secret: bytes
    address: str

    def encode(self) -> bytes:
        """The attribute as it is published."""
        return bytes([VERSION]) + self.secret + self.address.encode()

    @classmethod
    def decode(cls, payload: bytes) -> Attribute:
        """The attribute in `payload`. Raises Malformed."""
        if not payload or payload[0] != VERSION:
            found = f"version {payload[0]}" if payload else "nothing"
            raise Malformed(f"attribute: found {found}, this side speaks version {VERSION}")
        secret, address = payload[1 : 1 + SECRET_SIZE], payload[1 + SECRET_SIZE :]
        if len(secret) != SECRET_SIZE or not 0 < len(address) <= MAX_HOST + 16:
            raise Malformed(f"attribute of {len(payload)} bytes: secret and address were expected")
        try:
            return cls(secret, address.decode())
        except UnicodeDecodeError:
            raise Malformed("attribute: the address is no text") from None


def pack_hello(
    secret: bytes, name: str, incarnation: bytes, same_machine: bool, stream: bytes
) -> bytes:
    """A hello. Raises ValueError for a name that no receiver would take."""
    encoded = name.encode()
    sizes = (len(encoded), len(incarnation), len(stream))
    if not 0 < sizes[0] <= MAX_NAME or sizes[1:] != (INCARNATION_SIZE, STREAM_SIZE):
        raise ValueError("name of {}, incarnation of {}, stream of {} bytes".format(*sizes))
    flags = _SAME_MACHINE if same_machine else 0
    head = _HELLO.pack(_HELLO_MAGIC, VERSION, len(encoded), flags, incarnation, secret)
    return head + encoded + stream


def parse_hello(data: bytes) -> Hello:
    """The first HELLO_SIZE bytes of a stream; `name_size` + STREAM_SIZE bytes follow. Raises Malformed."""
    magic, version, name_size, flags, incarnation, secret = _HELLO.unpack(data)
    if magic != _HELLO_MAGIC:
        raise Malformed("the first bytes are no hello")
    if version != VERSION:
        raise Malformed(f"a hello of version {version}, this side speaks {VERSION}")
    if not 0 < name_size <= MAX_NAME or flags & ~_SAME_MACHINE:
        raise Malformed(f"a hello with a name of {name_size} bytes and flags {flags:#x}")
    return Hello(secret, incarnation, bool(flags & _SAME_MACHINE), name_size)


def pack_fence(stream: bytes, seconds: float) -> bytes:
    """What an initiator asks through the control plane: stop that stream, within so many seconds."""
    milliseconds = min(max(round(seconds * 1e3), 0), _MAX_MILLISECONDS)
    return _FENCE.pack(_FENCE_MAGIC, VERSION, milliseconds, stream)


def parse_fence(payload: bytes) -> tuple[bytes, float]:
    """The stream that is to be stopped, and within how many seconds. Raises Malformed."""
    if len(payload) != _FENCE.size:
        raise Malformed(f"{len(payload)} bytes, {_FENCE.size} were expected")
    magic, version, milliseconds, stream = _FENCE.unpack(payload)
    if magic != _FENCE_MAGIC or version != VERSION:
        raise Malformed(f"no request to stop a stream, in version {VERSION}, starts like this")
    if milliseconds > _MAX_MILLISECONDS:
        raise Malformed(f"{milliseconds} ms, at most {_MAX_MILLISECONDS} are allowed")
    return stream, milliseconds / 1e3


def secrets_match(one: bytes, other: bytes) -> bool:
    """Whether two secrets are equal, in a time that says nothing of where they differ."""
    return hmac.compare_digest(one, other)


def request_words(opcode: int, number: int, row: tuple[int, int, int, int]) -> tuple[int, ...]:
    """A request of one block, as 64-bit numbers."""
    return (_REQUEST_MAGIC | opcode << 32, 1, number, row[3], *row)


def build_request(
    opcode: int,
    number: int,
    total: int,
    ids: NDArray[np.int32],
    generations: int | NDArray[np.uint64],
    remote: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """A request of n blocks as a (n + 1, 4) array, the head its first row. `remote`: (n, 2), address, length.

    `ids` and `generations` are by block; one generation may do for all of them.
    """
    message = np.empty((len(remote) + 1, 4), _WIRE)
    message[0] = (_REQUEST_MAGIC | opcode << 32, len(remote), number, total)
    message[1:, 0] = ids
    message[1:, 1] = generations
    message[1:, 2:] = remote
    return message


def parse_request(data: bytes | bytearray | memoryview) -> Request:
    """The first REQUEST_SIZE bytes of a request; `blocks` - 1 rows follow. Raises Malformed."""
    kind, blocks, number, total, buffer, generation, address, length = _REQUEST.unpack(data)
    opcode = kind >> 32
    if kind & 0xFFFFFFFF != _REQUEST_MAGIC or opcode > WRITE:
        raise Malformed(f"no request starts with {kind:#x}")
    if not 0 < blocks <= MAX_REQUESTS:
        raise Malformed(f"a request of {blocks} blocks, 1 to {MAX_REQUESTS} are allowed")
    if not 0 < total <= MAX_TOTAL:
        raise Malformed(f"a request of {total} bytes, 1 to {MAX_TOTAL} are allowed")
    if blocks == 1 and length != total:
        raise Malformed(f"a request of {total} bytes whose only block has {length}")
    return Request(opcode, blocks, number, total, (buffer, generation, address, length))


def check_lengths(lengths: NDArray[np.uint64], total: int) -> None:
    """That no block is empty and that they are `total` bytes together. Raises Malformed.

    `total` is at most MAX_TOTAL and there are at most MAX_REQUESTS lengths, so the sum cannot wrap once
    each of them is at most `total`.
    """
    if int(lengths.min()) == 0 or int(lengths.max()) > total or int(lengths.sum()) != total:
        raise Malformed(f"the blocks are not {total} bytes together, or some are empty")


def pack_ok(number: int, moved: int) -> bytes:
    """The answer to a message of which all went well, as `pack_answer` packs it, in a third of the time."""
    return _WORDS.pack(_OK, 0, number, moved)


def pack_answer(
    verdict: Verdict, number: int, *, moved: int = 0, position: int = 0, text: str = ""
) -> bytes:
    """An answer, with its explanation cut to MAX_TEXT bytes."""
    explanation = text.encode()[:MAX_TEXT]
    kind = _ANSWER_MAGIC | verdict << 32 | len(explanation) << 48
    return _WORDS.pack(kind, position, number, moved) + explanation


def parse_answer(data: bytes | bytearray | memoryview) -> Answer:
    """ANSWER_SIZE bytes of a receiver; `text_size` bytes of explanation follow. Raises Malformed."""
    kind, position, number, moved = _WORDS.unpack(data)
    verdict, text_size = kind >> 32 & 0xFFFF, kind >> 48
    if kind & 0xFFFFFFFF != _ANSWER_MAGIC or verdict > Verdict.FAILED:
        raise Malformed(f"no answer starts with {kind:#x}")
    if verdict == Verdict.OK and text_size:
        raise Malformed(f"an answer that says OK and has {text_size} bytes of explanation")
    if text_size > MAX_TEXT or position >= MAX_REQUESTS or moved > MAX_TOTAL:
        raise Malformed(
            f"an answer with {text_size} bytes of text, position {position}, {moved} bytes moved"
        )
    return Answer(Verdict(verdict), position, number, moved, text_size)
