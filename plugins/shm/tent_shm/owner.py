"""The process that owns a peer's memory: who it is, whether it is still there, what it lets us do."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import numpy as np

from tent_core.descriptor import HostIdentity
from tent_core.errors import PeerDeparted, TransportError, Unreachable
from tent_core.inflight import InFlight
from tent_core.types import Opcode
from tent_shm import syscalls
from tent_shm.attribute import ProcessAttribute
from tent_shm.page import IDENTITY, PeerPage, identity

PIDFD_THREAD = (
    os.O_EXCL
)  # linux/pidfd.h, since 6.9: a pidfd of one thread, readable when that one ends
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_DENIED = (errno.EACCES, errno.EPERM)
_GONE = (errno.ENOENT, errno.ESRCH)


class Owner:
    """A peer's process, identified. Holds a pidfd and a mapped page until it is closed and idle."""

    __slots__ = ("_page", "_uses", "keeper", "memory_denied", "pid", "pidfd", "word")

    def __init__(self, process: ProcessAttribute, incarnation: bytes, here: HostIdentity) -> None:
        """Find the process and make sure that it is the one that published `process`.

        Raises Unreachable if this process can never touch its memory, PeerDeparted if it has gone, and
        TransportError for what may pass.
        """
        _check_host(process, here)
        self.pid = process.pid
        self.keeper = process.keeper
        try:
            self.pidfd = _open_pidfd(process.keeper)
        except OSError as error:
            raise _explained(error, process) from error
        try:
            _check_start_time(process)
            # A mapped page whose word names a living thread settles it: that word is changed by the kernel
            # in the moment in which the thread ends, so its number cannot be another's by now.
            self._page = PeerPage(process, incarnation)
        except OSError as error:
            os.close(self.pidfd)
            raise _explained(error, process) from error
        except TransportError:
            os.close(self.pidfd)
            raise
        if not self._page.alive:
            fate = self._page.fate
            self._release()
            raise PeerDeparted(f"process {process.pid} is gone: {fate}")
        self.word = self._page.word
        """Is `keeper` for as long as the process is alive. To be read only while a use is marked."""
        self._uses = InFlight()
        self.memory_denied = _memory_denied(process, incarnation)
        """Why its memory cannot be read and written by process_vm_readv(2), or None: it can."""

    @property
    def alive(self) -> bool:
        """Whether the process still has the address space that it had, and still serves. Costs one load."""
        return self.word.value == self.keeper

    @property
    def fate(self) -> str:
        """Why it is not alive, in words."""
        return self._page.fate

    def begin(self) -> bool:
        """Mark one use, or answer False when it is closed. Needed to ask anything of it."""
        return self._uses.begin()

    def end(self) -> None:
        """Take the mark back."""
        self._uses.end()

    def close_when_idle(self, closed: Callable[[], None]) -> None:
        """Take no more uses; release the descriptor and the page after the last, then call `closed`."""
        self._uses.shut()
        self._uses.when_drained(self._release)
        self._uses.when_drained(closed)

    def wait_closed(self, timeout: float) -> bool:
        """Whether the last use ended within `timeout` seconds."""
        return self._uses.wait_drained(timeout)

    def _release(self) -> None:
        os.close(self.pidfd)
        self._page.close()


def _check_host(process: ProcessAttribute, here: HostIdentity) -> None:
    if process.boot_id != here.boot_id:
        raise Unreachable(
            "the peer runs on another machine (or another boot of it); shm reaches one host"
        )
    if process.pid_namespace != here.pid_namespace:
        raise Unreachable(
            f"the peer runs in another pid namespace ({process.pid_namespace}, this process in "
            f"{here.pid_namespace}), so neither can name the other to the kernel; let the containers share "
            "one (docker run --pid=container:NAME, in a pod shareProcessNamespace: true)"
        )


def _open_pidfd(thread: int) -> int:
    """A pidfd that tells when the thread ends: by exit and by exec; or its process, on older kernels."""
    try:
        return os.pidfd_open(thread, PIDFD_THREAD)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.pidfd_open(_process_of(thread))


def _process_of(thread: int) -> int:
    """The process of a thread: Tgid of proc_pid_status(5)."""
    with open(f"/proc/{thread}/status", "rb") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(b"Tgid:"))


def _check_start_time(process: ProcessAttribute) -> None:
    """Field 22 of proc_pid_stat(5) tells a process from a later one with its pid."""
    with open(f"/proc/{process.pid}/stat", "rb") as file:
        started = int(file.read().rpartition(b")")[2].split()[19])
    if started != process.start_time:
        raise PeerDeparted(
            f"process {process.pid} has ended: another one has its pid, started at {started} instead of "
            f"{process.start_time} clock ticks after boot"
        )


def _memory_denied(process: ProcessAttribute, incarnation: bytes) -> str | None:
    """Read the page once more, now as the owner's memory: what works for it works for its buffers."""
    expected = identity(incarnation)
    found = np.zeros(IDENTITY.size, np.uint8)
    local = np.array([[found.ctypes.data, IDENTITY.size]], np.uint64)
    remote = np.array([[process.page_address, IDENTITY.size]], np.uint64)
    read = syscalls.vector_call(Opcode.READ, keep_gil=True)
    moved = read(process.keeper, local.ctypes.data, 1, remote.ctypes.data, 1, 0)
    if moved < 0:
        error = syscalls.last_error()
        return f"process_vm_readv of process {process.pid}: {error.strerror}; {_remedy(process)}"
    if found.tobytes() != expected:
        return f"process {process.pid} does not have its page at {process.page_address:#x}"
    return None


def _explained(error: OSError, process: ProcessAttribute) -> TransportError:
    if error.errno in _GONE:
        return PeerDeparted(f"process {process.pid} has ended, or executes another program now")
    if error.errno in _DENIED:
        return Unreachable(
            f"process {process.pid} cannot be opened: {error.strerror}; {_remedy(process)}"
        )
    if error.errno in _PASSING:
        return TransportError(f"process {process.pid} cannot be opened now: {error.strerror}")
    return Unreachable(f"process {process.pid} cannot be opened: {error}")


def _remedy(process: ProcessAttribute) -> str:
    """What stands in the way, as far as it can be seen (ptrace(2), "Ptrace access mode checking")."""
    try:
        user = os.stat(f"/proc/{process.pid}").st_uid
    except OSError:
        return "it is hidden from this process (the mount option hidepid of /proc)"
    if user != os.geteuid():
        return (
            f"it belongs to user {user} and this process to user {os.geteuid()}: run both as one user, or "
            "give this one CAP_SYS_PTRACE (a process that was made undumpable belongs to root here)"
        )
    scope = _ptrace_scope()
    if scope == 1:
        return (
            "kernel.yama.ptrace_scope is 1: set allow_ptrace_by_anyone: true in the other engine's settings "
            "of shm, or use memory made by allocate(), or sysctl kernel.yama.ptrace_scope=0"
        )
    if scope >= 2:
        return (
            f"kernel.yama.ptrace_scope is {scope}: give this process CAP_SYS_PTRACE, or use memory made by "
            "allocate()"
        )
    return (
        "both run as one user, so it may have more capabilities than this one, be undumpable, or a seccomp "
        "or LSM profile (of a container: --cap-add=SYS_PTRACE) stands in the way"
    )


def _ptrace_scope() -> int:
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0
