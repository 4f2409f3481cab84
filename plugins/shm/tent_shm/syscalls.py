"""The calls into the kernel and the C library that Python has no name for, with and without the GIL.

A call through PyDLL keeps the GIL, one through CDLL releases it. Beside a thread that computes, a thread
that has released the GIL gets it back after a switch interval (5 ms), so a short call had better keep it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Callable
from functools import partial

from tent_core.types import Opcode
from tent_core.work import Iovecs

MAX_PIECES = 1024
"""Entries of one vector: IOV_MAX, limits.h of Linux; sysconf(3) can not answer less (UIO_MAXIOV)."""

MAX_BYTES = (1 << 31) - mmap.PAGESIZE
"""What one call moves at most: MAX_RW_COUNT, linux/fs.h."""

VectorCall = Callable[[int, int, int, int, int, int], int]
"""process_vm_readv(2): pid, local iovecs, their number, remote iovecs, their number, 0. -1 sets errno."""

_ROBUST_LIST_SYSCALLS = {"x86_64": 273, "aarch64": 99, "riscv64": 99, "ppc64le": 300, "s390x": 304}
_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h
_PR_SET_PTRACER_ANY = -1

_holding = ctypes.PyDLL(None, use_errno=True)
_releasing = ctypes.CDLL(None, use_errno=True)


def _vector_call(library: ctypes.CDLL, name: str) -> VectorCall:
    function = library[name]
    function.restype = ctypes.c_ssize_t
    size, pointer = ctypes.c_ulong, ctypes.c_void_p
    function.argtypes = [ctypes.c_int, pointer, size, pointer, size, size]
    return function


_VECTOR_CALLS = {
    (opcode, keep_gil): _vector_call(library, name)
    for keep_gil, library in ((True, _holding), (False, _releasing))
    for opcode, name in ((Opcode.READ, "process_vm_readv"), (Opcode.WRITE, "process_vm_writev"))
}


def _untyped(library: ctypes.CDLL, name: str) -> Callable[..., int]:
    """For arguments that are objects of ctypes already: it takes them as they are."""
    function = library[name]
    function.restype = ctypes.c_ssize_t
    return function


_ARRANGED_CALLS = {
    (opcode, keep_gil): _untyped(ctypes.PyDLL(None) if keep_gil else ctypes.CDLL(None), name)
    for keep_gil in (True, False)
    for opcode, name in ((Opcode.READ, "process_vm_readv"), (Opcode.WRITE, "process_vm_writev"))
}

_memmove = ctypes.cast(_releasing.memmove, ctypes.c_void_p).value or 0
_MEMMOVE_TYPE = (None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_MEMMOVES: dict[bool, Callable[[int, int, int], None]] = {
    True: ctypes.PYFUNCTYPE(*_MEMMOVE_TYPE)(_memmove),
    False: ctypes.CFUNCTYPE(*_MEMMOVE_TYPE)(_memmove),
}

_mmap = _releasing.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_munmap = _releasing.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


def vector_call(opcode: Opcode, *, keep_gil: bool) -> VectorCall:
    """process_vm_readv for READ, process_vm_writev for WRITE."""
    return _VECTOR_CALLS[opcode, keep_gil]


def arranged_call(
    opcode: Opcode, pid: int, local: Iovecs, remote: Iovecs, *, keep_gil: bool
) -> Callable[[], int]:
    """`vector_call` with these arguments, made once; it keeps the arrays, and sets no errno.

    2.0 instead of 2.4 microseconds for 4 KiB, of which the kernel takes 1.6.
    """
    size, pointer = ctypes.c_ulong, ctypes.c_void_p
    return partial(
        _ARRANGED_CALLS[opcode, keep_gil],
        ctypes.c_int(pid),
        local.ctypes.data_as(pointer),
        size(len(local)),
        remote.ctypes.data_as(pointer),
        size(len(remote)),
        size(0),
    )


def memory(address: int, size: int) -> memoryview:
    """These bytes of this process; who uses it sees to it that they stay mapped."""
    return memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B")


def memmove(*, keep_gil: bool) -> Callable[[int, int, int], None]:
    """memmove(3): destination, source, bytes. Addresses that are not mapped end the process."""
    return _MEMMOVES[keep_gil]


def last_error() -> OSError:
    """The error of the last call of this thread through this module."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def map_shared(descriptor: int, size: int, *, writable: bool) -> int:
    """Map the first `size` bytes of a file, shared; the address. Unlike mmap.mmap it keeps no descriptor."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address: int | None = _mmap(None, size, protection, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == _MAP_FAILED:
        raise last_error()
    return address


def unmap(address: int, size: int) -> None:
    """Undo `map_shared`."""
    if _munmap(address, size) != 0:
        raise last_error()


def set_robust_list(head: int) -> None:
    """Tell the kernel where this thread's list of robust futexes starts; see `page.IdentityPage`.

    Raises NotImplementedError on a machine whose system call number is not known here.
    """
    machine = platform.machine()
    if machine not in _ROBUST_LIST_SYSCALLS:
        raise NotImplementedError(f"set_robust_list(2) on {machine}: its number is not known here")
    number = ctypes.c_long(_ROBUST_LIST_SYSCALLS[machine])
    if _holding.syscall(number, ctypes.c_void_p(head), ctypes.c_size_t(3 * 8)) != 0:
        raise last_error()


def allow_ptrace_by_anyone() -> None:
    """Lift Yama's ptrace scope 1 for this process. Raises OSError (EINVAL: the kernel has no Yama)."""
    prctl = _holding.prctl
    if prctl(ctypes.c_int(_PR_SET_PTRACER), ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0) != 0:
        raise last_error()
