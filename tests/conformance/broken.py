"""Transports with one fault each: what an author may get wrong, and no engine would notice."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np

from tent_core.descriptor import PeerKey
from tent_core.errors import TransportError
from tent_core.transport import BoundCall, Endpoint, LocalBuffer, Peer
from tent_core.types import Opcode, Status
from tent_core.work import Requests, Work
from tent_mock.table import Table
from tent_mock.transport import MockEndpoint, MockTransport

undo: list[Callable[[], object]] = []
"""What a test has to call at its end, to clean up behind these."""


class _Endpoint(MockEndpoint):
    """An endpoint whose `submit` is given the work by a faulty transport's `distort`."""

    def submit(self, work: Work) -> None:
        transport = self._transport
        assert isinstance(transport, Broken)
        transport.distort(super().submit, work)

    def close(self, reason: str) -> None:
        transport = self._transport
        assert isinstance(transport, Broken)
        transport.before_close()
        super().close(reason)


class Broken(MockTransport):
    """A mock transport; subclasses put one fault in."""

    claims: ClassVar[Mapping[str, Any]] = {}
    """Capabilities that differ from the mock's."""

    def connect(self, peer: Peer) -> Endpoint:
        made = super().connect(peer)
        made.__class__ = _Endpoint
        return made

    def distort(self, submit: Callable[[Work], None], work: Work) -> None:
        """Carry the work out, wrongly."""
        submit(work)

    def before_close(self) -> None:
        """An endpoint is about to close."""


class LeaksADescriptor(Broken):
    """Opens a file for each peer."""

    def connect(self, peer: Peer) -> Endpoint:
        descriptor = os.open(os.devnull, os.O_RDONLY)
        undo.append(lambda: os.close(descriptor))
        return super().connect(peer)


class AcknowledgesBeforeWriting(Broken):
    """Reports completion, and moves the bytes a little later."""

    def distort(self, submit: Callable[[Work], None], work: Work) -> None:
        if work.requests.opcode is Opcode.WRITE:
            later = Work(work.requests, lambda _: None)
            threading.Timer(0.1, lambda: submit(later)).start()
            work.complete()
        else:
            submit(work)


class BoundCallDoesNothing(Broken):
    """Its bound call says that it has done what it has not."""

    def connect(self, peer: Peer) -> Endpoint:
        endpoint = super().connect(peer)
        endpoint.bind = lambda requests: lambda: True
        return endpoint


class BoundCallIgnoresPermission(Broken):
    """Its bound call asks nobody for permission."""

    def connect(self, peer: Peer) -> Endpoint:
        endpoint = super().connect(peer)

        def bind(requests: Requests) -> BoundCall:
            there = requests.remote[0].tolist()
            here = requests.local[0].tolist()
            target, source = (there, here) if requests.opcode is Opcode.WRITE else (here, there)

            def call() -> bool:
                ctypes.memmove(target[0], source[0], here[1])
                return True

            return call

        endpoint.bind = bind
        return endpoint


class CompletesTwice(Broken):
    """Reports what it has reported."""

    def distort(self, submit: Callable[[Work], None], work: Work) -> None:
        submit(work)
        work.complete(0, 1)


class CompletesTwiceInABatch(Broken):
    """Reports the first request of a batch alone, and then the whole batch."""

    def distort(self, submit: Callable[[Work], None], work: Work) -> None:
        inner = Work(work.requests, lambda _: None)
        submit(inner)
        if len(work) > 1:
            work.complete(0, 1)
        _copy(inner, work)


class NeverReports(Broken):
    """Moves the bytes and forgets the last request of a batch."""

    def distort(self, submit: Callable[[Work], None], work: Work) -> None:
        inner = Work(work.requests, lambda _: None)
        submit(inner)
        if len(work) > 1:
            work.complete(0, len(work) - 1)
        else:
            _copy(inner, work)


class _Lenient(Table):
    """Looks at no permission, or at no range."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def _check(self, number: Any, generation: Any, ids: Any, rows: Any, needed: Any) -> None:
        if self._what == "permission":
            super()._check(number, generation, ids, rows, None)
        elif self._what == "generation":
            present = self.generations([number]).get(number, generation)
            super()._check(number, present, ids, rows, needed)
        else:
            super()._check(number, generation, ids[:0], rows[:0], needed)


class IgnoresPermission(Broken):
    """The owner's side carries out whatever is asked."""

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        self.table = _Lenient("permission")


