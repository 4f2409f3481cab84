"""What this transport publishes of a process and of a buffer, as bytes, and the strict way back.

It comes from outside, so every field is checked before it is used: anything odd is Malformed.
"""

from __future__ import annotations

import mmap
import struct
import uuid
from dataclasses import dataclass
from typing import NamedTuple

from tent_core.errors import TransportError

FORMAT = 1
"""Version of both formats, their first byte. A reader refuses what it does not know."""

_PROCESS = struct.Struct("<B16sQIIQQIQQQ")
_BUFFER = struct.Struct("<BIQQQ")
_LARGEST_PID = 1 << 22  # PID_MAX_LIMIT of linux/threads.h
_ADDRESSES = 1 << 63
_DESCRIPTORS = 1 << 31


class Malformed(TransportError):
    """An attribute that no version of this transport has written, or a newer one has."""


class SharedFile(NamedTuple):
    """A memfd of another process: its number in that process, and what fstat(2) must say of it."""

    descriptor: int
    device: int
    inode: int
    size: int


@dataclass(frozen=True, slots=True)
class ProcessAttribute:
    """Which process this is, and how its peers recognise it: the attribute of a segment.

    A pid is no identity, nor is a pidfd: exec keeps both, and the start time. `keeper` is the thread id of
    a thread that this transport runs and that never calls exec; `page` is the memfd of a page that holds
    the incarnation and a word that the kernel changes when that thread ends; `page_address` is where the
    process has it mapped.
    """

    boot_id: str
    pid_namespace: int
    pid: int
    keeper: int
    start_time: int
    page_address: int
    page: SharedFile

    def encode(self) -> bytes:
        """The attribute as it is published."""
        boot = uuid.UUID(self.boot_id).bytes
        return _PROCESS.pack(
            FORMAT,
            boot,
            self.pid_namespace,
            self.pid,
            self.keeper,
            self.start_time,
            self.page_address,
            *self.page,
        )

    @classmethod
    def decode(cls, payload: bytes) -> ProcessAttribute:
        """The attribute in `payload`. Raises Malformed."""
        _check_format(payload, _PROCESS, "process")
        _, boot, namespace, pid, keeper, start, address, *page = _PROCESS.unpack(payload)
        if not (0 < pid <= _LARGEST_PID and 0 < keeper <= _LARGEST_PID and keeper != pid):
            raise Malformed(
                f"process {pid} with thread {keeper}: two different ids from 1 to {_LARGEST_PID} are needed"
            )
        if not 0 < address < _ADDRESSES or address % mmap.PAGESIZE:
            raise Malformed(f"identity page at {address:#x}: no address of a page")
        return cls(
            str(uuid.UUID(bytes=boot)), namespace, pid, keeper, start, address, _shared(page)
        )


@dataclass(frozen=True, slots=True)
class BufferAttribute:
    """How to map a buffer: by its memfd, or (None) not at all, as with memory that was only registered."""

    file: SharedFile | None

    def encode(self) -> bytes:
        """The attribute as it is published; nothing for memory that was only registered."""
        return b"" if self.file is None else _BUFFER.pack(FORMAT, *self.file)

    @classmethod
    def decode(cls, payload: bytes) -> BufferAttribute:
        """The attribute in `payload`. Raises Malformed."""
        if not payload:
            return cls(None)
        _check_format(payload, _BUFFER, "buffer")
        return cls(_shared(_BUFFER.unpack(payload)[1:]))


def _check_format(payload: bytes, layout: struct.Struct, what: str) -> None:
    if not payload or payload[0] != FORMAT:
        found = f"format {payload[0]}" if payload else "nothing"
        raise Malformed(
            f"{what} attribute: found {found}, this version understands format {FORMAT}"
        )
    if len(payload) != layout.size:
        raise Malformed(
            f"{what} attribute: found {len(payload)} bytes, format {FORMAT} has {layout.size}"
        )


def _shared(fields: tuple[int, ...] | list[int]) -> SharedFile:
    file = SharedFile(*fields)
    if file.descriptor >= _DESCRIPTORS or not 0 < file.size < _ADDRESSES:
        raise Malformed(f"descriptor {file.descriptor} of {file.size} bytes: no memfd is like that")
    return file
