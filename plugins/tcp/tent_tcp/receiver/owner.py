"""The process whose memory is served: reaching that memory, and knowing when the process is another."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable

from tent_tcp.syscalls import VectorCall, last_error, process_vm_readv, process_vm_writev

REMEDY = (
    "allow ptrace between processes of one user (sysctl kernel.yama.ptrace_scope=0 or 1, "
    "or CAP_SYS_PTRACE in a container), or use allocated memory"
)


class OwnerGone(Exception):
    """The owner's address space is no more: it has ended, or runs another program."""


class Fault(Exception):
    """Memory could not be read or written; the message says which and why."""


class Owner:
    """The memory of one process, by the id of a thread in it, and its end.

    A pid outlives exec. A thread id does not: exec ends every other thread before it replaces the address
    space (execve(2)), so a call that names a thread which never calls exec finds the old memory or ESRCH.
    `alive` says whether that thread still lives (`pledge`). It is asked as well, so that a thread id which
    was given to somebody else is not mistaken.

    `page` is an address there at which `token` stands.
    """

    def __init__(self, task: int, page: int, token: bytes, alive: Callable[[], bool]) -> None:
        self._task = task
        self._page = page
        self._alive = alive
        self._local = (ctypes.c_uint64 * 2)()
        self._local_address = ctypes.addressof(self._local)
        self.obstacle = self._probe(token)
        """Why memory that is not mapped here cannot be reached, or "" if it can."""

    def _probe(self, token: bytes) -> str:
        found = ctypes.create_string_buffer(len(token))
        remote = (ctypes.c_uint64 * 2)(self._page, len(token))
        try:
            self._call(
                process_vm_readv, ctypes.addressof(found), len(token), ctypes.addressof(remote), 1
            )
        except OSError as error:
            return f"process_vm_readv(2) on the engine's memory: {error.strerror}; {REMEDY}"
        if found.raw != token:
            return "process_vm_readv(2) found other memory than the engine's"
        return ""

    def probe_again(self, token: bytes) -> None:
        """After the engine has given its permission."""
        self.obstacle = self._probe(token)

    def check(self) -> None:
        """Raise OwnerGone if the address space is gone."""
        if not self._alive():
            raise OwnerGone

    def write(self, source: int, size: int, pieces: int, count: int) -> None:
        """Copy `size` bytes from `source` here to `count` iovecs of the owner. Raises Fault, OwnerGone."""
        self._copy(process_vm_writev, source, size, pieces, count)

    def read(self, target: int, size: int, pieces: int, count: int) -> None:
        """Copy `size` bytes from `count` iovecs of the owner to `target` here. Raises Fault, OwnerGone."""
        self._copy(process_vm_readv, target, size, pieces, count)

    def _copy(self, call: VectorCall, here: int, size: int, pieces: int, count: int) -> None:
        self.check()
        try:
            moved = self._call(call, here, size, pieces, count)
        except OSError as error:
            if error.errno == errno.ESRCH:
                raise OwnerGone from None
            raise Fault(f"the owner's memory: {error.strerror}") from None
        if moved != size:
            raise Fault(f"only {moved} of {size} bytes of the owner's memory are mapped there")

    def _call(self, call: VectorCall, here: int, size: int, pieces: int, count: int) -> int:
        self._local[0], self._local[1] = here, size
        moved = call(self._task, self._local_address, 1, pieces, count, 0)
        if moved < 0:
            raise last_error()
        return moved
