"""Descriptors cross the wire whole, as deltas too, and nothing malformed becomes one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType

import pytest
from control_harness import buffer
from hypothesis import given, settings
from hypothesis import strategies as st

from tent_core.control import tent_pb2 as pb
from tent_core.control import wire
from tent_core.control.wire import WireError
from tent_core.descriptor import (
    Attribute,
    BufferDescriptor,
    Device,
    HostIdentity,
    SegmentDescriptor,
)
from tent_core.types import BufferState, Permission

relaxed = settings(deadline=None)  # a busy machine is no failure
u64 = st.integers(0, 2**64 - 1)
text = st.text(max_size=20)
attributes = st.dictionaries(
    st.text(min_size=1, max_size=10),
    st.tuples(st.integers(0, 2**31 - 1), st.binary(max_size=64)),
    max_size=4,
).map(lambda d: MappingProxyType({n: Attribute(i, n, p) for n, (i, p) in d.items()}))


@st.composite
def buffers(draw: st.DrawFn, number: int) -> BufferDescriptor:
    address = draw(u64)
    return BufferDescriptor(
        id=number,
        generation=draw(u64),
        name=draw(text),
        address=address,
        length=draw(st.integers(0, 2**64 - 1 - address)),
        location=draw(text),
        permission=draw(st.sampled_from(Permission)),
        state=draw(st.sampled_from(BufferState)),
        attributes=draw(attributes),
    )


tables = (
    st.sets(st.integers(0, 2**31 - 1), max_size=5)
    .flatmap(lambda ids: st.tuples(*(buffers(i) for i in ids)))
    .map(lambda found: MappingProxyType({b.id: b for b in found}))
)
hosts = st.builds(HostIdentity, text, u64, u64, u64)
transports = st.dictionaries(st.text(min_size=1, max_size=9), st.integers(0, 2**31 - 1), max_size=4)
devices = st.lists(st.builds(Device, text, st.integers(-1, 2**31 - 1), text), max_size=3).map(tuple)


def segments(version: int) -> st.SearchStrategy[SegmentDescriptor]:
    return st.builds(
        SegmentDescriptor,
        st.just("[::1]:7"),
        st.just(b"i" * 16),
        st.just(version),
        hosts,
        transports.map(MappingProxyType),
        attributes,
        devices,
        tables,
    )


PLAIN = SegmentDescriptor("h:1", b"i" * 16, 1, HostIdentity("b", 1, 2, 3))


def carried(base: SegmentDescriptor | None, new: SegmentDescriptor) -> SegmentDescriptor | None:
    assembler = wire.Assembler(new.key)
    result = None
    for fragment in wire.fragments(base, new):
        assert result is None
        result = assembler.feed(pb.Fragment.FromString(fragment.SerializeToString()), base)
    return result


@relaxed
@given(segments(3))
def test_a_snapshot_arrives_as_it_was(segment: SegmentDescriptor) -> None:
    assert carried(None, segment) == segment


@relaxed
@given(segments(3), segments(9))
def test_a_delta_makes_the_new_snapshot_of_the_old(
    old: SegmentDescriptor, new: SegmentDescriptor
) -> None:
    assert carried(old, new) == new


@relaxed
@given(segments(3), st.data())
def test_any_pieces_of_any_size_make_the_same_snapshot(
    segment: SegmentDescriptor, data: st.DataObject
) -> None:
    whole = list(wire.fragments(None, segment))
    assembler = wire.Assembler(segment.key)
    result = None
    for fragment in whole:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(fragment.data)), max_size=3)))
        edges = [0, *cuts, len(fragment.data)]
        for i, (start, stop) in enumerate(pairwise(edges)):
            last = i == len(edges) - 2
            piece = pb.Fragment(
                version=fragment.version,
                data=fragment.data[start:stop],
                ends_part=fragment.ends_part and last,
                ends_update=fragment.ends_update and last,
            )
            result = assembler.feed(piece, None)
    assert result == segment


def test_a_delta_carries_only_what_changed() -> None:
    old = replace(PLAIN, buffers=MappingProxyType({i: buffer(i) for i in range(10_000)}))
    table = {**old.buffers, 5: buffer(5, generation=2), 20_000: buffer(20_000)}
    del table[7]
    new = replace(old, version=2, buffers=MappingProxyType(table))
    (fragment,) = wire.fragments(old, new)
    part = pb.SegmentPart.FromString(fragment.data)
    assert [b.id for b in part.buffers] == [5, 20_000]
    assert list(part.removed) == [7]
    assert not part.HasField("head")


def test_an_attribute_larger_than_a_grpc_message_is_carried() -> None:
    big = Attribute(7, "tcp", bytes(9 << 20))
    segment = replace(PLAIN, attributes=MappingProxyType({"tcp": big}))
    pieces = list(wire.fragments(None, segment))
    assert max(len(p.SerializeToString()) for p in pieces) < 1 << 20
    assert carried(None, segment) == segment


def test_many_peers_share_a_delta_that_is_made_once() -> None:
    updates = wire.Updates()
    new = replace(PLAIN, version=2, buffers=MappingProxyType({1: buffer(1)}))
    (first,) = updates.fragments(PLAIN, new)
    (second,) = updates.fragments(PLAIN, new)
    assert first is second
    newer = replace(new, version=3)
    assert [f.version for f in updates.fragments(PLAIN, newer)] == [3]


def snapshot_fragment(part: pb.SegmentPart, **more: object) -> pb.Fragment:
    fields: dict[str, object] = {"version": 1, "ends_part": True, "ends_update": True, **more}
    return pb.Fragment(data=part.SerializeToString(), **fields)  # type: ignore[arg-type]


def head(name: str, incarnation: bytes) -> pb.SegmentPart:
    return pb.SegmentPart(head=pb.SegmentHead(name=name, incarnation=incarnation))


HEAD = pb.SegmentHead(name="h:1", incarnation=b"i" * 16)
MALFORMED = {
    "no head": snapshot_fragment(pb.SegmentPart()),
    "no segment name": snapshot_fragment(head("h", b"i" * 16)),
    "another segment": snapshot_fragment(head("h:2", b"i" * 16)),
    "short incarnation": snapshot_fragment(head("h:1", b"i")),
    "past the end of memory": snapshot_fragment(
        pb.SegmentPart(head=HEAD, buffers=[pb.Buffer(id=1, address=2**64 - 4096, length=4096)])
    ),
    "id beyond int32": snapshot_fragment(pb.SegmentPart(head=HEAD, buffers=[pb.Buffer(id=2**31)])),
    "buffer twice": snapshot_fragment(pb.SegmentPart(head=HEAD, buffers=[pb.Buffer(id=1), pb.Buffer(id=1)])),
    "snapshot that removes": snapshot_fragment(pb.SegmentPart(head=HEAD, removed=[1])),
    "negative transport": snapshot_fragment(
        pb.SegmentPart(head=pb.SegmentHead(name="h:1", incarnation=b"i" * 16,
                                           transports=[pb.Transport(name="x", number=-1)]))
    ),
    "attribute without a name": snapshot_fragment(
        pb.SegmentPart(head=HEAD, buffers=[pb.Buffer(id=1, attributes=[pb.Attribute(number=7)])])
    ),
    "no part": pb.Fragment(version=1, data=b"\xff\xff", ends_part=True, ends_update=True),
    "no utf-8": pb.Fragment(version=1, data=b"\x0a\x03\x0a\x01\xff", ends_part=True, ends_update=True),
    "ends within a part": pb.Fragment(version=1, data=b"\x0a", ends_update=True),
    "delta of nothing": pb.Fragment(version=2, delta=True, base=1, ends_part=True, ends_update=True),
}  # fmt: skip


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_update_is_refused(what: str) -> None:
    with pytest.raises(WireError):
        wire.Assembler(PLAIN.key).feed(MALFORMED[what], None)


@pytest.mark.parametrize(
    "fragment",
    [
        pb.Fragment(version=3, delta=True, base=2, ends_part=True, ends_update=True),
        pb.Fragment(version=1, delta=True, base=1, ends_part=True, ends_update=True),
        snapshot_fragment(pb.SegmentPart(removed=[9]), version=2, delta=True, base=1),
    ],
)
def test_a_delta_that_does_not_apply_is_refused(fragment: pb.Fragment) -> None:
    with pytest.raises(WireError):
        wire.Assembler(PLAIN.key).feed(fragment, PLAIN)


def test_fragments_of_two_versions_do_not_mix() -> None:
    assembler = wire.Assembler(PLAIN.key)
    assert assembler.feed(pb.Fragment(version=1, data=b""), None) is None
    with pytest.raises(WireError):
        assembler.feed(pb.Fragment(version=2, ends_part=True, ends_update=True), None)


def test_an_update_without_end_is_refused_before_it_fills_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "PART_LIMIT", 1000)
    assembler = wire.Assembler(PLAIN.key)
    for _ in range(10):
        assembler.feed(pb.Fragment(version=1, data=bytes(100)), None)
    with pytest.raises(WireError):
        assembler.feed(pb.Fragment(version=1, data=bytes(100)), None)


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=4), st.booleans())
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused_or_are_a_descriptor(pieces: list[bytes], end: bool) -> None:
    assembler = wire.Assembler(PLAIN.key)
    try:
        for piece in pieces:
            assembler.feed(
                pb.Fragment(version=1, data=piece, ends_part=True, ends_update=end), PLAIN
            )
    except WireError:
        pass


@pytest.mark.parametrize("name", ["", "h", "h:0", "0.0.0.0:1", "[::]:1", "::1:5"])
def test_a_name_that_nobody_can_reach_is_no_segment(name: str) -> None:
    with pytest.raises(WireError):
        wire.key_from(name, b"i" * 16)
