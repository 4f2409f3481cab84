"""Descriptors to and from the wire: snapshots of any size, deltas, and checks of what comes in."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import TypeVar, cast

import numpy as np
from google.protobuf.message import DecodeError

from tent_core import address
from tent_core.control import tent_pb2 as pb
from tent_core.control.contract import RANGES_LIMIT, Checksum
from tent_core.descriptor import (
    Attribute,
    BufferDescriptor,
    Device,
    HostIdentity,
    PeerKey,
    SegmentDescriptor,
)
from tent_core.types import BufferState, Permission

INCARNATION_BYTES = 16
LARGEST_BUFFER_ID = (1 << 31) - 1
"""Buffer ids travel in int32 columns."""

PART_BYTES = 16 << 10
"""A part is closed when it has grown to this: what one step of the loop converts, about a millisecond."""

FRAGMENT_BYTES = 512 << 10
"""Well under the 4 MiB that gRPC takes in one message."""

PART_LIMIT = 64 << 20
"""The largest part that is accepted: one buffer with all its attributes has to fit."""

UPDATE_LIMIT = 1 << 30
"""The largest snapshot or delta that is accepted, in bytes."""

_ADDRESS_SPACE = 1 << 64
_NO_ATTRIBUTES: Mapping[str, Attribute] = MappingProxyType({})

E = TypeVar("E", bound=enum.IntEnum)


class WireError(ValueError):
    """A message from outside that is not what the contract says; the text says where."""


@lru_cache(maxsize=256)
def kept(kind: type[E], number: int) -> E:
    """The member of `kind` with this number, or, for one that this version does not know, a stand-in.

    A stand-in shows itself as `UNKNOWN_<number>`, equals no member, and goes out as the number it came in.
    """
    try:
        return kind(number)
    except ValueError:
        unknown = int.__new__(kind, number)
        unknown._name_ = f"UNKNOWN_{number}"
        unknown._value_ = number
        return unknown


def fragments(base: SegmentDescriptor | None, new: SegmentDescriptor) -> Iterator[pb.Fragment]:
    """What a holder of `base` (None: of nothing) needs for `new`, one fragment at a time."""
    parts = _snapshot(new) if base is None else _delta(base, new)
    part: pb.SegmentPart | None = next(parts)
    while part is not None:
        following = next(parts, None)
        data = part.SerializeToString()
        for start in range(0, max(1, len(data)), FRAGMENT_BYTES):
            piece = data[start : start + FRAGMENT_BYTES]
            last = start + FRAGMENT_BYTES >= len(data)
            yield pb.Fragment(
                version=new.version,
                delta=base is not None,
                base=0 if base is None else base.version,
                data=piece,
                ends_part=last,
                ends_update=last and following is None,
            )
        part = following


class Updates:
    """Makes fragments for the many peers of one segment: a delta that fits in one is made once for all."""

    def __init__(self) -> None:
        self._to = -1
        self._made: dict[int, pb.Fragment] = {}

    def fragments(
        self, base: SegmentDescriptor | None, new: SegmentDescriptor
    ) -> Iterator[pb.Fragment]:
        """As `fragments`, for snapshots of one segment only."""
        if base is None:
            return fragments(None, new)
        if self._to != new.version:
            self._to = new.version
            self._made.clear()
        made = self._made.get(base.version)
        if made is not None:
            return iter((made,))
        rest = fragments(base, new)
        first = next(rest)
        if first.ends_update:
            self._made[base.version] = first
        return chain((first,), rest)


class Assembler:
    """Puts the fragments that one peer sends back together, update by update. Everything is checked.

    After a WireError it is of no more use: the stream that it reads cannot be trusted.
    """

    def __init__(self, key: PeerKey) -> None:
        self._key = key
        self._update: _Update | None = None

    def feed(
        self, fragment: pb.Fragment, base: SegmentDescriptor | None
    ) -> SegmentDescriptor | None:
        """Take the next fragment; `base` is the snapshot held, to which a delta must apply.

        Returns the new snapshot when `fragment` completes it. Raises WireError.
        """
        if self._update is None:
            self._update = _Update(self._key, fragment, base)
        new = self._update.feed(fragment)
        if new is not None:
            self._update = None
        return new


class _Update:
    """One snapshot or delta on its way in."""

    def __init__(self, key: PeerKey, first: pb.Fragment, base: SegmentDescriptor | None) -> None:
        self._key = key
        self._version = first.version
        self._delta = first.delta
        self._base = first.base
        self._pending = bytearray()
        self._total = 0
        self._head: SegmentDescriptor | None = None
        self._buffers: dict[int, BufferDescriptor] = {}
        self._seen: set[int] = set()
        self._texts: dict[str, str] = {}
        if first.delta:
            if base is None or base.version != first.base:
                held = "nothing" if base is None else f"version {base.version}"
                raise WireError(f"a delta of version {first.base}, where {held} is held")
            if first.version <= first.base:
                raise WireError(f"a delta from version {first.base} back to {first.version}")
            self._head = base
            self._buffers = dict(base.buffers)

    def feed(self, fragment: pb.Fragment) -> SegmentDescriptor | None:
        if (fragment.version, fragment.delta, fragment.base) != (
            self._version,
            self._delta,
            self._base,
        ):
            raise WireError(
                f"a fragment of version {fragment.version} amid those of version {self._version}"
            )
        self._total += len(fragment.data)
        self._pending += fragment.data
        if len(self._pending) > PART_LIMIT or self._total > UPDATE_LIMIT:
            raise WireError(f"an update beyond {PART_LIMIT} bytes a part or {UPDATE_LIMIT} in all")
        if fragment.ends_part:
            self._apply(_part_from(bytes(self._pending)))
            self._pending.clear()
        if not fragment.ends_update:
            return None
        if self._pending:
            raise WireError("an update that ends in the middle of a part")
        if self._head is None:
            raise WireError("a snapshot without its head")
        head = self._head
        return SegmentDescriptor(
            name=head.name,
            incarnation=head.incarnation,
            version=self._version,
            host=head.host,
            transports=head.transports,
            attributes=head.attributes,
            devices=head.devices,
            buffers=MappingProxyType(self._buffers),
        )

    def _apply(self, part: pb.SegmentPart) -> None:
        if part.HasField("head"):
            self._head = _head_from(part.head, self._version)
            if self._head.key != self._key:
                raise WireError(
                    f"the segment of {self._head.key}, where that of {self._key} was expected"
                )
        if part.removed and not self._delta:
            raise WireError("a snapshot that removes buffers")
        for number in part.removed:
            if self._buffers.pop(number, None) is None:
                raise WireError(f"a delta that removes buffer {number}, which was not there")
        for message in part.buffers:
            if message.id in self._seen:
                raise WireError(f"buffer {message.id} twice in one update")
            self._seen.add(message.id)
            self._buffers[message.id] = buffer_from(message, self._texts)


def _snapshot(new: SegmentDescriptor) -> Iterator[pb.SegmentPart]:
    return _parts(_head_to(new), (), new.buffers.values())


def _delta(old: SegmentDescriptor, new: SegmentDescriptor) -> Iterator[pb.SegmentPart]:
    before = old.buffers
    changed = [b for i, b in new.buffers.items() if (was := before.get(i)) is not b and was != b]
    removed = [i for i in before if i not in new.buffers]
    same_head = (old.key, old.host, old.transports, old.attributes, old.devices) == (
        new.key,
        new.host,
        new.transports,
        new.attributes,
        new.devices,
    )
    return _parts(None if same_head else _head_to(new), removed, changed)


def _parts(
    head: pb.SegmentHead | None, removed: Iterable[int], buffers: Iterable[BufferDescriptor]
) -> Iterator[pb.SegmentPart]:
    part = pb.SegmentPart(head=head, removed=removed)
    size = part.ByteSize()
    for buffer in buffers:
        if size >= PART_BYTES:
            yield part
            part, size = pb.SegmentPart(), 0
        message = buffer_to(buffer)
        size += message.ByteSize()
        part.buffers.append(message)
    yield part


def buffer_to(buffer: BufferDescriptor) -> pb.Buffer:
    """The message of one buffer."""
    return pb.Buffer(
        id=buffer.id,
        generation=buffer.generation,
        name=buffer.name,
        address=buffer.address,
        length=buffer.length,
        location=buffer.location,
        permission=cast(pb.Permission, int(buffer.permission)),
        state=cast(pb.BufferState, int(buffer.state)),
        attributes=_attributes_to(buffer.attributes),
    )


def buffer_from(message: pb.Buffer, texts: dict[str, str] | None = None) -> BufferDescriptor:
    """The buffer that a message describes; equal texts in `texts` are kept once. Raises WireError."""
    texts = {} if texts is None else texts
    if message.id > LARGEST_BUFFER_ID:
        raise WireError(f"buffer id {message.id}, beyond {LARGEST_BUFFER_ID}")
    if message.address + message.length >= _ADDRESS_SPACE:
        raise WireError(
            f"buffer {message.id} of {message.length} bytes at {message.address:#x}, past the end of memory"
        )
    return BufferDescriptor(
        id=message.id,
        generation=message.generation,
        name=message.name,
        address=message.address,
        length=message.length,
        location=texts.setdefault(message.location, message.location),
        permission=kept(Permission, message.permission),
        state=kept(BufferState, message.state),
        attributes=_attributes_from(message.attributes, texts),
    )


def checksum_to(checksum: Checksum) -> pb.Checksum:
    """A checksum of ranges as it travels."""
    return pb.Checksum(
        buffer=checksum.buffer,
        generation=checksum.generation,
        offsets=checksum.offsets.tolist(),
        lengths=checksum.lengths.tolist(),
        crc32c=checksum.value,
    )


def check_checksums(messages: Sequence[pb.Checksum]) -> None:
    """Raise WireError unless each range has a length and there are at most RANGES_LIMIT in all."""
    ranges = 0
    for message in messages:
        if len(message.offsets) != len(message.lengths) or not message.offsets:
            raise WireError(
                f"a checksum of {len(message.offsets)} offsets and {len(message.lengths)} lengths"
            )
        ranges += len(message.offsets)
    if ranges > RANGES_LIMIT:
        raise WireError(f"checksums of {ranges} ranges, beyond {RANGES_LIMIT}")


def checksums_from(messages: Sequence[pb.Checksum]) -> list[Checksum]:
    """Those that a notification carries. Whether the ranges exist is for whoever compares."""
    check_checksums(messages)
    return [
        Checksum(
            message.buffer,
            message.generation,
            np.array(message.offsets, np.uint64),
            np.array(message.lengths, np.uint64),
            message.crc32c,
        )
        for message in messages
    ]


def host_to(host: HostIdentity) -> pb.Host:
    """The message of an identity."""
    return pb.Host(
        boot_id=host.boot_id,
        pid_namespace=host.pid_namespace,
        pid=host.pid,
        start_time=host.start_time,
    )


def host_from(message: pb.Host) -> HostIdentity:
    """The identity that a message names."""
    return HostIdentity(message.boot_id, message.pid_namespace, message.pid, message.start_time)


def key_from(name: str, incarnation: bytes) -> PeerKey:
    """The identity of an engine, checked. Raises WireError."""
    try:
        parsed = address.parse(name)
    except address.AddressError as error:
        raise WireError(f"a segment name that is none: {error}") from None
    if parsed.port == 0 or address.is_wildcard(parsed.host):
        raise WireError(f"the segment name {name!r}, which nobody can reach")
    if len(incarnation) != INCARNATION_BYTES:
        raise WireError(
            f"an incarnation of {len(incarnation)} bytes instead of {INCARNATION_BYTES}"
        )
    return PeerKey(name, incarnation)


def transports_to(transports: Mapping[str, int]) -> list[pb.Transport]:
    """The messages of the transports that run in an engine."""
    return [
        pb.Transport(name=name, number=transport_type(number))
        for name, number in transports.items()
    ]


def transports_from(messages: Iterable[pb.Transport]) -> Mapping[str, int]:
    """The transports that run in an engine: name to number, whether known here or not. Raises WireError."""
    found: dict[str, int] = {}
    for message in messages:
        if not message.name or message.name in found or message.number < 0:
            raise WireError(
                f"transport {message.name!r}, {message.number}: unnamed, twice or negative"
            )
        found[message.name] = int(message.number)
    return MappingProxyType(found)


def _part_from(data: bytes) -> pb.SegmentPart:
    try:
        return pb.SegmentPart.FromString(data)
    except (DecodeError, UnicodeDecodeError) as error:  # the pure-Python runtime raises the latter
        raise WireError(f"bytes that are no part of a segment: {error}") from None


def transport_type(number: int) -> pb.TransportType:
    """A transport's number as a field takes it: enums of proto3 are open, so any number travels."""
    return cast(pb.TransportType, number)


