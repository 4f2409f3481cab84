"""Slots that the processes of one user on one host share, and lose when they die: locks on a file.

The file has a fixed size and no contents: all that is in it are record locks, fcntl(2) F_SETLK, which the
kernel takes back when their process ends, however it does. They are of the process, not of the descriptor,
so a forked child does not keep them; and the process loses them with *any* descriptor of the file that it
closes, so there is one `SlotFile` per process, which all its engines share.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import threading
from pathlib import Path

from tent_core.errors import TentError

MOST = 64
"""The most slots there can be; behind their bytes there are as many for those that wait."""
SIZE = 4096
_FLOCK = struct.Struct("hhqqi4x")
"""struct flock of 64-bit Linux: type, whence, start, length, pid."""


def default_path() -> Path:
    """In the user's runtime directory, or else in /dev/shm."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    directory = runtime if runtime and os.path.isdir(runtime) else "/dev/shm"
    return Path(directory) / f"tent-slots-{os.getuid()}"


class SlotFile:
    """The slots as one process sees them. Thread-safe; never waits. An `owner` is anything of this process.

    Raises TentError when the file cannot be used: it is another user's, or no plain file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._fd = _open(path)
        self._taken: dict[int, object] = {}
        self._waiting: set[object] = set()
        self._mark: int | None = None
        """The byte that says that somebody here waits."""

    def take(self, owner: object, count: int) -> int | None:
        """One of the first `count` slots, or None if all are taken."""
        with self._lock:
            for slot in range(count):
                if slot not in self._taken and self._try(slot):
                    self._taken[slot] = owner
                    return slot
        return None

    def give_back(self, slot: int) -> None:
        """Others may take it."""
        with self._lock:
            del self._taken[slot]
            self._unlock(slot)

    def wait(self, owner: object, waits: bool) -> None:
        """Let others know whether `owner` waits for a slot."""
        with self._lock:
            (self._waiting.add if waits else self._waiting.discard)(owner)
            if self._waiting and self._mark is None:
                self._mark = next((m for m in range(MOST, 2 * MOST) if self._try(m)), None)
            elif not self._waiting and self._mark is not None:
                self._unlock(self._mark)
                self._mark = None

    def others_wait(self, owner: object) -> bool:
        """Whether anybody else waits, here or in another process."""
        with self._lock:
            if self._waiting - {owner}:
                return True
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, MOST, MOST, 0)
            answer = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))
            return bool(answer[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Give everything back."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            self._taken.clear()

    def _try(self, byte: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError:
            return False
        return True

    def _unlock(self, byte: int) -> None:
        if self._fd >= 0:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, byte)


_shared_lock = threading.Lock()
_shared: dict[Path, tuple[int, SlotFile, int]] = {}
"""By path: process id, the file, and how many use it."""


def join(path: Path | None = None) -> SlotFile:
    """The slots of this process at `path`; `leave` has to follow. Raises TentError."""
    path = default_path() if path is None else path
    with _shared_lock:
        pid, found, users = _shared.get(path, (0, None, 0))
        if found is None or pid != os.getpid():  # a forked child has none of its parent's locks
            found, users = SlotFile(path), 0
        _shared[path] = (os.getpid(), found, users + 1)
        return found


def leave(slots: SlotFile) -> None:
    """One user fewer; the last one closes the file."""
    with _shared_lock:
        pid, found, users = _shared[slots.path]
        if found is not slots:
            return
        _shared[slots.path] = (pid, found, users - 1)
        if users == 1:
            del _shared[slots.path]
            found.close()


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise TentError(
            f"cannot open {path}, by which processes take turns: {error.strerror}; "
            "remove it, or set qos.shared_slots to 0"
        ) from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise TentError(
                f"{path}, by which processes take turns, is not a file that only this user can open: "
                "remove it, or set qos.shared_slots to 0"
            )
        if found.st_size != SIZE:
            os.ftruncate(fd, SIZE)
    except BaseException:
        os.close(fd)
        raise
    return fd
