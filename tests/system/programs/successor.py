"""Executed in the place of an owner: fills the same addresses with a pattern and says whether it stays.

Arguments: where to write the answer (JSON), seconds to look, size, and addresses. It imports little, so that
it is there while writes meant for its predecessor are still under way.
"""

from __future__ import annotations

import time

BEGAN = time.monotonic()

import ctypes  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402

READ_WRITE = 3
FIXED_PRIVATE_ANONYMOUS = 0x100000 | 0x02 | 0x20  # linux/mman.h
PATTERN = 0xEE


def main() -> None:
    """Look, then answer; that it answers at all says that its own memory was let be as well."""
    answer, seconds, size = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    mine = []
    for text in sys.argv[4:]:
        address = int(text)
        if libc.mmap(address, size, READ_WRITE, FIXED_PRIVATE_ANONYMOUS, -1, 0) == address:
            ctypes.memset(address, PATTERN, size)
            mine.append(address)
    expected = bytes([PATTERN]) * size
    changed: list[int] = []
    while not changed and time.monotonic() < BEGAN + seconds:
        changed = [address for address in mine if ctypes.string_at(address, size) != expected]
    with open(answer + ".part", "w") as file:
        json.dump({"began": BEGAN, "mine": mine, "changed": changed}, file)
    os.rename(answer + ".part", answer)


main()
