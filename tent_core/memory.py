"""Local memory: what can be registered, memory that peers can map, buffers and their slices."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tent_core.errors import MemoryUnsupported, RangeError, UsageError
from tent_core.inflight import InFlight
from tent_core.types import MemoryKind, memory_kind

if TYPE_CHECKING:
    from tent_core.engine import Engine
    from tent_core.transport import LocalBuffer

ADDRESS_LIMIT = 1 << 64
_LOCATION = re.compile(r"\*|cpu(:\d+)?|file:.+|[a-z][a-z0-9_]*:\d+")

# linux/fcntl.h; Python 3.11's fcntl module has the names on Linux.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class Memory:
    """A range of memory, and what keeps it alive.

    `owner` is any object that must live as long as the range is used; `memory_fd` the memfd behind memory
    made by `allocate`, else -1; `readonly` says that writing to it would corrupt an immutable object.
    """

    address: int
    length: int
    location: str
    owner: Any
    readonly: bool = False
    memory_fd: int = -1


def check_location(location: str) -> str:
    """The location, if it is well formed: `cpu`, `cpu:N`, `DEVICE:N` such as `cuda:1`, `file:PATH` or `*`."""
    if not _LOCATION.fullmatch(location):
        raise UsageError(
            f"location {location!r} is none: use cpu:N, a device and its number such as cuda:1, "
            "file:PATH, or *"
        )
    return location


def allocate(size: int, location: str) -> Memory:
    """Fresh zeroed memory of `size` bytes behind a memfd, which peers on this host can map.

    The memfd has no name in the file system, so nothing is left after SIGKILL, and it is sealed against
    shrinking and growing, so no peer that maps it can get SIGBUS. Its size is `size` rounded up to a page.
    """
    if memory_kind(check_location(location)) is not MemoryKind.DRAM:
        raise MemoryUnsupported(
            f"allocate() makes host memory, not {location}: allocate there with the device's own library "
            "and register that"
        )
    if not 0 < size < ADDRESS_LIMIT // 2:
        raise RangeError(f"cannot allocate {size} bytes: the size must be positive")
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    fd = os.memfd_create("tent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, whole)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        mapping = mmap.mmap(fd, whole, flags=mmap.MAP_SHARED)
    except OSError as error:
        os.close(fd)
        raise MemoryUnsupported(
            f"cannot allocate {size} bytes of shared memory: {error.strerror}; "
            "free memory, or raise the limit of the container"
        ) from error
    return Memory(_address_of(mapping), size, location, _Allocation(mapping, fd), memory_fd=fd)


class _Allocation:
    """Owns a memfd and its mapping; both go when the last user does (a numpy view keeps the mapping)."""

    def __init__(self, mapping: mmap.mmap, fd: int) -> None:
        self.mapping = mapping
        self._fd = fd

    def __del__(self) -> None:
        os.close(self._fd)


def _address_of(exporter: Any) -> int:
    return int(np.frombuffer(exporter, np.uint8).ctypes.data)


def describe(obj: Any, location: str | None = None) -> Memory:
    """The memory of `obj`: a buffer, an array interface, DLPack, a file's path, or (address, length).

    The array must be contiguous. Raises UsageError with what was found. The object's memory is held alive
    (a buffer export also keeps a bytearray from being resized); a raw address is the caller's to keep.
    """
    if isinstance(obj, tuple):
        memory = _from_tuple(obj)
    elif isinstance(obj, os.PathLike):
        memory = _from_file(os.path.abspath(os.fspath(obj)))
    elif hasattr(obj, "__cuda_array_interface__"):
        memory = _from_interface(obj, obj.__cuda_array_interface__, "cuda:0")
    else:
        memory = _from_host(obj)
    if location is not None:
        memory = Memory(
            memory.address, memory.length, check_location(location), memory.owner, memory.readonly
        )
    if memory.length <= 0:
        raise RangeError(f"cannot register {type(obj).__name__}: it has no bytes")
    # Its end is a number as well, and has to fit into 64 bits wherever it is calculated.
    if memory.address <= 0 or memory.length >= ADDRESS_LIMIT - memory.address:
        raise RangeError(
            f"cannot register address {memory.address:#x} with length {memory.length}: "
            "the range must begin at 1 or above and end below 2^64"
        )
    return memory


def _from_tuple(pair: tuple[Any, ...]) -> Memory:
    if len(pair) != 2 or not all(isinstance(x, (int, np.integer)) for x in pair):
        raise UsageError(f"a raw range is (address, length), two integers; found {pair!r}")
    return Memory(int(pair[0]), int(pair[1]), "cpu:0", None)


def _from_file(path: str | bytes) -> Memory:
    """A file of now, mapped, so that its bytes have addresses: the offset in the file is the distance from
    the first. Transports to files read and write the file itself; nothing here touches the mapping.
    """
    name = os.fsdecode(path)
    writable = os.access(path, os.W_OK)
    try:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as error:
        raise MemoryUnsupported(f"cannot register the file {name}: {error.strerror}") from error
    try:
        length = os.fstat(fd).st_size
        if not stat.S_ISREG(os.fstat(fd).st_mode) or length == 0:
            raise RangeError(f"cannot register {name}: it is no regular file with at least a byte")
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        mapping = mmap.mmap(fd, length, access=access)
    finally:
        os.close(fd)
    return Memory(_address_of(mapping), length, f"file:{name}", mapping, readonly=not writable)


def _from_host(obj: Any) -> Memory:
    try:
        view = memoryview(obj)
    except TypeError:
        if hasattr(obj, "__array_interface__"):
            return _from_interface(obj, obj.__array_interface__, "cpu:0")
        if hasattr(obj, "__dlpack__"):
            return _from_dlpack(obj)
        raise UsageError(
            f"cannot register {type(obj).__name__}: it offers neither the buffer protocol, "
            "__array_interface__, DLPack nor __cuda_array_interface__; pass (address, length) "
            "if you know its memory"
        ) from None
    if not view.c_contiguous:
        raise UsageError(
            f"cannot register {type(obj).__name__}: it is not contiguous; register its base array"
        )
    if view.nbytes == 0:
        raise RangeError(f"cannot register {type(obj).__name__}: it has no bytes")
    return Memory(_address_of(view), view.nbytes, "cpu:0", view, readonly=view.readonly)


def _from_interface(obj: Any, interface: dict[str, Any], location: str) -> Memory:
    address, readonly = interface["data"]
    itemsize = np.dtype(interface["typestr"]).itemsize
    shape = tuple(interface["shape"])
    _check_contiguous(obj, shape, interface.get("strides"), itemsize)
    return Memory(int(address), _bytes(shape, itemsize), location, obj, readonly=bool(readonly))


def _bytes(shape: tuple[int, ...], itemsize: int) -> int:
    total = itemsize
    for extent in shape:
        total *= int(extent)
    return total


def _check_contiguous(
    obj: Any, shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int
) -> None:
    if strides is None:
        return
    expected = itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and stride != expected:
            raise UsageError(
                f"cannot register {type(obj).__name__}: it is not contiguous; register its base array"
            )
        expected *= int(extent)


class _DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h (ABI of DLPack 0.x and the unversioned capsule of 1.x)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


# DLDeviceType of dlpack.h: kDLCPU 1, kDLCUDA 2, kDLCUDAHost 3, kDLROCM 10, kDLROCMHost 11, kDLCUDAManaged 13.
_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 10: "rocm", 11: "cpu", 13: "cuda"}


def _from_dlpack(obj: Any) -> Memory:
    capsule = obj.__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = _DLTensor.from_address(get(capsule, b"dltensor"))
    device = _DEVICES.get(tensor.device_type)
    if device is None:
        raise MemoryUnsupported(
            f"cannot register {type(obj).__name__}: DLPack device type {tensor.device_type} is not known"
        )
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    itemsize = tensor.bits * tensor.lanes // 8
    if tensor.strides:
        strides = tuple(tensor.strides[i] * itemsize for i in range(tensor.ndim))
        _check_contiguous(obj, shape, strides, itemsize)
    number = 0 if device == "cpu" else tensor.device_id
    address = (tensor.data or 0) + tensor.byte_offset
    return Memory(address, _bytes(shape, itemsize), f"{device}:{number}", (obj, capsule))


class Buffer:
    """One registered range of this engine's segment. Made by `Engine.register` and `Engine.allocate`.

    `buffer[a:b]` is a slice in bytes, to be read into or written from. The memory stays alive until
    `unregister` has returned. Thread-safe.
    """

    def __init__(
        self, engine: Engine, local: LocalBuffer, memory: Memory, offers: dict[str, int]
    ) -> None:
        self.engine = engine
        self.local = local
        self.memory: Memory | None = memory
        self.readonly = memory.readonly
        self.offers = offers
        """Transports that offer this buffer: name to number."""
        self.trait = (local.location, tuple(sorted(offers.items())))
        """What selection reads of this buffer: location and who offers it."""
        self.inflight = InFlight()
        self.id = local.id
        self.generation = local.generation
        self.name = local.name
        self.address = local.address
        self.length = local.length
        self.location = local.location
        self.permission = local.permission

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: slice) -> BufferSlice:
        start, stop = slice_bounds(self, index)
        return BufferSlice(self, start, stop - start)

    @property
    def array(self) -> NDArray[np.uint8]:
        """The memory as a numpy array of bytes, shape (length,), which keeps it mapped; host memory, and
        files, whose content it is. (Who looks at it after the file was cut short gets SIGBUS.)"""
        memory = self.memory
        if memory is None:
            raise UsageError(
                f"buffer {self.name!r} has been unregistered: its memory is the application's again"
            )
        in_file = isinstance(memory.owner, mmap.mmap) and self.location.startswith("file:")
        if memory_kind(self.location) is not MemoryKind.DRAM and not in_file:
            raise MemoryUnsupported(
                f"buffer {self.name!r} is in {self.location}: only host memory can be seen as an array"
            )
        owner = memory.owner.mapping if isinstance(memory.owner, _Allocation) else memory.owner
        if isinstance(owner, (mmap.mmap, memoryview)):
            return np.frombuffer(owner, np.uint8, self.length)
        raw = (ctypes.c_uint8 * self.length).from_address(self.address)
        view: NDArray[np.uint8] = np.ctypeslib.as_array(raw)
        view.flags.writeable = not self.readonly
        return view

    def unregister(self, timeout: float | None = None) -> None:
        """See `Engine.unregister`."""
        self.engine.unregister(self, timeout)

    def __repr__(self) -> str:
        state = "" if self.memory is not None else ", unregistered"
        return (
            f"<Buffer {self.name!r} id={self.id} {self.length} bytes at {self.address:#x} "
            f"{self.location} {self.permission.name}{state}>"
        )


@dataclass(frozen=True, slots=True)
class BufferSlice:
    """`length` bytes of a local buffer from `offset`."""

    buffer: Buffer
    offset: int
    length: int


def slice_bounds(buffer: Any, index: Any) -> tuple[int, int]:
    """Start and stop of `buffer[index]` in bytes. Unlike a list's, a slice past the end is an error."""
    if not isinstance(index, slice) or index.step not in (None, 1):
        raise UsageError(
            f"buffer {buffer.name!r} takes slices of bytes such as buffer[0:4096], found {index!r}"
        )
    start = 0 if index.start is None else int(index.start)
    stop = buffer.length if index.stop is None else int(index.stop)
    if not 0 <= start < stop <= buffer.length:
        raise RangeError(
            f"[{start}:{stop}] is no range of buffer {buffer.name!r}, which has {buffer.length} bytes"
        )
    return start, stop
