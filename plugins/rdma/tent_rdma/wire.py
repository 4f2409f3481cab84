"""What engines tell each other of RDMA: attributes in their descriptors, and bootstrap messages.

JSON, checked by the models here, since it comes from outside; unknown fields are ignored, so that a newer
peer may say more. Nothing of it is on the data path: keys are read once for each buffer and snapshot.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from tent_core.errors import TransportError

MAX_NICS = 64
MAX_QUEUE_PAIRS = 64
_U24 = Annotated[int, Field(ge=0, lt=1 << 24)]
_U32 = Annotated[int, Field(ge=0, lt=1 << 32)]
_U64 = Annotated[int, Field(ge=0, lt=1 << 64)]
Gid = Annotated[str, Field(pattern=r"^[0-9a-f]{4}(:[0-9a-f]{4}){7}$")]


class Malformed(TransportError):
    """Bytes from a peer that are no message of this transport."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    def encode(self) -> bytes:
        """The bytes to send or publish."""
        return self.model_dump_json().encode()


class NicAddress(_Message):
    """A NIC as peers must know it: by name, where its packets go, and what it can do."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    gid: Gid
    lid: Annotated[int, Field(ge=0, lt=1 << 16)] = 0
    link_layer: Annotated[str, Field(max_length=64)]
    mtu: Annotated[int, Field(ge=256, le=4096)]
    reads: Annotated[int, Field(ge=0, le=255)]
    numa_node: Annotated[int, Field(ge=-1, lt=1 << 16)] = -1


class SegmentAttribute(_Message):
    """Published once: the NICs of an engine, in the order in which each buffer's keys are."""

    nics: Annotated[list[NicAddress], Field(min_length=1, max_length=MAX_NICS)]


class BufferAttribute(_Message):
    """Published for a buffer: `rkeys[nic][chunk]`, where a chunk is `chunk` bytes from the buffer's start."""

    chunk: Annotated[int, Field(ge=1, lt=1 << 64)]
    rkeys: Annotated[list[list[_U32]], Field(max_length=MAX_NICS)]


class Ready(_Message):
    """One end of a queue pair: its number and its first packet sequence number."""

    number: _U24
    psn: _U24


class Open(_Message):
    """An initiator asks for the other end of a connection."""

    kind: Literal["open"] = "open"
    connection: _U64
    nic: Annotated[int, Field(ge=0, lt=MAX_NICS)]
    """Which of the receiver's NICs, by its place in the receiver's attribute."""
    sender: NicAddress
    service_level: Annotated[int, Field(ge=0, le=15)] = 0
    traffic_class: Annotated[int, Field(ge=0, le=255)] = 0
    queue_pairs: Annotated[list[Ready], Field(min_length=1, max_length=MAX_QUEUE_PAIRS)]


class Opened(_Message):
    """The answer to `Open`: the other ends, in order."""

    queue_pairs: Annotated[list[Ready], Field(min_length=1, max_length=MAX_QUEUE_PAIRS)]


class Close(_Message):
    """An initiator has let go of connections. Answered when their other ends are destroyed."""

    kind: Literal["close"] = "close"
    connections: Annotated[list[_U64], Field(max_length=4096)]


class Closed(_Message):
    """The answer to `Close`: nothing that was sent on those connections can be written any more."""


class OpenNotices(_Message):
    """A peer that is about to send its first notification asks for the other end of a queue pair for them."""

    kind: Literal["open_notices"] = "open_notices"
    nic: Annotated[int, Field(ge=0, lt=MAX_NICS)]
    """Which of the receiver's NICs, by its place in the receiver's attribute."""
    sender: NicAddress
    queue_pair: Ready


class OpenedNotices(_Message):
    """The answer to `OpenNotices`: the receiver's slots are posted."""

    queue_pair: Ready


Asked = Annotated[Open | Close | OpenNotices, Field(discriminator="kind")]
_asked: TypeAdapter[Open | Close | OpenNotices] = TypeAdapter(Asked)
M = TypeVar("M", bound=_Message)


def asked(payload: bytes) -> Open | Close | OpenNotices:
    """A bootstrap message from a peer. Raises Malformed."""
    try:
        return _asked.validate_json(payload)
    except ValidationError as error:
        raise Malformed(f"no bootstrap message of rdma: {_first(error)}") from None


def decode(kind: type[M], payload: bytes) -> M:
    """An attribute or an answer of that kind. Raises Malformed."""
    try:
        return kind.model_validate_json(payload)
    except ValidationError as error:
        raise Malformed(f"no {kind.__name__} of rdma: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    worst = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, worst["loc"]))
    return f"{worst['msg']}" + (f" (at {where})" if where else "")