class IgnoresGenerations(Broken):
    """The owner's side takes the id for the buffer."""

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        self.table = _Lenient("generation")


class IgnoresRanges(Broken):
    """The owner's side copies to any address."""

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        self.table = _Lenient("range")


class WritesPastTheEnd(Broken):
    """Copies in whole words of eight bytes."""

    def distort(self, submit: Callable[[Work], None], work: Work) -> None:
        inner = Work(work.requests, lambda _: None)
        submit(inner)
        if work.requests.opcode is Opcode.WRITE and set(inner.status.tolist()) == {
            Status.COMPLETED
        }:
            for address, length in work.requests.remote.tolist():
                if length % 8:
                    ctypes.memset(address + length, 0x55, 8 - length % 8)
        _copy(inner, work)


class HangsOnDeparture(Broken):
    """Waits in `close` for an answer of the peer that has gone."""

    def before_close(self) -> None:
        over = threading.Event()
        undo.append(over.set)
        over.wait(20)


class SwallowsErrors(Broken):
    """Reports as completed whatever has failed."""

    def distort(self, submit: Callable[[Work], None], work: Work) -> None:
        with suppress(TransportError):
            submit(Work(work.requests, lambda _: None))
        work.complete()


class CompletesWhatIsShort(Broken):
    """Moves the first half of each large request, and reports all of it."""

    def distort(self, submit: Callable[[Work], None], work: Work) -> None:
        r = work.requests
        for (local, length), (remote, _) in zip(r.local.tolist(), r.remote.tolist(), strict=True):
            to, source = (local, remote) if r.opcode is Opcode.READ else (remote, local)
            ctypes.memmove(to, source, length // 2 if length > 4096 else length)
        work.complete()


class KeepsAThreadPerPeer(Broken):
    """Serves each peer from a thread of its own, and ends it with the endpoint of the last."""

    def connect(self, peer: Peer) -> Endpoint:
        over = threading.Event()
        undo.append(over.set)
        threading.Thread(target=over.wait, args=(60,), name="serves-one-peer", daemon=True).start()
        return super().connect(peer)


class WritesOnAfterRemoval(Broken):
    """`remove_buffer` forgets nothing, and so stops nobody."""

    def remove_buffer(self, buffer: LocalBuffer, timeout: float) -> None:
        return


class MixesUpRows(Broken):
    """Writes the first two rows of a batch to each other's places."""

    def distort(self, submit: Callable[[Work], None], work: Work) -> None:
        r = work.requests
        if len(work) > 1 and r.local[0, 1] == r.local[1, 1]:
            r.local[[0, 1]] = r.local[[1, 0]]
            r.local_ids[[0, 1]] = r.local_ids[[1, 0]]
        submit(work)


class ClaimsNotifications(Broken):
    """Claims to carry notifications, and never has a channel."""

    claims: ClassVar[Mapping[str, Any]] = {"notifications": True}

    def exchange(self, peer: PeerKey, message: bytes) -> None:
        return None


class ClaimsProgress(Broken):
    """Claims partial progress, and never says how far it is."""

    claims: ClassVar[Mapping[str, Any]] = {"partial_progress": True}


class ForgetsWorkWhenItCloses(Broken):
    """Does not report what is under way when its endpoint closes."""

    def distort(self, submit: Callable[[Work], None], work: Work) -> None:
        if len(work) < 64:
            submit(work)


class NeedsAStart(Broken):
    """`stop` takes for granted that `start` has been called."""

    def stop(self) -> None:
        self.control.clear()
        super().stop()


def _copy(inner: Work, work: Work) -> None:
    """Report for `work` what became of `inner`."""
    for row in np.flatnonzero(inner.status != Status.COMPLETED).tolist():
        cause = inner.cause_of(row) or TransportError("it failed")
        work.fail(cause, row, row + 1)
    for row in np.flatnonzero(inner.status == Status.COMPLETED).tolist():
        work.complete(row, row + 1)
