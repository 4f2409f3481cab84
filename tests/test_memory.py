"""What can be registered: buffers, array interfaces, DLPack, raw ranges; and memory made by `allocate`."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tent_core as tent
import tent_mock
from tent_core import memory
from tent_core.errors import MemoryUnsupported, RangeError, UsageError
from tent_core.plugins import Registry


def test_an_array_a_bytearray_and_a_mapping_are_described_where_they_lie() -> None:
    array = np.arange(100, dtype=np.float32)
    assert memory.describe(array).address == array.ctypes.data
    assert memory.describe(array).length == 400
    raw = bytearray(64)
    assert memory.describe(raw).length == 64
    with mmap.mmap(-1, 8192) as mapping:
        described = memory.describe(mapping)
        assert described.length == 8192
        del described


def test_what_is_read_only_is_known_to_be() -> None:
    assert memory.describe(b"constant").readonly
    array = np.zeros(4)
    array.flags.writeable = False
    assert memory.describe(array).readonly
    assert not memory.describe(np.zeros(4)).readonly


def test_a_bytearray_cannot_be_resized_while_it_is_described() -> None:
    raw = bytearray(64)
    described = memory.describe(raw)
    with pytest.raises(BufferError):
        raw.extend(b"x")
    del described
    raw.extend(b"x")


class ArrayInterface:
    """An object that offers an array interface and no buffer."""

    def __init__(self, attribute: str, array: np.ndarray, **extra: Any) -> None:
        described = {
            "data": (array.ctypes.data, False),
            "shape": array.shape,
            "typestr": array.dtype.str,
            "version": 3,
            **extra,
        }
        self.keep = array
        setattr(self, attribute, described)


def test_the_array_interface_is_read() -> None:
    array = np.zeros((4, 8), np.int16)
    found = memory.describe(ArrayInterface("__array_interface__", array))
    assert (found.address, found.length, found.location) == (array.ctypes.data, 64, "cpu:0")


def test_the_cuda_array_interface_is_device_memory_at_the_location_given() -> None:
    array = np.zeros(16, np.uint8)
    obj = ArrayInterface("__cuda_array_interface__", array)
    assert memory.describe(obj).location == "cuda:0"
    assert memory.describe(obj, "cuda:3").location == "cuda:3"


def test_strides_that_leave_gaps_are_refused() -> None:
    array = np.zeros((4, 8), np.int16)
    gaps = ArrayInterface("__array_interface__", array, strides=(32, 2))
    for obj in (gaps, array[:, ::2]):
        with pytest.raises(UsageError, match="not contiguous"):
            memory.describe(obj)
    whole = ArrayInterface("__array_interface__", array, strides=(16, 2))
    assert memory.describe(whole).length == 64


class DLPackOnly:
    """An object that offers DLPack alone, as a tensor of a dtype that numpy does not know would."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self) -> Any:
        return self._array.__dlpack__()


def test_dlpack_is_read_without_copying() -> None:
    array = np.arange(60, dtype=np.float64).reshape(3, 20)
    found = memory.describe(DLPackOnly(array))
    assert (found.address, found.length, found.location) == (array.ctypes.data, 480, "cpu:0")
    with pytest.raises(UsageError, match="not contiguous"):
        memory.describe(DLPackOnly(array[:, :10]))


@pytest.mark.parametrize(
    "pair",
    [(0, 4), (4096, 0), (2**64 - 8, 16), (2**64 - 8, 8), (4096, 2**64), (-4096, 8), (2**64, 8)],
)
def test_a_raw_range_that_is_empty_or_overflows_is_refused(pair: tuple[int, int]) -> None:
    with pytest.raises(RangeError):
        memory.describe(pair)


@pytest.mark.parametrize("obj", [(1, 2, 3), ("a", 4), object(), 5, "text"])
def test_what_is_no_memory_is_refused_with_what_was_found(obj: object) -> None:
    with pytest.raises(UsageError):
        memory.describe(obj)


@pytest.mark.parametrize("location", ["", "cpu:", "cpu:x", "CUDA:0", "gpu", "cuda:-1", "file:"])
def test_a_location_that_is_none_is_refused(location: str) -> None:
    with pytest.raises(UsageError, match="is none"):
        memory.check_location(location)


def test_allocated_memory_is_zero_sealed_and_of_whole_pages_behind_its_descriptor() -> None:
    made = memory.allocate(5000, "cpu:0")
    assert made.length == 5000
    assert os.fstat(made.memory_fd).st_size == 8192
    seals = fcntl.fcntl(made.memory_fd, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    assert seals & fcntl.F_SEAL_GROW
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(made.memory_fd, 4096)
    assert not any(ctypes.string_at(made.address, 5000))


def test_allocated_memory_goes_with_its_last_user() -> None:
    made = memory.allocate(4096, "cpu:0")
    fd = made.memory_fd
    del made
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


@pytest.mark.parametrize(("size", "location"), [(0, "cpu:0"), (-1, "cpu:0"), (2**63, "cpu:0")])
def test_a_size_that_is_none_is_refused(size: int, location: str) -> None:
    with pytest.raises(RangeError):
        memory.allocate(size, location)


def test_device_memory_is_not_allocated_here() -> None:
    with pytest.raises(MemoryUnsupported, match="cuda:0"):
        memory.allocate(4096, "cuda:0")


def test_a_file_is_described_by_its_path_and_seen_through_a_mapping(tmp_path: Path) -> None:
    path = tmp_path / "pages"
    path.write_bytes(b"0123456789")
    described = memory.describe(path)
    assert (described.location, described.length) == (f"file:{path}", 10)
    assert not described.readonly
    with path.open("r+b") as file:
        file.write(b"9")
    assert ctypes.string_at(described.address, 10) == b"9123456789"


def test_a_file_that_is_not_there_or_has_nothing_in_it_cannot_be_registered(tmp_path: Path) -> None:
    with pytest.raises(MemoryUnsupported, match=r"missing: No such file"):
        memory.describe(tmp_path / "missing")
    (tmp_path / "empty").touch()
    with pytest.raises(RangeError, match="no regular file with at least a byte"):
        memory.describe(tmp_path / "empty")
    with pytest.raises((MemoryUnsupported, RangeError)):
        memory.describe(tmp_path)


def test_a_file_takes_a_transport_to_files(tmp_path: Path) -> None:
    path = tmp_path / "pages"
    path.write_bytes(bytes(10))
    registry = Registry.of(tent_mock.declare("one", 1001))
    config = {"transports": {"one": {"enable": True}}, "log": {"level": "error"}}
    with tent.Engine(config, plugins=registry) as engine, pytest.raises(MemoryUnsupported):
        engine.register(path)
