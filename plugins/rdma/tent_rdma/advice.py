"""Why memory could not be registered, and what to do: the kernel gives a number and nothing else."""

from __future__ import annotations

import errno
import re
import resource
from pathlib import Path

from tent_core.units import format_size
from tent_rdma.verbs import Limits

STATUS = Path("/proc/self/status")


def advice(number: int, length: int, limits: Limits) -> str:
    """What is behind error `number` of a registration of `length` bytes, and the remedy; may be empty."""
    match number:
        case errno.ENOMEM:
            return (
                f"{format_size(pinned())} are locked by this process already, its limit is {_memlock()}: "
                "raise it (`ulimit -l unlimited`, LimitMEMLOCK=infinity in a unit of systemd, `--ulimit "
                "memlock=-1` of a container), register less, or unregister what is not needed"
            )
        case errno.EFAULT:
            return (
                "some of it is not mapped, is read-only, or is device memory, which needs the kernel module "
                "nvidia_peermem: see `tent doctor`"
            )
        case errno.EINVAL if length > limits.max_registration:
            return f"the device registers at most {format_size(limits.max_registration)} at once"
        case errno.EAGAIN | errno.ENOSPC:
            return (
                f"the device has room for {limits.max_registrations} registrations, those of all processes "
                "included: `rdma resource show mr` lists them with their processes"
            )
    return ""


def raise_memlock() -> None:
    """Allow this process to lock as much as it may allow itself: the kernel counts against the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))


def pinned() -> int:
    """Bytes that this process has locked for devices (VmPin of proc(5))."""
    found = re.search(r"^VmPin:\s+([0-9]+) kB", STATUS.read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _memlock() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else format_size(soft)
