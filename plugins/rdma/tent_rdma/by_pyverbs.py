"""Verbs by pyverbs: the only module that imports it."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tent_core.errors import TransportUnavailable
from tent_rdma.queue_pairs import make_queue_pair
from tent_rdma.verbs import (
    Channel,
    Completion,
    CompletionQueue,
    Device,
    Event,
    Limits,
    PortState,
    QueuePair,
    Registration,
    Verbs,
    VerbsError,
)


def load(*, extended: bool = True) -> Verbs:
    """Verbs by pyverbs. Raises TransportUnavailable with the reason and the remedy.

    `extended=False` posts by ibv_post_send even where the driver has extended queue pairs.
    """
    try:
        return _Verbs(extended)
    except ImportError as error:
        raise TransportUnavailable(_why_not(error)) from error


REMEDY = (
    "pyverbs must match this machine's libibverbs, so take it from where that came from: "
    "`apt install python3-pyverbs` (Debian, Ubuntu), `dnf install python3-pyverbs` (Fedora, RHEL), "
    "and make it visible to this interpreter (see the README of tent-rdma)"
)


def _why_not(error: ImportError) -> str:
    if "IBVERBS_PRIVATE" in str(error) or "undefined symbol" in str(error):
        return (
            f"pyverbs is installed but does not match this machine's libibverbs ({error}): {REMEDY}"
        )
    return f"pyverbs cannot be imported ({error}): {REMEDY}"


_NO_REASON = -1
"""What pyverbs says for an error code where it has none; not EPERM, which it would say as 1."""


class _Verbs:
    def __init__(self, extended: bool) -> None:
        import pyverbs.addr
        import pyverbs.cq
        import pyverbs.device
        import pyverbs.enums
        import pyverbs.mr
        import pyverbs.pd
        import pyverbs.qp
        import pyverbs.wr
        from pyverbs.pyverbs_error import PyverbsError

        self.extended = extended
        self.addr, self.cq, self.device = pyverbs.addr, pyverbs.cq, pyverbs.device
        self.e, self.mr, self.pd = pyverbs.enums, pyverbs.mr, pyverbs.pd
        self.qp, self.wr, self.error = pyverbs.qp, pyverbs.wr, PyverbsError

    def devices(self) -> list[str]:
        with self.named("list the RDMA devices"):
            return [device.name.decode() for device in self.device.get_device_list()]

    def open(self, name: str) -> Device:
        if name not in self.devices():
            raise VerbsError(f"cannot open the RDMA device {name}", errno.ENODEV)
        return _Device(self, name)

    @contextlib.contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Errors of the library as VerbsError, with what was asked."""
        try:
            yield
        except self.error as error:
            raise self.failure(what, error) from error

    def failure(self, what: str, error: Exception) -> VerbsError:
        """An error of the library as ours."""
        number = int(getattr(error, "error_code", 0) or 0)
        if number == _NO_REASON:
            number = 0
        return VerbsError(f"cannot {what} ({error})", abs(number))

    @contextlib.contextmanager
    def taking(self, what: str, fd: int) -> Iterator[None]:
        """Errors of taking an event; EAGAIN if there is none, which pyverbs keeps to itself."""
        try:
            yield
        except self.error as error:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if not poll.poll(0):
                raise VerbsError(f"cannot take {what}: there is none", errno.EAGAIN) from error
            raise self.failure(f"take {what}", error) from error

    def closing(self, what: str, thing: Any) -> None:
        with self.named(f"close {what}"):
            thing.close()


_descriptors = threading.Lock()
"""Taken while a descriptor is made that the library does not show; a leaf."""


def _made_by(make: Callable[[], Any], what: str) -> tuple[Any, int]:
    """What `make()` answers, and the event descriptor that it has opened.

    pyverbs shows neither the descriptor of a completion channel nor that of a context's events, and its
    blocking calls keep the GIL: without the descriptor nobody could sleep. So what appeared is looked for.
    Another thread that opens one of this kind at this moment makes it ambiguous; then it is made again.
    """
    for _ in range(8):
        with _descriptors:
            before = _event_descriptors()
            made = make()
            new = _event_descriptors() - before
        if len(new) == 1:
            fd = new.pop()
            os.set_blocking(fd, False)  # taking an event that is not there fails instead of hanging
            return made, fd
        made.close()
    raise VerbsError(f"cannot tell the descriptor of {what} among {len(new)} new ones", 0)


def _event_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[infinibandevent]":
                found.add(int(name))
    return found


