"""Run by an owner: offers memory, then becomes another program while a peer writes to it."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading

import tent_core as tent

ADDRESS = 0x2000_0000_0000  # far from where Linux puts anything by itself, so that a new program can have it
MAP_FIXED_NOREPLACE = 0x100000  # linux/mman.h


def offer(engine: tent.Engine, file: str, size: int) -> dict[str, int]:
    """A registered buffer in the memory of `file` at ADDRESS, and an allocated one: address by name."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    descriptor = os.open(file, os.O_RDWR)
    flags = mmap.MAP_SHARED | MAP_FIXED_NOREPLACE
    found = libc.mmap(ADDRESS, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    assert found == ADDRESS, os.strerror(ctypes.get_errno())
    registered = engine.register((ADDRESS, size), name="registered")
    allocated = engine.allocate(size, name="allocated")
    return {"registered": registered.address, "allocated": allocated.address}


def become(successor: str, arguments: list[str], thread: bool) -> None:
    """Execute the program `successor` in the place of this one, called by the main or another thread."""
    command = [sys.executable, "-I", "-S", successor, *arguments]
    if thread:
        other = threading.Thread(target=os.execv, args=(command[0], command))
        other.start()
        other.join()
    else:
        os.execv(command[0], command)
