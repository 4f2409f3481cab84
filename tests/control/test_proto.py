"""The wire contract: its numbers by literal, its generated code by its generator."""

from __future__ import annotations

import enum
import subprocess
import sys
from pathlib import Path

import pytest

from tent_core import types
from tent_core.control import tent_pb2 as pb
from tent_core.control import wire
from tent_core.descriptor import Attribute
from tent_core.types import BufferState, Permission

ROOT = Path(__file__).parents[2]
GENERATED = ("tent_pb2.py", "tent_pb2.pyi", "tent_pb2_grpc.py")

NUMBERS = {
    "TransportType": (
        types.TransportType,
        "TRANSPORT_",
        ["UNSPEC", "RDMA", "MNNVL", "SHM", "NVLINK", "GDS", "IO_URING", "TCP", "ASCEND", "SUNRISE_LINK",
         "TPU", "UB", "MPCOMM"],
    ),
    "Status": (
        types.Status,
        "STATUS_",
        ["INITIAL", "PENDING", "INVALID", "CANCELED", "COMPLETED", "TIMEOUT", "FAILED"],
    ),
    "Priority": (types.Priority, "PRIORITY_", ["HIGH", "MEDIUM", "LOW"]),
    "Intent": (
        types.Intent,
        "INTENT_",
        ["UNSPEC", "FOREGROUND_GET", "BACKGROUND_PREFETCH", "MIGRATION", "CHECKPOINT", "WEIGHT_LOADING",
         "STAGING_INTERNAL"],
    ),
    "Permission": (
        types.Permission,
        "PERMISSION_",
        ["LOCAL_READ_WRITE", "GLOBAL_READ_ONLY", "GLOBAL_READ_WRITE"],
    ),
    "Opcode": (types.Opcode, "OPCODE_", ["READ", "WRITE"]),
    "BufferState": (types.BufferState, "BUFFER_STATE_", ["LIVE", "REVOKING"]),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_every_enum_has_these_names_and_numbers_in_proto_and_in_python(name: str) -> None:
    python, prefix, names = NUMBERS[name]
    assert dict(getattr(pb, name).items()) == {f"{prefix}{n}": i for i, n in enumerate(names)}
    assert {m.name: int(m) for m in python} == {n: i for i, n in enumerate(names)}


def test_the_proto_has_no_enum_that_is_not_pinned_here() -> None:
    assert set(pb.DESCRIPTOR.enum_types_by_name) == set(NUMBERS)


@pytest.mark.parametrize("number", [*range(13), 1000, 1999, 4711])
def test_a_transport_number_comes_back_from_the_wire_as_it_was(number: int) -> None:
    name = types.transport_name(number) or f"private-{number}"
    sent = wire.transports_to({name: number})[0]
    assert pb.Transport.FromString(sent.SerializeToString()).number == number
    assert wire.transports_from([pb.Transport.FromString(sent.SerializeToString())]) == {
        name: number
    }


@pytest.mark.parametrize("permission", Permission)
@pytest.mark.parametrize("state", BufferState)
def test_permission_and_state_keep_their_numbers_through_the_conversions(
    permission: Permission, state: BufferState
) -> None:
    message = pb.Buffer(id=1, address=1, length=1, permission=int(permission), state=int(state))
    buffer = wire.buffer_from(pb.Buffer.FromString(message.SerializeToString()))
    assert (buffer.permission, buffer.state) == (permission, state)
    assert wire.buffer_to(buffer).permission == int(permission)
    assert wire.buffer_to(buffer).state == int(state)


@pytest.mark.parametrize("kind", [Permission, BufferState])
def test_a_number_of_a_newer_version_is_kept_and_shown_and_equals_nothing_known(
    kind: type[enum.IntEnum],
) -> None:
    field = {Permission: "permission", BufferState: "state"}[kind]
    message = pb.Buffer(id=1, address=1, length=1, **{field: 77})
    buffer = wire.buffer_from(pb.Buffer.FromString(message.SerializeToString()))
    value = getattr(buffer, field)
    assert isinstance(value, kind)
    assert value not in list(kind)
    assert "UNKNOWN_77" in repr(buffer)
    assert getattr(wire.buffer_to(buffer), field) == 77
    with pytest.raises(ValueError):
        kind(77)


def test_an_attribute_of_an_unknown_transport_is_kept() -> None:
    message = pb.Buffer(
        id=1, address=1, length=1, attributes=[pb.Attribute(name="laser", number=99, payload=b"x")]
    )
    assert wire.buffer_from(message).attributes == {"laser": Attribute(99, "laser", b"x")}


def test_fields_of_a_newer_version_survive_a_message_that_is_passed_on() -> None:
    newer = (
        pb.Buffer(id=1, name="b").SerializeToString() + b"\xf2\x3f\x03new"
    )  # field 1022, three bytes
    assert pb.Buffer.FromString(newer).SerializeToString() == newer
    assert wire.buffer_from(pb.Buffer.FromString(newer)).name == "b"


@pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="the pinned generator has wheels up to CPython 3.12"
)
def test_generating_again_gives_the_committed_code(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "generate-proto", tmp_path], check=True, timeout=300
    )
    for name in GENERATED:
        made = (tmp_path / "tent_core" / "control" / name).read_bytes()
        assert made == (ROOT / "tent_core" / "control" / name).read_bytes(), name
