"""A program that finds itself in the process of an owner: fills memory at the same address, and watches it.

Arguments: address, size, and the descriptor of a pipe. Says "ready" when the memory is there, then, when the
standard time has passed, how many of its bytes have changed.
"""

import ctypes
import mmap
import os
import sys
import time

address, size, answer = int(sys.argv[1], 16), int(sys.argv[2]), int(sys.argv[3])
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
assert libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
memory = (ctypes.c_char * size).from_address(address)
os.write(answer, b"ready\n")
time.sleep(0.3)  # not to synchronise: this long the peer's writes are given a chance to land
os.write(answer, b"%d\n" % sum(byte != 0 for byte in memory.raw))
