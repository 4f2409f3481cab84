"""Limits of this process and of the kernel: locked memory, descriptors, access to other processes' memory."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

from tent_core.doctor.finding import Finding, Level
from tent_core.units import format_size

_TOPIC = "limits"
_LEAST_MEMLOCK = 1 << 30
_LEAST_FILES = 4096  # the default of `peers.max`: each peer takes a connection


def limits(root: Path, rdma: bool) -> list[Finding]:
    """Findings about limits; `root` is where `proc` is, `rdma` whether the machine has an RDMA device."""
    return [
        memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[1], rdma),
        nofile(),
        memory(root),
        memfd(),
    ]


def memlock(hard: int, rdma: bool) -> Finding:
    """How much memory may be locked, which is what registering memory with an RDMA device does."""
    if hard == resource.RLIM_INFINITY:
        return Finding(_TOPIC, "memlock", Level.OK, "unlimited")
    found = f"at most {format_size(hard)} may be locked"
    if hard >= _LEAST_MEMLOCK:
        return Finding(_TOPIC, "memlock", Level.OK, found)
    return Finding(
        _TOPIC,
        "memlock",
        Level.WARN if rdma else Level.INFO,
        f"{found}: registering more with an RDMA device fails with 'Cannot allocate memory'"
        + ("" if rdma else " (this machine has no RDMA device; shm and tcp lock nothing)"),
        "ulimit -l unlimited; for services LimitMEMLOCK=infinity; for containers --ulimit memlock=-1",
    )


def nofile() -> Finding:
    """How many descriptors may be open; an engine raises the soft limit to the hard one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    found = "unlimited" if hard == resource.RLIM_INFINITY else f"at most {hard:,} descriptors"
    if hard == resource.RLIM_INFINITY or hard >= _LEAST_FILES:
        return Finding(_TOPIC, "nofile", Level.OK, found)
    return Finding(
        _TOPIC,
        "nofile",
        Level.WARN,
        f"{found}: an engine keeps fewer peers than that",
        "raise the hard limit: ulimit -Hn 65536, LimitNOFILE=65536, or --ulimit nofile=65536",
    )


def memory(root: Path) -> Finding:
    """What the machine has available."""
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
            return Finding(
                _TOPIC, "memory", Level.INFO, f"{available / (1 << 30):.1f} GiB available"
            )
    return Finding(_TOPIC, "memory", Level.INFO, "/proc/meminfo does not say")


def memfd() -> Finding:
    """Whether memory that peers can map can be made."""
    try:
        os.close(os.memfd_create("tent-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        return Finding(
            _TOPIC,
            "memfd",
            Level.BAD,
            f"memfd_create fails: {error.strerror}, so allocate() does",
            "a seccomp profile or an old kernel forbids it: allow memfd_create",
        )
    return Finding(_TOPIC, "memfd", Level.OK, "memory that peers can map can be made")


def access(root: Path) -> list[Finding]:
    """Whether processes of one host can reach each other's memory, which the shm transport needs."""
    return [ptrace_scope(root), process_vm(), user_and_namespaces(root)]


def ptrace_scope(root: Path) -> Finding:
    """What Yama lets one process do to another (kernel documentation: admin-guide/LSM/Yama)."""
    scope = _text(root / "proc/sys/kernel/yama/ptrace_scope")
    privileged = _capability(root, 19)  # CAP_SYS_PTRACE: linux/capability.h
    meanings = {
        "": "Yama is not active",
        "0": "processes of one user may reach each other",
        "1": "only ancestors may reach a process",
        "2": "only processes with CAP_SYS_PTRACE may reach others",
        "3": "no process may reach another",
    }
    found = f"{meanings.get(scope, 'unknown')} (ptrace_scope {scope or 'absent'})"
    if scope in ("", "0"):
        return Finding("shm", "ptrace scope", Level.OK, found)
    if privileged and scope != "3":
        return Finding(
            "shm", "ptrace scope", Level.OK, f"{found}, and this process has CAP_SYS_PTRACE"
        )
    return Finding(
        "shm",
        "ptrace scope",
        Level.WARN,
        f"{found}: shm cannot reach registered memory of a peer",
        "sysctl kernel.yama.ptrace_scope=0, or give the workers CAP_SYS_PTRACE; "
        "memory of allocate() needs neither",
    )


def process_vm() -> Finding:
    """Whether process_vm_readv can be called at all: seccomp profiles of containers may forbid it."""
    libc = ctypes.CDLL(None, use_errno=True)
    source, target = ctypes.create_string_buffer(b"tent", 4), ctypes.create_string_buffer(4)
    here = (ctypes.c_size_t * 2)(ctypes.addressof(target), 4)
    there = (ctypes.c_size_t * 2)(ctypes.addressof(source), 4)
    if libc.process_vm_readv(os.getpid(), here, 1, there, 1, 0) == 4:
        return Finding("shm", "process_vm_readv", Level.OK, "permitted")
    return Finding(
        "shm",
        "process_vm_readv",
        Level.WARN,
        f"forbidden: {os.strerror(ctypes.get_errno())}; shm cannot reach registered memory of a peer",
        "allow process_vm_readv and process_vm_writev in the seccomp profile, or add CAP_SYS_PTRACE",
    )


def user_and_namespaces(root: Path) -> Finding:
    """What must be the same at both sides for shm."""
    try:
        namespace = os.readlink(root / "proc/self/ns/pid")
    except OSError:
        namespace = "unknown"
    return Finding(
        "shm",
        "identity",
        Level.INFO,
        f"user {os.geteuid()}, {namespace}: shm reaches peers with the same of both",
    )


def _capability(root: Path, number: int) -> bool:
    for line in _text(root / "proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
