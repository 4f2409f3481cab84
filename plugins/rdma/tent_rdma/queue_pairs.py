"""Queue pairs by pyverbs: two ways to post, the extended one and the one that every driver has.

pyverbs is not imported here but passed, as what `tent_rdma.by_pyverbs` has loaded.
"""

from __future__ import annotations

import contextlib
import errno
from typing import Any, Protocol

from tent_core.types import Opcode
from tent_rdma.verbs import Columns, Route, VerbsError


class Library(Protocol):
    """The modules of pyverbs that are used here, and its errors as ours."""

    addr: Any
    e: Any
    qp: Any
    wr: Any
    error: type[Exception]

    def named(self, what: str) -> contextlib.AbstractContextManager[None]: ...

    def failure(self, what: str, error: Exception) -> VerbsError: ...

    def closing(self, what: str, thing: Any) -> None: ...


UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""How drivers say that they have no extended queue pairs, or none with these operations."""


def make_queue_pair(
    v: Library, context: Any, domain: Any, sends: Any, receives: Any, cap: Any, *, extended: bool
) -> PlainQueuePair:
    """A queue pair in RESET, extended if that is wanted and the driver can. Raises what pyverbs raises."""
    if extended:
        try:
            return ExtendedQueuePair(v, _extended(v, context, domain, sends, receives, cap))
        except v.error as error:
            if getattr(error, "error_code", 0) not in UNSUPPORTED:
                raise
    # pyverbs would ask for a completion of every request here, though not of extended queue pairs.
    init = v.qp.QPInitAttr(qp_type=v.e.IBV_QPT_RC, scq=sends, rcq=receives, cap=cap, sq_sig_all=0)
    return PlainQueuePair(v, v.qp.QP(domain, init))


def _extended(v: Library, context: Any, domain: Any, sends: Any, receives: Any, cap: Any) -> Any:
    e = v.e
    init = v.qp.QPInitAttrEx(
        qp_type=e.IBV_QPT_RC,
        scq=sends,
        rcq=receives,
        cap=cap,
        pd=domain,
        comp_mask=e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        send_ops_flags=e.IBV_QP_EX_WITH_RDMA_WRITE
        | e.IBV_QP_EX_WITH_RDMA_READ
        | e.IBV_QP_EX_WITH_SEND,
    )
    # Without attributes: with them pyverbs brings it up by itself, with no access flags.
    return v.qp.QPEx(context, init)


class PlainQueuePair:
    """By ibv_post_send, an object a request: where the driver has no extended queue pairs."""

    def __init__(self, verbs: Library, made: Any) -> None:
        self._v, self._made = verbs, made
        self.number: int = made.qp_num

    def to_init(self, port: int, access: int) -> None:
        """From RESET to INIT, with what peers may do by it. Raises what pyverbs raises."""
        e = self._v.e
        attr = self._v.qp.QPAttr(qp_state=e.IBV_QPS_INIT, port_num=port)
        attr.pkey_index = 0
        attr.qp_access_flags = access
        self._made.modify(
            attr, e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS
        )

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
        chain: list[Any] = []  # from the end; pyverbs links requests without keeping them alive
        for local, lkey, remote, rkey, length in reversed(columns.tolist()):
            request = wr.SendWR(
                wr_id=wr_id,
                opcode=code,
                num_sge=1,
                sg=[wr.SGE(local, length, lkey)],
                send_flags=0 if chain else e.IBV_SEND_SIGNALED,
                next_wr=chain[-1] if chain else None,
            )
            request.set_wr_rdma(rkey, remote)
            chain.append(request)
        if not chain:
            return
        try:
            with self._v.named(f"post {len(chain)} requests on queue pair {self.number}"):
                self._made.post_send(chain[-1])
        except VerbsError:
            # ibv_post_send leaves those posted that come before the one that it did not take: they must not
            # go on unseen.
            if len(chain) > 1:
                with contextlib.suppress(VerbsError):
                    self.to_error()
            raise

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


class ExtendedQueuePair(PlainQueuePair):
    """By ibv_wr_start and its like: no object for a request."""

    def __init__(self, verbs: Library, made: Any) -> None:
        super().__init__(verbs, made)
        self._sge = verbs.wr.SGE(0, 0, 0)
        self._signalled = int(verbs.e.IBV_SEND_SIGNALED)

    def post(self, opcode: Opcode, columns: Columns, wr_id: int) -> None:
        qp, sge = self._made, self._sge
        begin = qp.wr_rdma_write if opcode is Opcode.WRITE else qp.wr_rdma_read
        set_sge = qp.wr_set_sge
        rows = columns.tolist()
        last = len(rows) - 1
        try:
            qp.wr_start()
            try:
                qp.wr_id, qp.wr_flags = wr_id, 0
                for i, (local, lkey, remote, rkey, length) in enumerate(rows):
                    if i == last:
                        qp.wr_flags = self._signalled
                    begin(rkey, remote)
                    sge.addr, sge.lkey, sge.length = local, lkey, length
                    set_sge(sge)
            except BaseException:
                qp.wr_abort()  # or some drivers keep a lock
                raise
            qp.wr_complete()
        except self._v.error as error:
            what = f"post {len(rows)} requests on queue pair {self.number}"
            raise self._v.failure(what, error) from error
