"""Which process on which machine: identities from /proc, and descriptors that tell when a process ends.

proc(5) gives the fields of /proc/PID/stat, pidfd_open(2) the descriptor, namespaces(7) the inode.
"""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from tent_core.descriptor import HostIdentity


class _Stat(NamedTuple):
    state: str
    threads: int
    start_time: int


_own: HostIdentity | None = None


def identify() -> HostIdentity:
    """The identity of this process; read once per process, also after a fork."""
    global _own
    pid = os.getpid()
    if _own is None or _own.pid != pid:
        _own = HostIdentity(
            _boot_id(), os.stat("/proc/self/ns/pid").st_ino, pid, _stat("self").start_time
        )
    return _own


def same_pids(one: HostIdentity, other: HostIdentity) -> bool:
    """Whether a pid means the same process to both: one machine and one pid namespace."""
    return one.same_machine(other) and one.pid_namespace == other.pid_namespace


def has_ended(process: HostIdentity) -> bool:
    """Whether a process with which this one shares pids is known to have ended.

    A pid that now belongs to a process with another start time is not that process. A process that the
    kernel hides from us (hidepid) is not known to have ended.
    """
    try:
        stat = _stat(str(process.pid))
    except (FileNotFoundError, ProcessLookupError):
        return not _hidden(process.pid)
    return stat.start_time != process.start_time or _is_dead(stat)


def open_process(process: HostIdentity) -> int | None:
    """A pidfd that becomes readable when `process` ends; the caller closes it.

    The start time is checked before and after, so that a reused pid is never taken for the process.
    Returns None when it cannot be watched from here: another machine or pid namespace, or a kernel or
    sandbox that refuses. Raises ProcessLookupError when it has ended, and OSError with EMFILE or ENFILE
    when no descriptor is left.
    """
    if not same_pids(identify(), process):
        return None
    if has_ended(process):
        raise ProcessLookupError(errno.ESRCH, f"process {process.pid} has ended")
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        raise
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None
    if has_ended(process):
        os.close(descriptor)
        raise ProcessLookupError(errno.ESRCH, f"process {process.pid} has ended")
    return descriptor


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _stat(pid: str) -> _Stat:
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The command's name, in parentheses, may itself hold spaces and parentheses.
        fields = file.read().rpartition(b")")[2].split()
    return _Stat(fields[0].decode(), int(fields[17]), int(fields[19]))


def _is_dead(stat: _Stat) -> bool:
    # A main thread that has ended while others run is a zombie with more than one thread.
    return stat.state in "XZ" and stat.threads <= 1


def _hidden(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
