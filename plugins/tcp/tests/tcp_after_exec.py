"""What an owner becomes in a test: maps memory where its buffer was, and says whether anybody wrote."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time

MAP_FIXED_NOREPLACE = 0x100000  # linux/mman.h
PATTERN = 0x5A


def main(address: int, length: int, report: str) -> None:
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
        until = time.monotonic() + 1.0
        while time.monotonic() < until and verdict == "untouched":
            if ctypes.string_at(start, size) != bytes([PATTERN]) * size:
                verdict = "touched"
    with open(report, "w") as file:
        file.write(verdict + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