def _head_to(segment: SegmentDescriptor) -> pb.SegmentHead:
    return pb.SegmentHead(
        name=segment.name,
        incarnation=segment.incarnation,
        host=host_to(segment.host),
        transports=transports_to(segment.transports),
        attributes=_attributes_to(segment.attributes),
        devices=[
            pb.Device(name=d.name, numa_node=d.numa_node, kind=d.kind) for d in segment.devices
        ],
    )


def _head_from(message: pb.SegmentHead, version: int) -> SegmentDescriptor:
    key = key_from(message.name, message.incarnation)
    return SegmentDescriptor(
        name=key.name,
        incarnation=key.incarnation,
        version=version,
        host=host_from(message.host),
        transports=transports_from(message.transports),
        attributes=_attributes_from(message.attributes, {}),
        devices=tuple(Device(d.name, d.numa_node, d.kind) for d in message.devices),
    )


def _attributes_to(attributes: Mapping[str, Attribute]) -> list[pb.Attribute]:
    return [
        pb.Attribute(name=a.name, number=transport_type(a.number), payload=a.payload)
        for a in attributes.values()
    ]


def _attributes_from(
    messages: Iterable[pb.Attribute], texts: dict[str, str]
) -> Mapping[str, Attribute]:
    if not messages:
        return _NO_ATTRIBUTES
    found: dict[str, Attribute] = {}
    for message in messages:
        name = texts.setdefault(message.name, message.name)
        if not name or name in found or message.number < 0:
            raise WireError(f"attribute {name!r}, {message.number}: unnamed, twice or negative")
        found[name] = Attribute(int(message.number), name, message.payload)
    return MappingProxyType(found)