class _Device:
    def __init__(self, verbs: _Verbs, name: str) -> None:
        self.name = name
        self._v = verbs
        with verbs.named(f"open the RDMA device {name}"):
            self._context, self._fd = _made_by(
                lambda: verbs.device.Context(name=name), f"the events of {name}"
            )
            try:
                a = self._context.query_device()
                self._pd = verbs.pd.PD(self._context)
            except BaseException:
                self._context.close()
                raise
        self.limits = Limits(
            max_registration=a.max_mr_size,
            max_registrations=a.max_mr,
            max_queue_pairs=a.max_qp,
            max_work_requests=a.max_qp_wr,
            max_completions=a.max_cqe,
            max_reads=min(a.max_qp_rd_atom, a.max_qp_init_rd_atom),
        )
        self._events = _events(verbs.e)

    def port(self, number: int) -> PortState:
        with self._v.named(f"query port {number} of {self.name}"):
            p = self._context.query_port(number)
        e = self._v.e
        return PortState(
            active=p.state == e.IBV_PORT_ACTIVE,
            ethernet=p.link_layer == e.IBV_LINK_LAYER_ETHERNET,
            lid=p.lid,
            mtu=128 << p.active_mtu,  # enum ibv_mtu: 1 is 256 bytes, 5 is 4096
        )

    def register(
        self, address: int, length: int, *, remote_read: bool, remote_write: bool
    ) -> Registration:
        access = self._access(remote_read, remote_write)
        with self._v.named(f"register {length} bytes at {address:#x} on {self.name}"):
            region = self._v.mr.MR(self._pd, length, access, address=address)
        return _Registration(self._v, region, address, length)

    def register_dmabuf(
        self, fd: int, offset: int, length: int, *, remote_read: bool, remote_write: bool
    ) -> Registration:
        access = self._access(remote_read, remote_write)
        if not hasattr(self._v.mr, "DmaBufMR"):
            raise VerbsError("register a dma-buf: this pyverbs has no DmaBufMR", errno.ENOTSUP)
        with self._v.named(f"register {length} bytes of a dma-buf on {self.name}"):
            region = self._v.mr.DmaBufMR(self._pd, length, access, dmabuf=fd, offset=offset)
        return _Registration(self._v, region, offset, length)

    def _access(self, remote_read: bool, remote_write: bool) -> int:
        e = self._v.e
        access = e.IBV_ACCESS_LOCAL_WRITE
        if remote_read:
            access |= e.IBV_ACCESS_REMOTE_READ
        if remote_write:
            access |= e.IBV_ACCESS_REMOTE_WRITE
        return int(access)

    def channel(self) -> Channel:
        with self._v.named(f"make a completion channel on {self.name}"):
            made, fd = _made_by(
                lambda: self._v.cq.CompChannel(self._context), f"a channel of {self.name}"
            )
        return _Channel(self._v, made, fd)

    def completion_queue(self, depth: int, channel: Channel | None = None) -> CompletionQueue:
        assert channel is None or isinstance(channel, _Channel)
        with self._v.named(f"make a completion queue of {depth} on {self.name}"):
            queue = self._v.cq.CQ(
                self._context, depth, None, None if channel is None else channel.made, 0
            )
        return _CompletionQueue(self._v, queue)

    def queue_pair(
        self,
        port: int,
        sends: CompletionQueue,
        receives: CompletionQueue,
        *,
        send_depth: int,
        receive_depth: int = 1,
        remote_read: bool = True,
        remote_write: bool = True,
    ) -> QueuePair:
        assert isinstance(sends, _CompletionQueue)
        assert isinstance(receives, _CompletionQueue)
        v = self._v
        cap = v.qp.QPCap(
            max_send_wr=send_depth, max_recv_wr=receive_depth, max_send_sge=1, max_recv_sge=1
        )
        with v.named(f"make a queue pair on {self.name}"):
            made = make_queue_pair(
                v,
                self._context,
                self._pd,
                sends.made,
                receives.made,
                cap,
                extended=v.extended,
            )
            try:
                made.to_init(port, self._access(remote_read, remote_write))
            except BaseException:
                made.close()
                raise
        return made

    def fileno(self) -> int:
        return self._fd

    def next_event(self) -> Event:
        with self._v.taking(f"an event of {self.name}", self._fd):
            event = self._context.get_async_event()
            event.ack()
        return self._events.get(event.event_type, Event.OTHER)

    def close(self) -> None:
        self._v.closing(f"the protection domain of {self.name}", self._pd)
        self._v.closing(self.name, self._context)


def _events(e: Any) -> dict[int, Event]:
    return {
        e.IBV_EVENT_PORT_ACTIVE: Event.PORT_ACTIVE,
        e.IBV_EVENT_PORT_ERR: Event.PORT_DOWN,
        e.IBV_EVENT_LID_CHANGE: Event.ADDRESS_CHANGED,
        e.IBV_EVENT_GID_CHANGE: Event.ADDRESS_CHANGED,
        e.IBV_EVENT_DEVICE_FATAL: Event.FATAL,
        e.IBV_EVENT_QP_FATAL: Event.QUEUE_PAIR,
        e.IBV_EVENT_QP_REQ_ERR: Event.QUEUE_PAIR,
        e.IBV_EVENT_QP_ACCESS_ERR: Event.QUEUE_PAIR,
    }


class _Registration:
    def __init__(self, verbs: _Verbs, made: Any, iova: int, length: int) -> None:
        self._v, self._made = verbs, made
        self.lkey, self.rkey = made.lkey, made.rkey
        self.iova, self.length = iova, length

    def close(self) -> None:
        self._v.closing(f"a registration of {self.length} bytes", self._made)


class _Channel:
    def __init__(self, verbs: _Verbs, made: Any, fd: int) -> None:
        self._v, self.made, self._fd = verbs, made, fd

    def fileno(self) -> int:
        return self._fd

    def take(self, queue: CompletionQueue) -> None:
        assert isinstance(queue, _CompletionQueue)
        with self._v.taking("a completion event", self._fd):
            self.made.get_cq_event(queue.made)
            queue.made.ack_events(1)

    def close(self) -> None:
        self._v.closing("a completion channel", self.made)


class _CompletionQueue:
    def __init__(self, verbs: _Verbs, made: Any) -> None:
        self._v, self.made = verbs, made

    def poll(self, limit: int) -> list[Completion]:
        try:
            count, found = self.made.poll(limit)
        except self._v.error as error:
            raise self._v.failure("poll a completion queue", error) from error
        if count == 0:
            return []
        return [Completion(c.wr_id, c.status, c.byte_len, c.qp_num) for c in found]

    def arm(self) -> None:
        with self._v.named("arm a completion queue"):
            self.made.req_notify(0)

    def close(self) -> None:
        self._v.closing("a completion queue", self.made)
