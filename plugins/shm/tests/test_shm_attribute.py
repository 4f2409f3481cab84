"""Attributes come from outside: what is not exactly right is Malformed, and nothing else happens."""

from __future__ import annotations

import contextlib
import struct
import uuid
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tent_shm.attribute import BufferAttribute, Malformed, ProcessAttribute, SharedFile

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A machine that does other things as well is no failure."""

FILES = st.builds(
    SharedFile,
    descriptor=st.integers(0, (1 << 31) - 1),
    device=st.integers(0, (1 << 64) - 1),
    inode=st.integers(0, (1 << 64) - 1),
    size=st.integers(1, (1 << 63) - 1),
)
PIDS = st.integers(1, 1 << 22)
PROCESSES = st.builds(
    ProcessAttribute,
    boot_id=st.uuids().map(str),
    pid_namespace=st.integers(0, (1 << 64) - 1),
    pid=PIDS,
    keeper=PIDS,
    start_time=st.integers(0, (1 << 64) - 1),
    page_address=st.integers(1, (1 << 51) - 1).map(lambda page: page * 4096),
    page=FILES,
).filter(lambda process: process.pid != process.keeper)
PROCESS = ProcessAttribute(str(uuid.UUID(int=1)), 4, 10, 11, 99, 4096, SharedFile(3, 1, 2, 4096))


@PATIENT
@given(PROCESSES)
def test_a_process_attribute_survives_the_wire(process: ProcessAttribute) -> None:
    assert ProcessAttribute.decode(process.encode()) == process


@PATIENT
@given(st.none() | FILES)
def test_a_buffer_attribute_survives_the_wire(file: SharedFile | None) -> None:
    assert BufferAttribute.decode(BufferAttribute(file).encode()) == BufferAttribute(file)


@PATIENT
@given(st.binary(max_size=200))
def test_random_bytes_are_malformed_or_an_attribute_that_writes_the_same_bytes(
    payload: bytes,
) -> None:
    for kind in (ProcessAttribute, BufferAttribute):
        try:
            found = kind.decode(payload)
        except Malformed:
            continue
        assert found.encode() == payload


@PATIENT
@given(PROCESSES, st.data())
def test_a_mutated_process_attribute_is_malformed_or_another_valid_one(
    process: ProcessAttribute, data: st.DataObject
) -> None:
    payload = bytearray(process.encode())
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(payload[: data.draw(st.sampled_from([len(payload), len(payload) - 1, 1, 0]))])
    with contextlib.suppress(Malformed):
        assert ProcessAttribute.decode(cut).encode() == cut


@pytest.mark.parametrize(
    "wrong",
    [
        replace(PROCESS, pid=0),
        replace(PROCESS, keeper=0),
        replace(PROCESS, keeper=PROCESS.pid),
        replace(PROCESS, pid=1 << 23),
        replace(PROCESS, page_address=0),
        replace(PROCESS, page_address=4097),
        replace(PROCESS, page_address=1 << 63),
        replace(PROCESS, page=PROCESS.page._replace(descriptor=1 << 31)),
        replace(PROCESS, page=PROCESS.page._replace(size=0)),
        replace(PROCESS, page=PROCESS.page._replace(size=1 << 63)),
    ],
)
def test_values_that_nothing_can_have_are_malformed(wrong: ProcessAttribute) -> None:
    with pytest.raises(Malformed):
        ProcessAttribute.decode(wrong.encode())


def test_another_format_is_named() -> None:
    for kind, payload in (
        (ProcessAttribute, PROCESS.encode()),
        (BufferAttribute, b"\1" + b"\0" * 28),
    ):
        with pytest.raises(Malformed, match="found format 9, this version understands format 1"):
            kind.decode(b"\x09" + payload[1:])


def test_the_layouts_are_what_format_1_says() -> None:
    assert PROCESS.encode() == struct.pack(
        "<B16sQIIQQIQQQ", 1, uuid.UUID(int=1).bytes, 4, 10, 11, 99, 4096, 3, 1, 2, 4096
    )
    file = SharedFile(5, 6, 7, 8)
    assert BufferAttribute(file).encode() == struct.pack("<BIQQQ", 1, 5, 6, 7, 8)
    assert BufferAttribute(None).encode() == b""
