"""Verbs by pyverbs: the only module that imports it."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tent_core.errors import TransportUnavailable
from tent_core.types import Opcode
from tent_rdma.verbs import (
    Channel,
    Columns,
    Completion,
    CompletionQueue,
    Device,
    Event,
    Limits,
    PortState,
    QueuePair,
    Registration,
    Route,
    Verbs,
    VerbsError,
)


def load() -> Verbs:
    """Verbs by pyverbs. Raises TransportUnavailable with the reason and the remedy."""
    try:
        return _Verbs()
    except ImportError as error:
        raise TransportUnavailable(_why_not(error)) from error


def _why_not(error: ImportError) -> str:
    remedy = (
        "pyverbs must match this machine's libibverbs, so take it from where that came from: "
        "`apt install python3-pyverbs` (Debian, Ubuntu), `dnf install python3-pyverbs` (Fedora, RHEL), "
        "and make it visible to this interpreter (see the README of tent-rdma)"
    )
    if "IBVERBS_PRIVATE" in str(error) or "undefined symbol" in str(error):
        return (
            f"pyverbs is installed but does not match this machine's libibverbs ({error}): {remedy}"
        )
    return f"pyverbs cannot be imported ({error}): {remedy}"


class _Verbs:
    def __init__(self) -> None:
        import pyverbs.addr
        import pyverbs.cq
        import pyverbs.device
        import pyverbs.enums
        import pyverbs.mr
        import pyverbs.pd
        import pyverbs.qp
        import pyverbs.wr
        from pyverbs.pyverbs_error import PyverbsError

        self.addr, self.cq, self.device = pyverbs.addr, pyverbs.cq, pyverbs.device
        self.e, self.mr, self.pd = pyverbs.enums, pyverbs.mr, pyverbs.pd
        self.qp, self.wr, self.error = pyverbs.qp, pyverbs.wr, PyverbsError

    def devices(self) -> list[str]:
        with self.named("list the RDMA devices"):
            return [device.name.decode() for device in self.device.get_device_list()]

    def open(self, name: str) -> Device:
        return _Device(self, name)

    @contextlib.contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Errors of the library as VerbsError, with what was asked."""
        try:
            yield
        except self.error as error:
            number = getattr(error, "error_code", 0) or 0
            raise VerbsError(f"cannot {what} ({error})", abs(int(number))) from error

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
            return made, new.pop()
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
        v, e = self._v, self._v.e
        cap = v.qp.QPCap(
            max_send_wr=send_depth, max_recv_wr=receive_depth, max_send_sge=1, max_recv_sge=1
        )
        with v.named(f"make a queue pair on {self.name}"):
            init = v.qp.QPInitAttrEx(
                qp_type=e.IBV_QPT_RC,
                scq=sends.made,
                rcq=receives.made,
                cap=cap,
                pd=self._pd,
                comp_mask=e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                send_ops_flags=e.IBV_QP_EX_WITH_RDMA_WRITE
                | e.IBV_QP_EX_WITH_RDMA_READ
                | e.IBV_QP_EX_WITH_SEND,
            )
            extended = True
            try:
                # Without attributes: with them pyverbs brings it up by itself, with no access flags.
                made = v.qp.QPEx(self._context, init)
            except v.error as error:
                if getattr(error, "error_code", 0) not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                extended = False
                plain = v.qp.QPInitAttr(
                    qp_type=e.IBV_QPT_RC, scq=sends.made, rcq=receives.made, cap=cap
                )
                made = v.qp.QP(self._pd, plain)
            try:
                attr = v.qp.QPAttr(qp_state=e.IBV_QPS_INIT, port_num=port)
                attr.pkey_index = 0
                attr.qp_access_flags = self._access(remote_read, remote_write)
                made.modify(
                    attr,
                    e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS,
                )
            except BaseException:
                made.close()
                raise
        return _QueuePair(v, made) if extended else _PlainQueuePair(v, made)

    def fileno(self) -> int:
        return self._fd

    def next_event(self) -> Event:
        with self._v.named(f"take an event of {self.name}"):
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
        with self._v.named("take a completion event"):
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
            raise VerbsError(f"cannot poll a completion queue ({error})", 0) from error
        if count == 0:
            return []
        return [Completion(c.wr_id, c.status, c.byte_len, c.qp_num) for c in found]

    def arm(self) -> None:
        with self._v.named("arm a completion queue"):
            self.made.req_notify(0)

    def close(self) -> None:
        self._v.closing("a completion queue", self.made)


