"""What the stand-in asks of the kernel: blocking calls that keep the interpreter lock, and copies."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import socket
import sys
from typing import Any

_holding = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter lock, as the bindings do
_releasing = ctypes.CDLL(None, use_errno=True)

_SHORT = 64 << 10
"""Bytes of a copy that keeps the lock: it would take longer to come back than the copy takes."""

_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, -1  # linux/prctl.h


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_COPY: dict[tuple[bool, bool], Any] = {}
for _library in (_holding, _releasing):
    for _name in ("process_vm_readv", "process_vm_writev"):
        _call = _library[_name]
        _call.restype = ctypes.c_ssize_t
        _vector, _size = ctypes.POINTER(_Iovec), ctypes.c_ulong
        _call.argtypes = [ctypes.c_int, _vector, _size, _vector, _size, _size]
        _COPY[_name == "process_vm_writev", _library is _holding] = _call

for _name in ("connect", "send", "recv"):
    _holding[_name].restype = ctypes.c_ssize_t


def let_others_copy() -> None:
    """Allow processes that are no parents of this one to reach its memory, where Yama forbids it."""
    _releasing.prctl(_PR_SET_PTRACER, ctypes.c_long(_PR_SET_PTRACER_ANY), 0, 0, 0)


def boot_id() -> str:
    """Which boot of which machine this is."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def start_time(pid: int) -> int:
    """When a process began, in ticks since boot; 0 if there is none."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])
    return 0


class Process:
    """Another process, or this one, whose memory can be copied to and from until it ends."""

    def __init__(self, pid: int, started: int) -> None:
        """Raises OSError when that process is gone."""
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        if start_time(pid) != started:
            os.close(self._fd)
            raise ProcessLookupError(errno.ESRCH, "the process has ended")
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def copy(self, local: int, remote: int, length: int, *, writes: bool) -> bool:
        """Copy `length` bytes; whether all of them were. May be called from one thread at a time."""
        call = _COPY[writes, length <= _SHORT]
        done = 0
        while done < length:
            if self._poll.poll(0):
                return False
            here = _Iovec(local + done, length - done)
            there = _Iovec(remote + done, length - done)
            moved = call(self.pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if moved <= 0:
                return False
            done += moved
        return True

    def close(self) -> None:
        """Let go of it."""
        os.close(self._fd)


def ask(host: str, port: int, question: dict[str, Any]) -> Any:
    """One question at a handshake port, without a deadline and with the lock held. Raises OSError."""
    family, packed = socket.AF_INET, socket.inet_aton(host)
    where = (
        int(family).to_bytes(2, sys.byteorder) + port.to_bytes(2, "big") + packed + bytes(8)
    )  # struct sockaddr_in, ip(7)
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        fd = connection.fileno()
        _call_held("connect", fd, where, len(where))
        line = json.dumps(question).encode() + b"\n"
        _call_held("send", fd, line, len(line), socket.MSG_NOSIGNAL)
        received = b""
        room = ctypes.create_string_buffer(1 << 16)
        while not received.endswith(b"\n"):
            count = _call_held("recv", fd, room, len(room), 0)
            if count == 0:
                raise ConnectionError("the other side closed the connection")
            received += room.raw[:count]
        return json.loads(received)


def sleep_with_the_lock(seconds: float) -> None:
    """Sleep, and let no other Python thread run."""
    _holding.usleep(int(seconds * 1e6))


def _call_held(name: str, *arguments: Any) -> int:
    while (result := int(_holding[name](*arguments))) < 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return result
