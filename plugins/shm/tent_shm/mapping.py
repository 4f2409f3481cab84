"""Mapping a memfd of another process through that process's descriptor table, and only that memfd."""

from __future__ import annotations

import fcntl
import os
import stat

from tent_core.errors import TransportError
from tent_shm import syscalls
from tent_shm.attribute import SharedFile

SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Without these seals the owner could shrink the file, and whoever touches the mapping would get SIGBUS."""


def describe(descriptor: int) -> SharedFile:
    """What peers must know to open our memfd `descriptor`."""
    found = os.fstat(descriptor)
    return SharedFile(descriptor, found.st_dev, found.st_ino, found.st_size)


class Mapping:
    """A mapped memfd of another process. `unmap` once, when nobody can be using the address any more."""

    __slots__ = ("address", "size")

    def __init__(self, keeper: int, file: SharedFile, *, writable: bool) -> None:
        """Map the memfd `file` of the process to which the thread `keeper` belongs.

        Raises TransportError if the descriptor is not that memfd (any more), OSError if it may not be
        opened (EACCES, EPERM) or mapped (ENOMEM), or if the thread has ended (ENOENT, ESRCH).
        """
        descriptor = _open(keeper, file, writable)
        try:
            self.address = syscalls.map_shared(descriptor, file.size, writable=writable)
        finally:
            os.close(descriptor)
        self.size = file.size

    def unmap(self) -> None:
        """Give the address range back."""
        syscalls.unmap(self.address, self.size)


def _open(keeper: int, file: SharedFile, writable: bool) -> int:
    """A descriptor of our own for `file`.

    A number may have been reused for anything, so it is opened with O_PATH first, which does nothing to
    what it finds, compared, and only then opened for reading or writing.
    """
    path = os.open(f"/proc/{keeper}/fd/{file.descriptor}", os.O_PATH)
    try:
        found = os.fstat(path)
        identity = SharedFile(file.descriptor, found.st_dev, found.st_ino, found.st_size)
        if identity != file or not stat.S_ISREG(found.st_mode):
            raise TransportError(
                f"descriptor {file.descriptor} is another file now, its owner has closed and reused it: "
                f"published was {file}, found is {identity}"
            )
        descriptor = os.open(f"/proc/self/fd/{path}", os.O_RDWR if writable else os.O_RDONLY)
    finally:
        os.close(path)
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if seals & SEALED != SEALED:
            raise TransportError(
                f"descriptor {file.descriptor} is not sealed against shrinking and growing (seals {seals:#x})"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
