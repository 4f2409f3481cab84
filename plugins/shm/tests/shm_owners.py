"""What the owner's process does when a test asks: set up memory, look at it, and misbehave."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
from shm_harness import Array, Node, noise

from tent_core.descriptor import BufferDescriptor, SegmentDescriptor
from tent_core.types import Permission
from tent_shm.attribute import BufferAttribute

PAGE = mmap.PAGESIZE
MIB = 1 << 20
FIXED_ADDRESS = 0x2000_0000_0000
"""Where nothing else is mapped, so that two programs can have memory at the same address."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED = 0x10


def anonymous(address: int, size: int) -> Array:
    """Private memory of zeros at `address`."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    found = _libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert found == address, os.strerror(ctypes.get_errno())
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def repeated(address: int, unit: int, times: int) -> Array:
    """`times` mappings, one behind the other, of the same `unit` bytes: a large range and little memory."""
    fd = os.memfd_create("repeated")
    os.ftruncate(fd, unit)
    flags, both = mmap.MAP_SHARED | _MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
    for i in range(times):
        at = address + i * unit
        assert _libc.mmap(at, unit, both, flags, fd, 0) == at, os.strerror(ctypes.get_errno())
    os.close(fd)
    return np.frombuffer((ctypes.c_uint8 * (unit * times)).from_address(address), np.uint8)


def punch(array: Array, start: int, size: int) -> None:
    """Unmap pages in the middle of registered memory, as a careless application might."""
    assert _libc.munmap(array.ctypes.data + start, size) == 0


def inode_of(buffer: BufferDescriptor) -> int:
    """The inode of the memfd behind an allocated buffer."""
    file = BufferAttribute.decode(buffer.attributes["shm"].payload).file
    assert file is not None
    return file.inode


def protections(inode: int) -> list[str]:
    """How this process has a memfd mapped: the second column of proc_pid_maps(5) of each mapping."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return [fields[1] for fields in lines if int(fields[4]) == inode]


# ---------------------------------------------------------------- set-ups


def allocated_and_registered(node: Node, size: int = MIB) -> None:
    """Buffer 0 is allocated, buffer 1 registered."""
    node.allocate(size)
    node.register(np.zeros(size, np.uint8))


def large(node: Node) -> None:
    allocated_and_registered(node, 64 * MIB)


def six_buffers(node: Node) -> None:
    """Even numbers are allocated, odd ones registered."""
    for _ in range(3):
        allocated_and_registered(node)


def read_only(node: Node) -> None:
    """Like `allocated_and_registered`, and peers may only read."""
    node.allocate(MIB, Permission.GLOBAL_READ_ONLY)
    node.register(np.zeros(MIB, np.uint8), Permission.GLOBAL_READ_ONLY)


def at_fixed_address(node: Node) -> None:
    """Buffer 0 is allocated, buffer 1 registered memory at FIXED_ADDRESS."""
    node.allocate(MIB)
    node.register(anonymous(FIXED_ADDRESS, MIB))


def with_a_hole(node: Node) -> None:
    """Buffer 1 is registered and has one page that is not mapped, at 512 KiB."""
    at_fixed_address(node)
    punch(node.arrays[1], MIB // 2, PAGE)


def unsealed(node: Node) -> None:
    """Buffer 0 is a memfd that its owner could shrink."""
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, MIB)
    node.register(np.frombuffer(mmap.mmap(fd, MIB), np.uint8), fd=fd)


def descriptor_reused_for_a_file(node: Node) -> None:
    """The descriptor of buffer 0 is another sealed memfd of the same size now: buffer 1's."""
    node.allocate(MIB)
    node.allocate(MIB)
    os.dup2(node.locals[1].memory_fd, node.locals[0].memory_fd)


def descriptor_reused_for_a_pipe(node: Node) -> None:
    """The descriptor of buffer 0 is the reading end of a pipe now: opening it could block."""
    node.allocate(MIB)
    reading, _ = os.pipe()
    os.dup2(reading, node.locals[0].memory_fd)


def huge(node: Node) -> None:
    """Buffer 1 is a little more than 2 GiB of registered memory, the same 16 MiB again and again."""
    node.allocate(MIB)
    node.register(repeated(FIXED_ADDRESS, 16 * MIB, 130))


# ---------------------------------------------------------------- requests


def fill(node: Node, number: int, seed: int) -> None:
    array = node.arrays[number]
    array[:] = noise(array.nbytes, seed)


def digest(node: Node, number: int) -> str:
    return digest_of(node.arrays[number])


def fill_unit(node: Node, number: int, unit: int) -> None:
    node.arrays[number][:unit] = 0


def digest_unit(node: Node, number: int, unit: int) -> str:
    return digest_of(node.arrays[number][:unit])


def digest_of(array: Array) -> str:
    return hashlib.sha256(array).hexdigest()


def reuse_descriptor(node: Node, number: int) -> None:
    """The descriptor of a buffer is that of another memfd now."""
    other = os.memfd_create("other")
    os.ftruncate(other, MIB)
    os.dup2(other, node.locals[number].memory_fd)


def replace_buffer(node: Node, number: int) -> SegmentDescriptor:
    """Unregister an allocated buffer and allocate another, which gets its id. Answers the new snapshot."""
    old = node.locals[number]
    node.transport.remove_buffer(old, 1.0)
    count = len(node.locals)
    node.allocate(old.length)
    new = replace(node.locals.pop(count), id=number, generation=1000)
    node.arrays[number] = node.arrays.pop(count)
    described = replace(node.descriptors.pop(count), id=number, generation=1000)
    node.locals[number], node.descriptors[number] = new, described
    return node.segment()


def stop_transport(node: Node) -> None:
    node.transport.stop()


def fork_a_child(node: Node) -> int:
    """A child that outlives the owner and has its memory, descriptors and identity page."""
    pid = os.fork()
    if pid == 0:
        threading.Event().wait(60)
        os._exit(0)
    return pid


def execute_another_program(node: Node, by_a_thread: bool) -> None:
    """Replace the program by `shm_after_exec.py`, which has memory at the same address."""
    answer = node.conn
    os.set_inheritable(answer.fileno(), True)
    program = str(Path(__file__).with_name("shm_after_exec.py"))
    arguments = [sys.executable, "-S", program, hex(FIXED_ADDRESS), str(MIB), str(answer.fileno())]
    if by_a_thread:
        threading.Thread(target=os.execv, args=(sys.executable, arguments)).start()
        threading.Event().wait(60)
    os.execv(sys.executable, arguments)
