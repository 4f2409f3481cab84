"""The calls into the kernel that Python has no name for, with and without the GIL.

A call through PyDLL keeps the GIL, one through CDLL releases it. Beside a thread that computes, a thread
that has released the GIL gets it back after a switch interval (5 ms), so a short call had better keep it.
This module imports neither the core nor anything else that a receiver process does not need.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

MAX_PIECES = 1024
"""Entries of one vector: IOV_MAX, limits.h of Linux; sysconf(3) can not answer less (UIO_MAXIOV)."""

# As plain numbers: an operation on Python's own flags takes half a microsecond.
NOW = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
"""Flags of a call that does not wait."""
WAIT = int(socket.MSG_NOSIGNAL)
"""Flags of a call that waits, for as long as the socket allows."""
WAIT_ALL = int(socket.MSG_NOSIGNAL | socket.MSG_WAITALL)
"""Flags of a call that waits for all that it asked for."""
MORE = int(socket.MSG_MORE)
"""Flag of a call after which another one belongs into the same packet."""

_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h
_MAP_FAILED = ctypes.c_void_p(-1).value

VectorCall = Callable[[int, int, int, int, int, int], int]
"""process_vm_readv(2): task, local iovecs, their number, remote iovecs, their number, 0. -1 sets errno."""

MessageCall = Callable[[int, int, int], int]
"""sendmsg(2), recvmsg(2): descriptor, address of a MessageHeader, flags. -1 sets errno."""

BufferCall = Callable[[int, int, int, int], int]
"""send(2), recv(2): descriptor, address, bytes, flags. -1 sets errno."""


class MessageHeader(ctypes.Structure):
    """struct msghdr of socket.h."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("pieces", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


@dataclass(frozen=True, slots=True)
class SocketCalls:
    """The four ways to move bytes over a socket, all of which keep the GIL or all of which release it."""

    send: BufferCall
    receive: BufferCall
    send_message: MessageCall
    receive_message: MessageCall


def _socket_calls(library: ctypes.CDLL) -> SocketCalls:
    number, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t

    def call(name: str, *arguments: type) -> Callable[..., int]:
        function = library[name]
        function.restype = ctypes.c_ssize_t
        function.argtypes = arguments
        return function

    return SocketCalls(
        call("send", number, pointer, size, number),
        call("recv", number, pointer, size, number),
        call("sendmsg", number, pointer, number),
        call("recvmsg", number, pointer, number),
    )


_holding = ctypes.PyDLL(None, use_errno=True)
_releasing = ctypes.CDLL(None, use_errno=True)

HOLDING = _socket_calls(_holding)
"""Keep the GIL: for what does not wait and is short."""

RELEASING = _socket_calls(_releasing)
"""Release the GIL: for what may wait."""


sched_yield: Callable[[], int] = _holding.sched_yield
"""sched_yield(2), with the GIL kept, which `os.sched_yield` gives up in some versions of Python."""


def _owner_call(name: str) -> VectorCall:
    function = _holding[name]
    function.restype = ctypes.c_ssize_t
    word, pointer = ctypes.c_ulong, ctypes.c_void_p
    function.argtypes = [ctypes.c_int, pointer, word, pointer, word, word]
    return function


process_vm_readv = _owner_call("process_vm_readv")
"""process_vm_readv(2): task, local iovecs, their number, remote iovecs, their number, 0. -1 sets errno."""

process_vm_writev = _owner_call("process_vm_writev")
"""As process_vm_readv, in the other direction."""

_mmap = _holding.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_munmap = _releasing.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def last_error() -> OSError:
    """The error of the last call of this thread through this module."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def would_block() -> bool:
    """Whether the last call of this thread failed only because it would have waited, or was interrupted."""
    return ctypes.get_errno() in (errno.EAGAIN, errno.EINTR)


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


def allow_ptrace_by_children() -> None:
    """Let this process and its descendants read and write its memory under Yama's ptrace scope 1.

    The tracer that is named is this process itself, so that the helpers of several engines are all covered
    (Yama keeps one exception a process, and extends it to the descendants of the tracer that it names:
    security/yama/yama_lsm.c). Raises OSError (EINVAL: the kernel has no Yama).
    """
    prctl = _holding.prctl
    if prctl(ctypes.c_int(_PR_SET_PTRACER), ctypes.c_ulong(os.getpid()), 0, 0, 0) != 0:
        raise last_error()
