"""What an owner becomes in a test: maps memory where its buffer was, and says whether anybody wrote."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time

MAP_FIXED_NOREPLACE = 0x100000  # linux/mman.h
PATTERN = 0x5A


def main(address: int, length: int, directory: str) -> None:
    """Say `ready` when it watches, and what it saw when `stop` is there."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    start, end = address - address % mmap.PAGESIZE, address + length
    size = -(-(end - start) // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    found = libc.mmap(start, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    verdict = "untouched"
    if found != start:
        verdict = f"cannot map {start:#x}: errno {ctypes.get_errno()}"
    else:
        ctypes.memset(start, PATTERN, size)
        say(directory, "ready", "")
        until = time.monotonic() + 20.0
        while time.monotonic() < until and not os.path.exists(f"{directory}/stop"):
            if ctypes.string_at(start, size) != bytes([PATTERN]) * size:
                verdict = "touched"
    say(directory, "verdict", verdict)


def say(directory: str, name: str, content: str) -> None:
    with open(f"{directory}/{name}.part", "w") as file:
        file.write(content)
    os.rename(f"{directory}/{name}.part", f"{directory}/{name}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
