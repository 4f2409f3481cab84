"""A queue pair, and how its work requests are carried out."""

from __future__ import annotations

import ctypes
import errno
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tent_core.types import Opcode
from tent_mock.verbs.nic import packed
from tent_mock.verbs.words import Status

if TYPE_CHECKING:
    from tent_mock.verbs.device import CompletionQueue, Device

SEND = -1
"""Beside `Opcode`, what a group of work requests can be."""


@dataclass
class _Group:
    """Work requests that were posted by one call; the last one is signalled."""

    order: int
    opcode: int
    rows: list[list[int]]
    wr_id: int
    at: int = 0


class _Receive(NamedTuple):
    wr_id: int
    address: int
    lkey: int
    length: int


class QueuePair:
    """A reliable connection. Its states are those of verbs: INIT, RTS and ERR."""

    def __init__(
        self,
        device: Device,
        sends: CompletionQueue,
        receives: CompletionQueue,
        send_depth: int,
        receive_depth: int,
        access: tuple[bool, bool],
    ) -> None:
        self.device, self.nic, self._fabric = device, device.nic, device.nic.fabric
        self.number = self.nic.number()
        self.state = "INIT"
        self.closed = False
        self.free = send_depth
        self.remote_read, self.remote_write = access
        self.psn = -1
        self.route: Any = None
        self._gid = b""
        self._sends, self._receives = sends, receives
        self._receive_depth = receive_depth
        self._groups: deque[_Group] = deque()
        self._rooms: deque[_Receive] = deque()
        self._silent = 0
        """Requests carried out since the last completion, whose places that one gives back."""
        for thing in (device, sends, receives):
            thing.users += 1
        self.nic.queue_pairs[self.number] = self
        self.nic.counts.made["queue_pair"] += 1

    def connect(self, route: Any, psn: int) -> None:
        """To RTS. EINVAL from any state but INIT, for a GID that is none or an MTU that the port has not."""
        self.nic.enter("connect")
        try:
            gid = packed(route.gid)
        except ValueError as error:
            raise self.nic.error(f"connect ({error})", errno.EINVAL) from error
        with self._fabric.lock:
            self._must_be("connect", "INIT")
            if route.port != 1 or not 256 <= route.mtu <= self.nic.mtu:
                raise self.nic.error(
                    f"connect by port {route.port} at MTU {route.mtu}", errno.EINVAL
                )
            self.route, self._gid, self.psn, self.state = route, gid, psn, "RTS"
        self._fabric.run()

    def post(self, opcode: Opcode, columns: Any, wr_id: int) -> None:
        """Post one-sided requests; ENOMEM and none of them when the send queue has no room for all."""
        self.nic.enter("post")
        self._post(int(opcode), columns.tolist(), wr_id)

    def post_send(self, wr_id: int, address: int, lkey: int, length: int) -> None:
        """Post a SEND, which waits until the other end has posted room for it."""
        self.nic.enter("post_send")
        self._post(SEND, [[address, lkey, 0, 0, length]], wr_id)

    def _post(self, opcode: int, rows: list[list[int]], wr_id: int) -> None:
        counts = self.nic.counts
        with self._fabric.lock:
            self._must_be("post", "RTS", "ERR")
            if not rows:
                return
            if len(rows) > self.free:
                raise self.nic.error(
                    f"post {len(rows)} requests where {self.free} have room", errno.ENOMEM
                )
            self.free -= len(rows)
            counts.posts += 1
            counts.posted += len(rows)
            counts.signalled += 1
            self._groups.append(_Group(next(self._fabric.orders), opcode, rows, wr_id))
            self.nic.pending[self] = None
        self._fabric.run()

    def post_receive(self, wr_id: int, address: int, lkey: int, length: int) -> None:
        """Post room; ENOMEM when there are as many as the depth.

        In ERR it waits to be flushed until something else happens to the queue pair, as on soft-RoCE.
        """
        self.nic.enter("post_receive")
        with self._fabric.lock:
            self._must_be("post a receive", "INIT", "RTS", "ERR")
            if len(self._rooms) >= self._receive_depth:
                raise self.nic.error("post another receive", errno.ENOMEM)
            self._rooms.append(_Receive(wr_id, address, lkey, length))
            self.nic.counts.receives += 1
        self._fabric.run()

    def to_error(self) -> None:
        """To ERR."""
        self.nic.enter("to_error")
        with self._fabric.lock:
            self._must_be("put in error", "INIT", "RTS", "ERR")
            self.fail()
        self._fabric.run()

    def close(self) -> None:
        """Destroy. What was outstanding is forgotten; what has completed stays in the completion queue."""
        if not self.closed:
            self.nic.enter("close_queue_pair")
        with self._fabric.lock:
            if self.closed:
                self.nic.counts.closed_again["queue_pair"] += 1
                return
            self.closed, self.state = True, "closed"
            del self.nic.queue_pairs[self.number]
            self.nic.pending.pop(self, None)
            for thing in (self.device, self._sends, self._receives):
                thing.users -= 1
            self.nic.counts.closed["queue_pair"] += 1

    # What follows is called with the fabric's lock held.

    def _must_be(self, what: str, *states: str) -> None:
        if self.state not in states:
            raise self.nic.error(
                f"{what}: queue pair {self.number} is {self.state}, not {' or '.join(states)}",
                errno.EINVAL,
            )

    def fail(self) -> None:
        """Into ERR; what is outstanding is flushed when its turn comes."""
        self.state = "ERR"
        if self._groups or self._rooms:
            self.nic.pending[self] = None

    def order(self) -> int:
        """When its oldest post was made."""
        return self._groups[0].order if self._groups else 0

    def runnable(self) -> bool:
        """Whether its next work request would not wait."""
        if self not in self.nic.pending:
            return False
        if self.state == "ERR":
            return True
        other = self._fabric.nic_at(self._gid)
        if self.nic.hangs or (other is not None and other.hangs):
            return False
        if self._groups[0].opcode == SEND:
            peer = self._peer()
            return peer is None or bool(peer._rooms)
        return True

    def execute(self) -> None:
        """Carry out its next work request, or flush it."""
        if self._groups:
            self._execute_send()
        else:
            room = self._rooms.popleft()
            self._complete(self._receives, room.wr_id, Status.FLUSHED)
        if not self._groups and not (self.state == "ERR" and self._rooms):
            self.nic.pending.pop(self, None)

    def _execute_send(self) -> None:
        group = self._groups[0]
        row = group.rows[group.at]
        group.at += 1
        last = group.at == len(group.rows)
        if last:
            self._groups.popleft()
        if self.state == "ERR":
            status: int = Status.FLUSHED
        else:
            injected = self._fabric.faults.of_work(self.nic.name)
            status = self._carry_out(group.opcode, row) if injected is None else injected
        self._silent += 1
        if status == Status.SUCCESS and not last:
            return
        places, self._silent = self._silent, 0
        self._complete(self._sends, group.wr_id, status, places=places)
        if status != Status.SUCCESS:
            self.fail()

    def _complete(
        self, queue: CompletionQueue, wr_id: int, status: int, *, length: int = 0, places: int = 0
    ) -> None:
        completion = self._fabric.words.Completion(wr_id, int(status), length, self.number)
        queue.push(completion, self if places else None, places)

    def _peer(self) -> QueuePair | None:
        """The other end, if packets of this one get there and are for it."""
        if not self.nic.active:
            return None
        peer = self._fabric.reach(self._gid, self.route.number)
        if peer is None or peer.state != "RTS":
            return None
        mutual = peer.route.number == self.number and peer._gid == self.nic.gid
        return peer if mutual and peer.route.psn == self.psn else None

    def _carry_out(self, opcode: int, row: list[int]) -> int:
        local, lkey, remote, rkey, length = row
        region = self.nic.by_lkey.get(lkey)
        place = region.place(local, length) if region and region.device is self.device else None
        if place is None:
            return Status.LOCAL_PROTECTION
        peer = self._peer()
        if peer is None:
            return Status.RETRIES_EXCEEDED if self.nic.active else self.nic.port_status
        if opcode == SEND:
            return self._deliver(peer, place, length)
        write = opcode == Opcode.WRITE
        there = peer.nic.by_rkey.get(rkey)
        allowed = (
            there is not None
            and there.device is peer.device
            and (there.remote_write and peer.remote_write if write else there.remote_read)
            and (write or peer.remote_read)
        )
        target = there.place(remote, length) if there and allowed else None
        if target is None:
            peer.fail()
            peer.device.tell(self._fabric.words.Event["QUEUE_PAIR"])
            return Status.REMOTE_ACCESS
        self._move(*((target, place) if write else (place, target)), length)
        return Status.SUCCESS

    def _deliver(self, peer: QueuePair, place: int, length: int) -> int:
        room = peer._rooms.popleft()
        region = peer.nic.by_lkey.get(room.lkey)
        target = None
        if region is not None and region.device is peer.device and length <= room.length:
            target = region.place(room.address, length)
        if target is None:
            status = Status.LOCAL_LENGTH if length > room.length else Status.LOCAL_PROTECTION
            peer._complete(peer._receives, room.wr_id, status)
            peer.fail()
            return Status.REMOTE_INVALID
        self._move(target, place, length)
        peer._complete(peer._receives, room.wr_id, Status.SUCCESS, length=length)
        return Status.SUCCESS

    def _move(self, target: int, source: int, length: int) -> None:
        self.nic.counts.moved += length
        if self._fabric.move:
            ctypes.memmove(target, source, length)


class InstantQueuePair(QueuePair):
    """One whose one-sided requests have succeeded as soon as they are posted, unchecked."""

    def post(self, opcode: Opcode, columns: Any, wr_id: int) -> None:
        """Count, and complete."""
        counts = self.nic.counts
        counts.posts += 1
        counts.posted += len(columns)
        counts.signalled += 1
        self._sends.ready.append(self._fabric.words.Completion(wr_id, 0, 0, self.number))
        self._sends.ring()
