"""An open device and what is made of it, save queue pairs."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections import deque
from collections.abc import Iterator
from typing import Any

from tent_mock.verbs.counts import Kind
from tent_mock.verbs.nic import Nic
from tent_mock.verbs.queue_pair import InstantQueuePair, QueuePair

_libc = ctypes.CDLL(None, use_errno=True)


class Thing:
    """What is made of a device: counted when it is made and once when it is closed."""

    kind: Kind

    def __init__(self, device: Device) -> None:
        self.device = device
        self.nic = device.nic
        self.closed = False
        self.users = 0
        """How many things stand on this one and must be closed before."""
        self.nic.counts.made[self.kind] += 1
        device.users += 1

    def close(self) -> None:
        """Idempotent. EBUSY while something stands on it."""
        with self.closing(self.kind, self) as first:
            if first:
                self.device.users -= 1
                self._close()

    def _close(self) -> None:
        """What goes with it; with the lock held."""

    @staticmethod
    @contextlib.contextmanager
    def closing(kind: Kind, thing: Thing | Device) -> Iterator[bool]:
        """Around a close: whether this is the one that does it; holds the lock inside."""
        nic = thing.nic
        if not thing.closed:
            nic.enter(f"close_{kind}")  # type: ignore[arg-type]  # one of Operation
        with nic.fabric.lock:
            if thing.closed:
                nic.counts.closed_again[kind] += 1
                yield False
                return
            if thing.users:
                raise nic.error(f"close a {kind} with {thing.users} users", errno.EBUSY)
            yield True
            thing.closed = True
            nic.counts.closed[kind] += 1


class Registration(Thing):
    """Pinned memory."""

    kind = "registration"

    def __init__(
        self, device: Device, address: int, length: int, iova: int, access: tuple[bool, bool]
    ) -> None:
        super().__init__(device)
        self.address, self.iova, self.length = address, iova, length
        self.remote_read, self.remote_write = access
        fabric, nic = device.nic.fabric, device.nic
        self.lkey, self.rkey = next(fabric.keys), next(fabric.keys)
        nic.by_lkey[self.lkey] = nic.by_rkey[self.rkey] = self
        nic.counts.pinned += length
        self.mapped: mmap.mmap | None = None

    def place(self, address: int, length: int) -> int | None:
        """Where the bytes are that a work request names, or None if it names some outside."""
        offset = address - self.iova
        inside = offset >= 0 and length <= self.length - offset
        return self.address + offset if inside else None

    def _close(self) -> None:
        self.nic.by_lkey.pop(self.lkey)
        self.nic.by_rkey.pop(self.rkey)
        self.nic.counts.pinned -= self.length
        self.mapped = None


class Channel(Thing):
    """Where armed completion queues say that something has completed."""

    kind = "channel"

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._fd = _descriptor()
        self.events: deque[CompletionQueue] = deque()

    def fileno(self) -> int:
        """Readable when an event waits."""
        return self._fd

    def tell(self, queue: CompletionQueue) -> None:
        """Queue an event; with the lock held."""
        self.events.append(queue)
        os.eventfd_write(self._fd, 1)

    def take(self, queue: Any) -> None:
        """Take the oldest event. EAGAIN when there is none, where a real one would wait without end."""
        self.nic.enter("take")
        with self.nic.fabric.lock:
            if not self.events:
                raise self.nic.error("take a completion event: there is none", errno.EAGAIN)
            os.eventfd_read(self._fd)
            if self.events.popleft() is not queue:
                raise self.nic.error("take the event of another completion queue", 0)

    def _close(self) -> None:
        os.close(self._fd)


class CompletionQueue(Thing):
    """Where work requests say how they ended."""

    kind = "completion_queue"

    def __init__(self, device: Device, depth: int, channel: Channel | None) -> None:
        super().__init__(device)
        self.depth = depth
        self._channel = channel
        if channel is not None:
            channel.users += 1
        self._armed = False
        self._entries: deque[tuple[Any, QueuePair | None, int]] = deque()
        self.ready: deque[Any] = deque()
        """Completions of instant queue pairs, which have nothing to be given back."""
        self._instant = self.nic.fabric.instant

    def push(self, completion: Any, queue_pair: QueuePair | None, places: int) -> None:
        """Add one, that gives back `places` of its queue pair's send queue; with the lock held.

        One that has no room is lost, and the device says so.
        """
        if len(self._entries) >= self.depth:
            self.nic.counts.overflows += 1
            self.device.tell(self.nic.fabric.words.Event["OTHER"])
            return
        self._entries.append((completion, queue_pair, places))
        self.ring()

    def ring(self) -> None:
        """Tell the channel, if this was asked for."""
        if self._armed:
            self._armed = False
            if self._channel is not None:
                self._channel.tell(self)

    def poll(self, limit: int) -> list[Any]:
        """Up to `limit` completions, oldest first."""
        counts = self.nic.counts
        counts.polls += 1
        if self._instant and self.ready:
            ready = self.ready
            found = [ready.popleft() for _ in range(min(limit, len(ready)))]
            counts.polled += len(found)
            return found
        self.nic.enter("poll")
        with self.nic.fabric.lock:
            found = []
            while self._entries and len(found) < limit:
                completion, queue_pair, places = self._entries.popleft()
                if queue_pair is not None:
                    queue_pair.free += places
                found.append(completion)
            counts.polled += len(found)
            return found

    def arm(self) -> None:
        """One event at the next completion; those that are there already make none."""
        self.nic.enter("arm")
        with self.nic.fabric.lock:
            self._armed = True

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.users -= 1


class Device:
    """An open context with its protection domain."""

    kind: Kind = "device"

    def __init__(self, nic: Nic) -> None:
        self.nic = nic
        self.name = nic.name
        self.limits = nic.limits
        self.closed = False
        self.users = 0
        self._events: deque[Any] = deque()
        with nic.fabric.lock:
            self._fd = _descriptor()
            nic.counts.made["device"] += 1
            nic.contexts.append(self)

    def port(self, number: int) -> Any:
        """The port, which is number 1."""
        nic = self.nic
        nic.enter("port")
        if number != 1:
            raise nic.error(f"query port {number}", errno.EINVAL)
        return nic.fabric.words.PortState(
            active=nic.active and not nic.dead, ethernet=nic.ethernet, lid=nic.lid, mtu=nic.mtu
        )

    def register(
        self, address: int, length: int, *, remote_read: bool, remote_write: bool
    ) -> Registration:
        """Register mapped memory; EFAULT if it is not mapped."""
        nic = self.nic
        nic.enter("register")
        with nic.fabric.lock:
            self._may_register(length)
            if not _is_mapped(address, length):
                raise nic.error(f"register {length} bytes at {address:#x}", errno.EFAULT)
            return Registration(self, address, length, address, (remote_read, remote_write))

    def register_dmabuf(
        self, fd: int, offset: int, length: int, *, remote_read: bool, remote_write: bool
    ) -> Registration:
        """Register what a descriptor refers to; anything that can be mapped stands for a dma-buf."""
        nic = self.nic
        nic.enter("register")
        with nic.fabric.lock:
            self._may_register(length)
            try:
                mapped = mmap.mmap(fd, offset + length)
            except (OSError, ValueError) as error:
                raise nic.error(f"map a dma-buf ({error})", errno.EINVAL) from error
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapped)) + offset
            made = Registration(self, address, length, offset, (remote_read, remote_write))
            made.mapped = mapped
            return made

    def _may_register(self, length: int) -> None:
        if length > self.limits.max_registration:
            raise self.nic.error(f"register {length} bytes", errno.EINVAL)
        self.nic.refuse_beyond("registration", length)

    def channel(self) -> Channel:
        """A completion channel."""
        self.nic.enter("channel")
        with self.nic.fabric.lock:
            return Channel(self)

    def completion_queue(self, depth: int, channel: Any = None) -> CompletionQueue:
        """A completion queue of exactly `depth`."""
        self.nic.enter("completion_queue")
        if not 0 < depth <= self.limits.max_completions:
            raise self.nic.error(f"make a completion queue of {depth}", errno.EINVAL)
        with self.nic.fabric.lock:
            return CompletionQueue(self, depth, channel)

    def queue_pair(
        self,
        port: int,
        sends: Any,
        receives: Any,
        *,
        send_depth: int,
        receive_depth: int = 1,
        remote_read: bool = True,
        remote_write: bool = True,
    ) -> QueuePair:
        """A queue pair in INIT, of exactly these depths."""
        nic = self.nic
        nic.enter("queue_pair")
        if port != 1 or not 0 < send_depth <= self.limits.max_work_requests:
            raise nic.error(f"make a queue pair at port {port} of {send_depth}", errno.EINVAL)
        with nic.fabric.lock:
            nic.refuse_beyond("queue_pair")
            make = InstantQueuePair if nic.fabric.instant else QueuePair
            return make(
                self, sends, receives, send_depth, receive_depth, (remote_read, remote_write)
            )

    def tell(self, event: Any) -> None:
        """Queue an asynchronous event; with the lock held."""
        self._events.append(event)
        os.eventfd_write(self._fd, 1)

    def fileno(self) -> int:
        """Readable when `next_event` has one."""
        return self._fd

    def next_event(self) -> Any:
        """Take one event; EAGAIN when there is none."""
        self.nic.enter("next_event")
        with self.nic.fabric.lock:
            if not self._events:
                raise self.nic.error("take an event: there is none", errno.EAGAIN)
            os.eventfd_read(self._fd)
            return self._events.popleft()

    def close(self) -> None:
        """Close; EBUSY while anything made of it is open."""
        with Thing.closing("device", self) as first:
            if first:
                self.nic.contexts.remove(self)
                os.close(self._fd)


def _descriptor() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)


def _is_mapped(address: int, length: int) -> bool:
    """Whether every page of a range is mapped (mincore(2)), so that touching it is no crash."""
    page = mmap.PAGESIZE
    first = address // page * page
    span = address + length - first
    vector = ctypes.create_string_buffer(max(1, -(-span // page)))
    if span <= 0:
        return True
    return bool(_libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(span), vector) == 0)
