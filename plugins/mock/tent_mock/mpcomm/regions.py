"""Ranges of memory by address, the keys to them, and what is kept for a connection."""

from __future__ import annotations

import mmap
import os

from tent_mock.mpcomm.system import Process

_KEYS = 1 << 20
"""Keys that one instance can ever make; each is a byte that says whether it is alive."""


class Regions:
    """Registered or published ranges, each with a key. One thread changes it while others look."""

    def __init__(self) -> None:
        self._by_address: dict[int, tuple[int, int]] = {}
        self._last: tuple[int, int, int] = (0, 0, 0)

    def __contains__(self, address: int) -> bool:
        return address in self._by_address

    def add(self, address: int, length: int, key: int) -> None:
        """A range that starts where no other does."""
        self._by_address[address] = (address + length, key)

    def remove(self, address: int) -> int | None:
        """Its key, or None if no range starts there."""
        found = self._by_address.pop(address, None)
        self._last = (0, 0, 0)
        return None if found is None else found[1]

    def find(self, address: int, length: int) -> int | None:
        """The key to a range that holds this one, or None."""
        start, end, key = self._last
        if start <= address and address + length <= end:
            return key
        for start, (end, key) in list(self._by_address.items()):
            if start <= address and address + length <= end:
                self._last = (start, end, key)
                return key
        return None


class Keys:
    """Which keys of an instance are alive, in memory that its peers look at, as a NIC looks at its own."""

    def __init__(self, fd: int, page: mmap.mmap) -> None:
        self.fd = fd
        self._page = page
        self._next = 1

    @classmethod
    def make(cls) -> Keys:
        """Those of this instance. Raises OSError."""
        fd = os.memfd_create("mpcomm-stand-in-keys")
        os.ftruncate(fd, _KEYS)
        return cls(fd, mmap.mmap(fd, _KEYS))

    @classmethod
    def of(cls, pid: int, fd: int) -> Keys:
        """Those of an instance of a process. Raises OSError."""
        file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
        try:
            return cls(-1, mmap.mmap(file, _KEYS, prot=mmap.PROT_READ))
        finally:
            os.close(file)

    def new(self) -> int:
        """A key that is alive."""
        key, self._next = self._next, self._next + 1
        self._page[key] = 1
        return key

    def kill(self, key: int) -> None:
        """It opens nothing any more."""
        self._page[key] = 0

    def alive(self, key: int) -> bool:
        """Whether it opens anything."""
        return self._page[key] == 1

    def close(self) -> None:
        """Give the memory back."""
        self._page.close()
        if self.fd >= 0:
            os.close(self.fd)


class Connection:
    """A record of a host: its process, its keys, and those of them that were queried."""

    def __init__(self, process: Process, keys: Keys) -> None:
        self.process = process
        self.keys = keys
        self.known = Regions()

    def close(self) -> None:
        """Only when the instance shuts down."""
        self.process.close()
        self.keys.close()
