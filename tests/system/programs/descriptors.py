"""Run by an owner of allocated memory: puts another file behind the descriptor number that it published."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tent_core as tent

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def other_file(kind: str, size: int, folder: str) -> int:
    """A file of another kind: one just like allocated memory, an unsealed or a shorter one, or on disk."""
    if kind == "on disk":
        descriptor = os.open(f"{folder}/other", os.O_RDWR | os.O_CREAT)
    else:
        descriptor = os.memfd_create("tent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, mmap.PAGESIZE if kind == "shorter" else size)
    if kind in ("alike", "shorter"):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor


def replace_descriptor(buffer: tent.Buffer, kind: str, folder: str) -> int:
    """Another file has the buffer's descriptor number now; answers a descriptor to look at that file."""
    number = buffer.local.memory_fd
    if kind == "none":
        os.close(number)
        return -1
    other = other_file(kind, buffer.length, folder)
    os.dup2(other, number)
    return other


def touched(descriptor: int) -> int:
    """How many bytes of a file are not zero."""
    if descriptor < 0:
        return 0
    size = os.fstat(descriptor).st_size
    return size - os.pread(descriptor, size, 0).count(0)