class _PlainQueuePair:
    """By ibv_post_send, an object a request: where the driver has no extended queue pairs."""

    def __init__(self, verbs: _Verbs, made: Any) -> None:
        self._v, self._made = verbs, made
        self.number: int = made.qp_num

    def connect(self, route: Route, psn: int) -> None:
        v, e = self._v, self._v.e
        with v.named(f"connect queue pair {self.number} to {route.number} at {route.gid}"):
            attr = v.qp.QPAttr(qp_state=e.IBV_QPS_RTR, port_num=route.port)
            attr.path_mtu = route.mtu.bit_length() - 8  # 256 bytes are 1
            attr.dest_qp_num = route.number
            attr.rq_psn = route.psn
            attr.max_dest_rd_atomic = route.reads
            attr.min_rnr_timer = 12  # 0.64 ms until a receiver that was not ready is asked again
            attr.ah_attr = v.addr.AHAttr(
                dlid=route.lid,
                sl=route.service_level,
                port_num=route.port,
                is_global=1,
                gr=v.addr.GlobalRoute(
                    dgid=v.addr.GID(route.gid),
                    sgid_index=route.gid_index,
                    hop_limit=64,
                    traffic_class=route.traffic_class,
                ),
            )
            made = self._made
            made.modify(
                attr,
                e.IBV_QP_STATE
                | e.IBV_QP_AV
                | e.IBV_QP_PATH_MTU
                | e.IBV_QP_DEST_QPN
                | e.IBV_QP_RQ_PSN
                | e.IBV_QP_MAX_DEST_RD_ATOMIC
                | e.IBV_QP_MIN_RNR_TIMER,
            )
            attr = v.qp.QPAttr(qp_state=e.IBV_QPS_RTS, port_num=route.port)
            attr.timeout = route.timeout
            attr.retry_cnt = route.retries
            attr.rnr_retry = 7  # without end: the queue of the other end is slow, not gone
            attr.sq_psn = psn
            attr.max_rd_atomic = route.reads
            made.modify(
                attr,
                e.IBV_QP_STATE
                | e.IBV_QP_TIMEOUT
                | e.IBV_QP_RETRY_CNT
                | e.IBV_QP_RNR_RETRY
                | e.IBV_QP_SQ_PSN
                | e.IBV_QP_MAX_QP_RD_ATOMIC,
            )

    def post(self, opcode: Opcode, columns: Columns, wr_id: int) -> None:
        e, wr = self._v.e, self._v.wr
        code = e.IBV_WR_RDMA_WRITE if opcode is Opcode.WRITE else e.IBV_WR_RDMA_READ
        following = None
        for local, lkey, remote, rkey, length in reversed(columns.tolist()):
            request = wr.SendWR(
                wr_id=wr_id,
                opcode=code,
                num_sge=1,
                sg=[wr.SGE(local, length, lkey)],
                send_flags=e.IBV_SEND_SIGNALED if following is None else 0,
                next_wr=following,
            )
            request.set_wr_rdma(rkey, remote)
            following = request
        with self._v.named(f"post {len(columns)} requests on queue pair {self.number}"):
            self._made.post_send(following)

    def post_send(self, wr_id: int, address: int, lkey: int, length: int) -> None:
        e, wr = self._v.e, self._v.wr
        with self._v.named(f"post a send on queue pair {self.number}"):
            self._made.post_send(
                wr.SendWR(
                    wr_id=wr_id,
                    opcode=e.IBV_WR_SEND,
                    num_sge=1,
                    sg=[wr.SGE(address, length, lkey)],
                    send_flags=e.IBV_SEND_SIGNALED,
                )
            )

    def post_receive(self, wr_id: int, address: int, lkey: int, length: int) -> None:
        wr = self._v.wr
        with self._v.named(f"post a receive on queue pair {self.number}"):
            self._made.post_recv(
                wr.RecvWR(wr_id=wr_id, num_sge=1, sg=[wr.SGE(address, length, lkey)])
            )

    def to_error(self) -> None:
        v, e = self._v, self._v.e
        with v.named(f"put queue pair {self.number} in error"):
            self._made.modify(v.qp.QPAttr(qp_state=e.IBV_QPS_ERR), e.IBV_QP_STATE)

    def close(self) -> None:
        self._v.closing(f"queue pair {self.number}", self._made)


class _QueuePair(_PlainQueuePair):
    """By ibv_wr_start and its like: no object for a request."""

    def __init__(self, verbs: _Verbs, made: Any) -> None:
        super().__init__(verbs, made)
        self._sge = verbs.wr.SGE(0, 0, 0)
        self._signalled = int(verbs.e.IBV_SEND_SIGNALED)

    def post(self, opcode: Opcode, columns: Columns, wr_id: int) -> None:
        qp, sge = self._made, self._sge
        begin = qp.wr_rdma_write if opcode is Opcode.WRITE else qp.wr_rdma_read
        rows = columns.tolist()
        last = len(rows) - 1
        try:
            qp.wr_start()
            qp.wr_id, qp.wr_flags = wr_id, 0
            for i, (local, lkey, remote, rkey, length) in enumerate(rows):
                if i == last:
                    qp.wr_flags = self._signalled
                begin(rkey, remote)
                sge.addr, sge.lkey, sge.length = local, lkey, length
                qp.wr_set_sge(sge)
            qp.wr_complete()
        except self._v.error as error:
            number = abs(int(getattr(error, "error_code", 0) or 0))
            raise VerbsError(
                f"cannot post {len(rows)} requests on queue pair {self.number} ({error})", number
            ) from error
