"""A shared page that says whose memory this is, and that the kernel itself marks when that memory is gone.

The page is a memfd. It holds the incarnation, and a word with the thread id of the keeper (`keeper.Keeper`),
which the keeper has put on its list of robust futexes (set_robust_list(2)): when that thread ends, the kernel
sets FUTEX_OWNER_DIED in the word, before it takes the address space away. The thread ends when the process
does, by whatever signal, and when any thread calls exec. So a peer that maps the page learns both by reading
one word of memory: no system call, and no permission to trace the owner, which an open /proc/PID/mem needs.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import threading

from tent_core.errors import TransportError
from tent_shm import syscalls
from tent_shm.attribute import ProcessAttribute, SharedFile
from tent_shm.mapping import SEALED, Mapping, describe

SIZE = mmap.PAGESIZE
IDENTITY = struct.Struct("<8s16s")
"""Magic and incarnation: how a page starts."""

_MAGIC = b"TENTshm\x01"
_WORD = 24
# struct robust_list_head of linux/futex.h: the first entry, the distance from an entry to its word, and an
# entry being changed. The one entry points back to the head, which ends the list.
_HEAD = struct.Struct("<QqQ")
_HEAD_AT = 32
_ENTRY = struct.Struct("<Q")
_ENTRY_AT = _HEAD_AT + _HEAD.size


class IdentityPage:
    """The page of this process, for its peers to map."""

    def __init__(self, incarnation: bytes) -> None:
        self._descriptor = os.memfd_create("tent-identity", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, SIZE)
            self.address = syscalls.map_shared(self._descriptor, SIZE, writable=True)
            # Now that it is mapped here, nobody gets to map it for writing.
            fcntl.fcntl(
                self._descriptor,
                fcntl.F_ADD_SEALS,
                SEALED | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL,
            )
        except BaseException:
            os.close(self._descriptor)
            raise
        page = (ctypes.c_uint8 * SIZE).from_address(self.address)
        head, entry = self.address + _HEAD_AT, self.address + _ENTRY_AT
        IDENTITY.pack_into(page, 0, _MAGIC, incarnation)
        _HEAD.pack_into(page, _HEAD_AT, entry, _WORD - _ENTRY_AT, 0)
        _ENTRY.pack_into(page, _ENTRY_AT, head)
        self._word = ctypes.c_uint32.from_address(self.address + _WORD)

    @property
    def file(self) -> SharedFile:
        """What peers must know to map it."""
        return describe(self._descriptor)

    def claim(self) -> None:
        """Bind the page to the calling thread: while it lives, the memory of this process is what it was."""
        self._word.value = threading.get_native_id()
        syscalls.set_robust_list(self.address + _HEAD_AT)

    def disclaim(self) -> None:
        """Say that this process serves no longer; called before the thread that claimed it ends."""
        self._word.value = 0

    def close(self) -> None:
        """Give the page back; the thread that claimed it has ended."""
        syscalls.unmap(self.address, SIZE)
        os.close(self._descriptor)


class PeerPage:
    """The page of a peer's process, mapped read-only."""

    def __init__(self, process: ProcessAttribute, incarnation: bytes) -> None:
        """Map the page and compare. Raises TransportError if it is another's; OSError as Mapping does."""
        if process.page.size != SIZE:
            raise TransportError(f"an identity page has {SIZE} bytes, this one {process.page.size}")
        self._mapping = Mapping(process.keeper, process.page, writable=False)
        found = ctypes.string_at(self._mapping.address, IDENTITY.size)
        if found != identity(incarnation):
            self._mapping.unmap()
            raise TransportError(
                f"process {process.pid} is not engine {incarnation.hex()}: its page says "
                f"{found[len(_MAGIC) :].hex()}"
            )
        self._keeper = process.keeper
        self.word = ctypes.c_uint32.from_address(self._mapping.address + _WORD)

    @property
    def alive(self) -> bool:
        """Whether the process still has the address space that it had, and still serves."""
        return self.word.value == self._keeper

    @property
    def fate(self) -> str:
        """Why it is not alive, in words."""
        if self.word.value == 0:
            return "it has stopped its shm transport"
        return "its process has ended, or executes another program now"

    def close(self) -> None:
        """Unmap the page: nobody may ask it any more."""
        self._mapping.unmap()


def identity(incarnation: bytes) -> bytes:
    """What the page of the engine of this incarnation starts with."""
    return IDENTITY.pack(_MAGIC, incarnation)


_F_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h since 5.1; Python has the name from 3.13 on
