"""A word of shared memory that the kernel itself changes when the engine's address space is taken away.

A thread of the engine locks a robust mutex in a page that the receiver has mapped too. When that thread ends,
the kernel marks the mutex (pthread_mutexattr_setrobust(3)), before the memory goes: the thread ends when the
process does, by whatever signal, and when any thread calls exec. So the receiver learns both by comparing a
few bytes: it needs no system call (to ask an open /proc/PID/mem took 1.1 us), nor the right to trace.
"""

from __future__ import annotations

import ctypes

SIZE = 64
"""Bytes of the page that the mutex may take: 40 on x86-64, 48 on arm64 (glibc's pthread_mutex_t)."""

_PROCESS_SHARED = 1  # PTHREAD_PROCESS_SHARED of pthread.h, in glibc and in musl
_ROBUST = 1  # PTHREAD_MUTEX_ROBUST, the same

_library = ctypes.PyDLL(None)


def pledge(address: int) -> None:
    """Lock a new mutex at `address`, for as long as the calling thread lives. Raises OSError."""
    attributes = ctypes.create_string_buffer(SIZE)
    _call("pthread_mutexattr_init", attributes)
    _call("pthread_mutexattr_setpshared", attributes, ctypes.c_int(_PROCESS_SHARED))
    _call("pthread_mutexattr_setrobust", attributes, ctypes.c_int(_ROBUST))
    mutex = ctypes.c_void_p(address)
    _call("pthread_mutex_init", mutex, attributes)
    _call("pthread_mutexattr_destroy", attributes)
    _call("pthread_mutex_lock", mutex)


def _call(name: str, *arguments: object) -> None:
    error = _library[name](*arguments)
    if error:
        raise OSError(error, name)
