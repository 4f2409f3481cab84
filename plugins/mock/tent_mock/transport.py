"""The transport itself: copies between engines of one process, unless the script says otherwise."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import numpy as np

from tent_core.descriptor import PeerKey, SegmentDescriptor
from tent_core.errors import TransportError, TransportUnavailable, Unreachable
from tent_core.transport import (
    EXCHANGE_LIMIT,
    BoundCall,
    Endpoint,
    LocalBuffer,
    Peer,
    Transport,
    TransportContext,
    TransportDeclaration,
)
from tent_core.types import DRAM_TO_DRAM, Capabilities, Opcode, Permission, Reach, Status
from tent_core.work import Requests, Work
from tent_mock.clock import Clock, ManualClock, ThreadClock
from tent_mock.controller import Controller, Pending, announce, withdraw
from tent_mock.script import Do, On, Script, Verdict
from tent_mock.settings import Settings
from tent_mock.table import Table

NAME = "mock"
NUMBER = 1000
HANDSHAKE = b"mock"
HANDSHAKE_TIMEOUT_S = 10.0

_lock = threading.Lock()
_started: dict[tuple[str, bytes], MockTransport] = {}


def declare(
    name: str = NAME,
    number: int = NUMBER,
    *,
    clock: Clock | None = None,
    **capabilities: Any,
) -> TransportDeclaration:
    """A declaration of a mock transport, for a registry that a test makes.

    Several may stand beside each other under different names and private numbers. `capabilities` are
    fields of `Capabilities` that differ from the mock's own (host memory, within the process, checked by the
    owner); what is claimed is not thereby carried out. `clock` is shared by all that this declaration makes
    and overrules the setting.
    """
    claimed = {"memory_pairs": DRAM_TO_DRAM, "reach": Reach.PROCESS, "owner_checked": True}
    return TransportDeclaration(
        name=name,
        number=number,
        factory=lambda: MockTransport(name, clock),
        settings=Settings,
        capabilities=Capabilities(**{**claimed, **capabilities}),
        summary="within one process, faults by script; for tests",
    )


class MockTransport(Transport):
    """One mock transport of one engine. Its only thread starts in real time with the first delay."""

    def __init__(self, name: str = NAME, clock: Clock | None = None) -> None:
        self.name = name
        self.table = Table()
        self.settings = Settings()
        self._clock = clock
        self._context: TransportContext | None = None
        self._control: Controller | None = None
        self._endpoints: dict[Endpoint, PeerKey] = {}

    @property
    def control(self) -> Controller:
        """The controller; there is one from `start` on."""
        if self._control is None:
            raise TransportError(f"transport {self.name} has not been started")
        return self._control

    def start(self, context: TransportContext) -> None:
        """Make the controller, and become reachable for the engines of this process."""
        self.settings = context.settings
        clock = self._clock or (ManualClock() if self.settings.clock == "manual" else ThreadClock())
        self._context = context
        self._control = Controller(Script(self.settings.script, self.settings.seed), clock)
        verdict = self._control.called(On.START)
        if verdict is not None and verdict.step.do is Do.FAIL:
            raise TransportUnavailable(f"transport {self.name} was told by its script not to start")
        announce(self.name, context.key.incarnation, self._control)
        with _lock:
            _started[self.name, context.key.incarnation] = self
        context.publish(b"")

    def add_buffers(self, buffers: Sequence[LocalBuffer]) -> Sequence[bytes | None]:
        """Take them all, unless the script says `refuse`: then none is offered over this transport."""
        verdict = self._called(On.ADD_BUFFERS, detail=" ".join(buffer.name for buffer in buffers))
        if verdict is not None and verdict.step.do is Do.REFUSE:
            return [None for _ in buffers]
        self.table.add(buffers)
        return [b"" for _ in buffers]

    def connect(self, peer: Peer) -> Endpoint:
        """An endpoint for an engine of this process, or, when nothing is moved, for any."""
        verdict = self._called(On.CONNECT, peer.key.name)
        if verdict is not None and verdict.step.do is Do.UNREACHABLE:
            raise Unreachable(f"transport {self.name} cannot reach {peer.key}, as scripted")
        if self.settings.move and _table(self.name, peer.key) is None:
            raise Unreachable(
                f"transport {self.name} reaches engines of its own process only, and {peer.key} is not one"
            )
        if self.settings.handshake:
            answer = peer.bootstrap(HANDSHAKE, HANDSHAKE_TIMEOUT_S)
            if answer != HANDSHAKE:
                raise TransportError(f"{peer.key} answered the handshake with {answer[:32]!r}")
        endpoint = MockEndpoint(self, peer)
        self.control.connected(endpoint, peer.suspect)
        self._endpoints[endpoint] = peer.key
        return endpoint

    def reaches(self, key: PeerKey) -> bool:
        """Whether there is an endpoint for that peer."""
        return key in list(self._endpoints.values())

    def disconnected(self, endpoint: Endpoint) -> None:
        """An endpoint was closed."""
        self._endpoints.pop(endpoint, None)

    def exchange(self, peer: PeerKey, message: bytes) -> Future[bytes] | None:
        """Have the mock transport at `peer` notified, in this thread unless the script says otherwise."""
        context, there = self._context, _transport(self.name, peer)
        if context is None or there is None:
            return None
        here = context.key
        if not self.reaches(peer) and not there.reaches(here):
            return None
        if len(message) > EXCHANGE_LIMIT:
            raise TransportError(f"a message of {len(message)} bytes, beyond {EXCHANGE_LIMIT}")
        answer: Future[bytes] = Future()
        verdict = self.control.decided(On.EXCHANGE, peer.name, f"{len(message)} bytes")
        do = None if verdict is None else verdict.step.do
        match do:
            case Do.REFUSE:
                return None
            case Do.FAIL:
                answer.set_exception(TransportError(f"transport {self.name} failed, as scripted"))
            case Do.HANG | Do.DELAY if verdict is not None:
                pending = Pending(
                    self,
                    lambda: there.deliver(here, message, answer),
                    lambda cause: _fail(answer, cause),
                    hangs=do is Do.HANG,
                )
                self.control.pend(pending, verdict.seconds)
            case Do.DROP:
                there.deliver(here, message, Future())
            case _:
                if do is Do.TWICE:
                    there.deliver(here, message, Future())
                there.deliver(here, message, answer)
        return answer

    def deliver(self, sender: PeerKey, message: bytes, answer: Future[bytes]) -> None:
        """A message has arrived here; `answer` gets what the engine says to it."""
        context = self._context
        try:
            if context is None:
                raise TransportError(f"transport {self.name} has stopped")
            said = context.notified(sender, message)
        except TransportError as error:
            _fail(answer, error)
        else:
            answer.set_result(said)

    def bootstrap(self, peer: PeerKey, payload: bytes) -> bytes:
        """Answer the handshake with itself."""
        self._called(On.BOOTSTRAP, peer.name)
        if payload != HANDSHAKE:
            raise TransportError(f"no handshake of a mock transport: {payload[:32]!r}")
        return payload

    def remove_buffer(self, buffer: LocalBuffer, timeout: float) -> None:
        """Nobody moves anything from or to it once this has returned."""
        self._called(On.REMOVE_BUFFER, detail=buffer.name)
        self.table.remove(buffer, timeout)

    def release(self, peer: PeerKey, reason: str) -> None:
        """Nothing is kept for a peer that connected to this side."""
        self._called(On.RELEASE, peer.name, reason)

    def stop(self) -> None:
        """Fail what is pending, forget late bytes, end the clock."""
        context, control = self._context, self._control
        if context is None or control is None:
            return
        self._context = None
        with _lock:
            _started.pop((self.name, context.key.incarnation), None)
        withdraw(self.name, context.key.incarnation)
        try:
            control.called(On.STOP)
        finally:
            control.abandon(None, TransportError(f"transport {self.name} has stopped"))
            control.clock.stop()
            context.publish(None)

    def holdings(self) -> Mapping[str, int]:
        """How many buffers are registered."""
        return {"buffers": len(self.table)}

    def _called(self, on: On, peer: str = "", detail: str = "") -> Verdict | None:
        verdict = self.control.called(on, peer, detail)
        if verdict is not None and verdict.step.do is Do.FAIL:
            raise TransportError(f"transport {self.name} failed in {on}, as scripted")
        return verdict


def _fail(answer: Future[bytes], cause: Exception) -> None:
    with suppress(InvalidStateError):  # it was answered in the same moment
        answer.set_exception(cause)


def _transport(name: str, key: PeerKey) -> MockTransport | None:
    with _lock:
        return _started.get((name, key.incarnation))


def _table(name: str, key: PeerKey) -> Table | None:
    found = _transport(name, key)
    return None if found is None else found.table


class MockEndpoint(Endpoint):
    """What one mock transport has for one peer."""

    def __init__(self, transport: MockTransport, peer: Peer) -> None:
        self._transport = transport
        self._control = transport.control
        self._peer = peer
        self._name = peer.key.name
        self._closed: str | None = None

    def submit(self, work: Work) -> None:
        """Do what the script says of each request; what it does not mention is copied before this returns."""
        self._check_open()
        opcode = work.requests.opcode
        self._control.record(On.REQUEST, self._name, f"{opcode.name.lower()} {len(work)}")
        verdicts = self._control.verdicts(self._name, opcode, len(work))
        move = _Move(self._transport, self._peer, work.requests)
        if verdicts is None:
            self._carry(work, move, 0, len(work))
            return
        _raise_if_scripted(verdicts)
        start = 0
        for verdict, group in itertools.groupby(verdicts):
            stop = start + len(list(group))
            self._act(verdict, work, move, start, stop)
            start = stop

    def bind(self, requests: Requests) -> BoundCall | None:
        """If the settings say so: moves the bytes, unless there is a script by now."""
        if not self._transport.settings.bind:
            return None
        move = _Move(self._transport, self._peer, requests)
        what = f"bound {requests.opcode.name.lower()}"
        record = partial(self._control.record, On.REQUEST, self._name, what)

        def call() -> bool:
            if self._control.scripted:
                return False
            self._check_open()
            record()
            move.run(0, 1)
            return True

        return call

    def cancel(self, work: Work) -> None:
        """What hangs or is delayed of it ends as cancelled."""
        cause = TransportError(f"transport {self._transport.name} was told to cancel it")
        for pending in self._control.cancel(work):
            pending.abandon(cause)

    def refresh(self, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        """Nothing is derived from a snapshot."""
        self._control.called(On.REFRESH, self._name, f"{old.version} to {new.version}")

    def close(self, reason: str) -> None:
        """Fail what is pending. Late bytes of failed requests stay in the air."""
        if self._closed is not None:
            return
        self._closed = reason
        self._transport.disconnected(self)
        try:
            self._control.called(On.CLOSE, self._name, reason)
        finally:
            self._control.abandon(self, self._closing())

    def holdings(self) -> Mapping[str, int]:
        """How many groups of requests hang or are delayed."""
        return {"pending": self._control.pending_of(self)}

    def _closing(self) -> TransportError:
        return TransportError(f"the connection to {self._peer.key} was closed: {self._closed}")

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closing()

    def _act(self, verdict: Verdict | None, work: Work, move: _Move, start: int, stop: int) -> None:
        if verdict is None:
            self._carry(work, move, start, stop)
            return
        step = verdict.step
        told = TransportError(
            f"transport {self._transport.name} was told to {step.do} this request to {self._peer.key}"
        )
        match step.do:
            case Do.REFUSE:
                work.refuse(told, start, stop)
            case Do.FAIL:
                if not step.fenced:
                    self._leave_in_the_air(move, start, stop)
                work.fail(told, start, stop, fenced=step.fenced)
            case Do.HANG:
                self._pend(work, move, start, stop, hangs=True)
            case Do.DELAY:
                self._delay(verdict.seconds, work, move, start, stop)
            case Do.SHORT:
                self._carry_short(step.moved, told, work, move, start, stop)
            case Do.TWICE:
                self._carry(work, move, start, stop)
                work.complete(start, stop)
            case Do.LOSE:
                self._peer.suspect(told)
                work.fail(told, start, stop)

    def _carry(self, work: Work, move: _Move, start: int, stop: int) -> None:
        try:
            self._check_open()
            move.run(start, stop)
        except TransportError as cause:
            work.fail(cause, start, stop)
        else:
            work.complete(start, stop)

    def _carry_short(
        self, limit: int | None, told: Exception, work: Work, move: _Move, start: int, stop: int
    ) -> None:
        lengths = work.requests.local[start:stop, 1]
        moved = lengths // np.uint64(2) if limit is None else np.minimum(lengths, np.uint64(limit))
        try:
            move.run(start, stop, moved)
        except TransportError as cause:
            work.fail(cause, start, stop)
        else:
            work.fail(told, start, stop, moved=moved)

    def _pend(
        self, work: Work, move: _Move, start: int, stop: int, *, hangs: bool, seconds: float = 0.0
    ) -> None:
        pending = Pending(
            owner=self,
            run=lambda: self._carry(work, move, start, stop),
            abandon=lambda cause: work.fail(cause, start, stop, status=_status_of(work)),
            hangs=hangs,
            work=work,
        )
        self._control.pend(pending, seconds)
        if self._closed is not None:  # closed between the check and here: nobody else abandons it
            self._control.abandon(self, self._closing())

    def _delay(self, seconds: float, work: Work, move: _Move, start: int, stop: int) -> None:
        left = work.deadline - self._control.clock.now()
        if seconds <= left:
            self._pend(work, move, start, stop, hangs=False, seconds=seconds)
            return
        late = TransportError(
            f"transport {self._transport.name} would have taken {seconds:g} s, past the deadline"
        )
        give_up = Pending(
            owner=self,
            run=lambda: work.fail(late, start, stop, status=Status.TIMEOUT),
            abandon=lambda cause: work.fail(cause, start, stop, status=_status_of(work)),
            hangs=False,
            work=work,
        )
        self._control.pend(give_up, max(0.0, left))

    def _leave_in_the_air(self, move: _Move, start: int, stop: int) -> None:
        def arrive() -> None:
            with suppress(TransportError):  # the buffer is gone: its owner's side drops the bytes
                move.run(start, stop)

        self._control.pend(Pending(self._transport, arrive, lambda _: None, hangs=True))


def _status_of(work: Work) -> Status:
    """How what is abandoned of it ends."""
    return Status.CANCELED if work.cancelled else Status.FAILED


def _raise_if_scripted(verdicts: Sequence[Verdict | None]) -> None:
    actions = {verdict.step.do for verdict in verdicts if verdict is not None}
    if Do.CRASH in actions:
        raise RuntimeError("the mock transport crashes in submit, as scripted")
    if Do.RAISE in actions:
        raise TransportError("the mock transport refuses the whole submission, as scripted")


class _Move:
    """The bytes of one submission: which registrations they were meant for, and the copying."""

    def __init__(self, transport: MockTransport, peer: Peer, requests: Requests) -> None:
        self._transport = transport
        self._key = peer.key
        self._requests = requests
        self._moves = transport.settings.move
        if self._moves:
            self._local = transport.table.generations(requests.local_used)
            self._remote = requests.remote_generations

    def run(self, start: int, stop: int, lengths: np.ndarray[Any, Any] | None = None) -> None:
        """Copy rows [start, stop), or the first `lengths` bytes of each. Raises TransportError with nothing
        copied when either side no longer allows it."""
        if not self._moves:
            return
        r = self._requests
        owner = _table(self._transport.name, self._key)
        if owner is None:
            raise TransportError(f"{self._key} has stopped its transport {self._transport.name}")
        reading = r.opcode is Opcode.READ
        needed = Permission.GLOBAL_READ_ONLY if reading else Permission.GLOBAL_READ_WRITE
        local, remote = r.local[start:stop], r.remote[start:stop]
        local_ids, remote_ids = r.local_ids[start:stop], r.remote_ids[start:stop]
        with ExitStack() as held:
            held.enter_context(
                self._transport.table.using(
                    _present(r.local_used, self._local, local_ids), local_ids, local
                )
            )
            held.enter_context(
                owner.using(
                    _present(r.remote_used, self._remote, remote_ids), remote_ids, remote, needed
                )
            )
            to, source = (local, remote) if reading else (remote, local)
            counts = local[:, 1] if lengths is None else lengths
            rows = zip(to[:, 0].tolist(), source[:, 0].tolist(), counts.tolist(), strict=True)
            for target, origin, count in rows:
                ctypes.memmove(target, origin, count)


def _present(
    used: Sequence[int], generations: Mapping[int, int], ids: np.ndarray[Any, Any]
) -> dict[int, int]:
    """The generations of the buffers that occur in `ids`; -1, which none has, for an unknown one."""
    return {i: generations.get(i, -1) for i in used if len(used) == 1 or bool(np.any(ids == i))}
