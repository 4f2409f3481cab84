"""One buffer of a peer, ready for use, and the marks of those who use it."""

from __future__ import annotations

from collections.abc import Callable

from tent_core.descriptor import BufferDescriptor
from tent_shm.gather import Region
from tent_shm.mapping import Mapping


class Target:
    """A buffer of the peer: mapped here, or (`mapping` is None) in its owner's memory.

    A submission marks itself with `begin` before it checks anything, and unmarks with `end` after its last
    call has returned; `released` is called once, by whoever is last, after `let_go`. `gone` says why the
    buffer may be used no more, once it may not. Lock-free, since each mark costs every transfer: adding to
    a list, taking from it and looking at it are single steps of the interpreter (0.1 us, a lock 0.5).
    """

    __slots__ = ("_released", "_users", "buffer", "gone", "mapping", "region")

    def __init__(
        self, buffer: BufferDescriptor, mapping: Mapping | None, released: Callable[[Target], None]
    ) -> None:
        self.buffer = buffer
        self.mapping = mapping
        self.region: Region | None = None
        """Where its addresses are in this process, if it is mapped."""
        if mapping is not None:
            self.region = Region(buffer.address, mapping.address, mapping.size)
        self.gone: Exception | None = None
        self._users: list[None] = []
        self._released = [released]

    @property
    def offset(self) -> int:
        """What to add to an address of its owner, modulo 2^64, to get where those bytes are mapped here."""
        if self.mapping is None:
            return 0
        return (self.mapping.address - self.buffer.address) % (1 << 64)

    def begin(self) -> bool:
        """Mark one use; False, and no mark, when the buffer is gone."""
        self._users.append(None)
        if self.gone is None:
            return True
        self.end()
        return False

    def end(self) -> None:
        """Take one mark back."""
        self._users.pop()
        if self.gone is not None:
            self._release_if_idle()

    def let_go(self, cause: Exception) -> None:
        """Refuse new uses, and release it when the last one ends: now, if there is none."""
        self.gone = cause
        self._release_if_idle()

    def _release_if_idle(self) -> None:
        # Who ends the last use after `gone` was set comes here, and so does who set it: one finds no user.
        if self._users:
            return
        try:
            released = self._released.pop()
        except IndexError:
            return  # the other one was here
        released(self)
