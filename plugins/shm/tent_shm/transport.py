"""The transport itself: what it serves to its peers, and how it meets one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from tent_core.errors import TransportError, TransportUnavailable, Unreachable
from tent_core.transport import LocalBuffer, Peer, Transport, TransportContext
from tent_core.types import MemoryKind, Opcode, Permission, memory_kind
from tent_shm import mapping, syscalls
from tent_shm.attribute import BufferAttribute, Malformed, ProcessAttribute
from tent_shm.crowd import Crowd
from tent_shm.endpoint import ShmEndpoint, Tools
from tent_shm.gather import Region
from tent_shm.keeper import Keeper
from tent_shm.owner import Owner
from tent_shm.page import IdentityPage
from tent_shm.plan import Ways
from tent_shm.pool import Pool
from tent_shm.settings import Settings
from tent_shm.targets import NAME

STOP_TIMEOUT_S = 1.8


class ShmTransport(Transport):
    """Serves by being there: peers copy by themselves, from and to memory that they map or name.

    Threads: the keeper, and `copy_threads` that copy. For this process it holds a page and three descriptors.
    """

    def __init__(self) -> None:
        self._context: TransportContext | None = None
        self._page: IdentityPage | None = None
        self._tools: Tools | None = None
        self._vectors = False
        self._lock = threading.Lock()
        self._steady: dict[int, tuple[int, Region]] = {}
        """Generation and place of buffers whose memory can be touched without a fault."""
        self._endpoints: set[ShmEndpoint] = set()

    def start(self, context: TransportContext) -> None:
        settings: Settings = context.settings
        _check_system(context)
        self._context = context
        self._vectors = _may_copy_within_this_process()
        try:
            self._page = IdentityPage(context.key.incarnation)
            keeper = Keeper(self._page, context.log)
        except OSError as error:
            raise TransportUnavailable(f"shm cannot make its identity page: {error}") from error
        self._tools = Tools(keeper, Pool(settings.copy_threads, context.log), context.log, Crowd())
        thread = keeper.start()
        self._tools.pool.start()
        if settings.allow_ptrace_by_anyone:
            # EINVAL of a kernel without Yama: nothing is forbidden that this would allow.
            try:
                syscalls.allow_ptrace_by_anyone()
            except OSError as error:
                context.log.info("shm_ptrace_scope_not_changed", reason=str(error))
        host = context.host
        context.publish(
            ProcessAttribute(
                boot_id=host.boot_id,
                pid_namespace=host.pid_namespace,
                pid=host.pid,
                keeper=thread,
                start_time=host.start_time,
                page_address=self._page.address,
                page=self._page.file,
            ).encode()
        )

    def add_buffers(self, buffers: Sequence[LocalBuffer]) -> Sequence[bytes | None]:
        return [self._add(buffer) for buffer in buffers]

    def connect(self, peer: Peer) -> ShmEndpoint:
        context, tools = self._context, self._tools
        if context is None or tools is None:
            raise TransportError("shm is not running")
        settings: Settings = context.settings
        attribute = peer.segment.attributes.get(NAME)
        if attribute is None:
            raise TransportError(f"peer {peer.key} does not publish what shm needs")
        try:
            process = ProcessAttribute.decode(attribute.payload)
        except Malformed as error:
            raise Unreachable(f"peer {peer.key} is of another version: {error}") from error
        owner = Owner(process, peer.key.incarnation, context.host)
        if owner.memory_denied is not None:
            context.log.warning(
                "shm_only_allocated_memory", peer=str(peer.key), reason=owner.memory_denied
            )
        ways = Ways(
            own=os.getpid(),
            keeper=owner.keeper,
            vectors=self._vectors,
            steady=self._region,
            quick_weight=settings.keep_gil_bytes,
            hold_bytes=settings.hold_gil_bytes,
            split_bytes=settings.split_bytes,
            threads=settings.copy_threads,
            processors=len(os.sched_getaffinity(0)),
        )
        try:
            endpoint = ShmEndpoint(peer, owner, ways, tools, self._forget)
        except OSError as error:  # of epoll_ctl(2): no memory, or fs.epoll.max_user_watches
            owner.close_when_idle(lambda: None)
            raise TransportError(f"the process of {peer.key} cannot be watched: {error}") from error
        with self._lock:
            self._endpoints.add(endpoint)
        return endpoint

    def remove_buffer(self, buffer: LocalBuffer, timeout: float) -> None:
        # Nothing of ours touches it: peers hold mappings, and the engine has waited for them to let go.
        known = self._steady.get(buffer.id)
        if known is not None and known[0] == buffer.generation:
            del self._steady[buffer.id]

    def stop(self) -> None:
        deadline = time.monotonic() + STOP_TIMEOUT_S
        context, self._context = self._context, None
        tools, self._tools = self._tools, None
        page, self._page = self._page, None
        if context is not None:
            context.publish(None)
        with self._lock:
            endpoints = list(self._endpoints)
        for endpoint in endpoints:
            endpoint.close("shm stops")
        if tools is not None:
            copying = not tools.pool.stop(max(0.0, deadline - time.monotonic()))
            serving = not tools.keeper.stop(max(0.1, deadline - time.monotonic()))
            if copying or serving:
                tools.log.warning("shm_threads_outlive_stop", copying=copying, serving=serving)
            if serving:
                return  # the keeper still uses the page
        if page is not None:
            page.close()

    def holdings(self) -> Mapping[str, int]:
        threads = 0 if self._tools is None else 1 + len(self._tools.pool)
        return {"threads": threads, "endpoints": len(self._endpoints)}

    def _add(self, buffer: LocalBuffer) -> bytes | None:
        if memory_kind(buffer.location) is not MemoryKind.DRAM:
            return None
        if buffer.memory_fd < 0:
            return BufferAttribute(None).encode()
        region = Region(buffer.address, buffer.address, buffer.length)
        self._steady[buffer.id] = buffer.generation, region
        if buffer.permission is Permission.LOCAL_READ_WRITE:
            return BufferAttribute(None).encode()  # no peer has use for the memfd
        return BufferAttribute(mapping.describe(buffer.memory_fd)).encode()

    def _region(self, number: int) -> Region | None:
        known = self._steady.get(number)
        return None if known is None else known[1]

    def _forget(self, endpoint: ShmEndpoint) -> None:
        with self._lock:
            self._endpoints.discard(endpoint)


def _check_system(context: TransportContext) -> None:
    if not context.host.boot_id:
        raise TransportUnavailable("the boot id of this machine cannot be read: mount /proc")
    try:
        seen = os.readlink("/proc/self")
    except OSError as error:
        raise TransportUnavailable(f"shm needs /proc: {error}") from error
    if seen != str(os.getpid()):
        raise TransportUnavailable(
            f"/proc belongs to another pid namespace (it calls process {os.getpid()} {seen}): mount it anew"
        )


def _may_copy_within_this_process() -> bool:
    """Whether process_vm_readv(2) may be called at all: a seccomp profile can forbid it."""
    source, target = np.arange(16, dtype=np.uint8), np.zeros(16, np.uint8)
    local = np.array([[target.ctypes.data, 16]], np.uint64)
    remote = np.array([[source.ctypes.data, 16]], np.uint64)
    read = syscalls.vector_call(Opcode.READ, keep_gil=True)
    return read(os.getpid(), local.ctypes.data, 1, remote.ctypes.data, 1, 0) == 16
