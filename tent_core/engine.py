"""The engine: registers memory, opens segments, answers peers. One per process, or several."""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tent_core import memory
from tent_core.batch import Options
from tent_core.control.contract import Notification
from tent_core.descriptor import PeerKey, SegmentDescriptor
from tent_core.errors import ClosedError, TransportError, UsageError
from tent_core.inbox import Inbox
from tent_core.inflight import Deadline
from tent_core.memory import Buffer, BufferSlice, Memory
from tent_core.remote import Segment
from tent_core.segments import LocalSegment
from tent_core.stats import Stats
from tent_core.transport import LocalBuffer, TransportDeclaration
from tent_core.types import Intent, Permission, Priority

if TYPE_CHECKING:
    from tent_core.aio import AsyncEngine
    from tent_core.control.contract import Checksum, SessionInfo
    from tent_core.control.plane import ControlPlane
    from tent_core.dispatch import Drive
    from tent_core.peers import LivePeer
    from tent_core.planning import Group
    from tent_core.plugins import Registry
    from tent_core.policy import Selection
    from tent_core.roster import PeerInfo, Roster
    from tent_core.slotfile import SlotFile

DEFAULT_CLOSE_S = 5.0
_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_kept_alive: list[Memory] = []
"""Memory of closed engines that a peer might still have written to: kept for the life of the process."""


class Engine:
    """Moves bytes between registered memory here and the segments of peers.

    `config` is a path to a YAML file, a mapping of the same shape, or None for the defaults. The engine
    runs when the constructor returns. Raises ConfigError with every mistake in the configuration, and
    TentError when it cannot listen. A context manager; all methods are thread-safe. It does not work in a
    forked child: start workers with the "spawn" method. `drive` is for tests: what pushes work on, and by
    whose time deadlines and pauses go.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | None = None,
        *,
        plugins: Registry | None = None,
        drive: Drive | None = None,
    ) -> None:
        # What an engine needs and an import of tent_core does not: grpc, the settings.
        from tent_core import config as configuration
        from tent_core import host, log, topology
        from tent_core.announce import Announcer
        from tent_core.carriers import Carriers, preferred
        from tent_core.control.plane import ControlPlane
        from tent_core.dispatch import Dispatcher, Drive, Scheduling
        from tent_core.hooks import Hooks
        from tent_core.inspection import Inspector
        from tent_core.integrity import Integrity
        from tent_core.planning import Planner
        from tent_core.plugins import discover
        from tent_core.registry import BufferRegistry
        from tent_core.roster import Roster
        from tent_core.runner import Transports
        from tent_core.staging import Stager
        from tent_core.traffic import Traffic

        self._pid = os.getpid()
        self._closed = False
        self.inherited = False
        """Whether it is the engine of the process that forked this one."""
        self._started = time.monotonic()
        self._lock = threading.Lock()
        registry = plugins if plugins is not None else discover()
        self.settings = configuration.load(config, registry)
        self._log = log.configure(self.settings.log)
        self.spin_s = self.settings.wait.spin_us / 1e6
        self._transfer_s = self.settings.transfer.timeout_s
        self.inbox = Inbox(self.settings.notifications.queue)
        self._host = host.identify()
        self._topology = topology.discover()
        self._control = ControlPlane(self.settings.control, self.settings.peers, self._log)
        name = self._control.bind(self.settings.control.call_timeout_s)
        self.incarnation = secrets.token_bytes(16)
        self._log = self._log.bind(engine=name)
        self._segment = LocalSegment(
            SegmentDescriptor(
                name, self.incarnation, 1, self._host, devices=self._topology.devices()
            )
        )
        self.stats_ = Stats()
        self._slots: SlotFile | None = None
        self._transports = Transports(self._log)
        try:
            self._start_transports(registry)
            self._hooks = Hooks(
                registry,
                self._log,
                stuck_s=self.settings.hooks.stuck_s,
                queue=self.settings.hooks.queue,
            )
            planner = Planner(self.settings.policy, self._transports.facts(self.settings.skipped))
            admission = self.settings.scheduling.admission()
            self.dispatcher = Dispatcher(
                planner,
                self.stats_,
                self._log,
                self.settings.failover.max_attempts,
                Scheduling(admission, self.settings.scheduling.slice),
                self.settings.failover.on_poll,
                Drive.threads() if drive is None else drive,
            )
            if self._hooks.has_select:
                self.dispatcher.overrule = self._overrule
            if self._hooks.has("tent_transfers_finished"):
                self.dispatcher.observe = self._observe
            self._buffers = BufferRegistry(
                self._segment, self._transports, self._control, self._log
            )
            self.roster = Roster(
                self._host,
                self._transports,
                self._hooks,
                self.stats_,
                self._log,
                self._control.connect,
                self._control.most_peers,
                {"engine": self},
                partial(
                    Traffic,
                    admission,
                    self.settings.failover.health(),
                    self.dispatcher.alarm,
                ),
            )
            self._integrity = Integrity(self._buffers.find)
            self.announcer = Announcer(
                self._integrity,
                self.settings.notifications.timeout_s,
                self.settings.control.call_timeout_s,
                self.dispatcher.now,
                self.dispatcher.patiently,
                self._log,
            )
            self._share_slots()
            staging = self.settings.staging
            self.stager = Stager(self, staging.buffers, staging.chunk, staging.lent)
            self.dispatcher.stage = self.stager.stage
            self.dispatcher.relieve = _relief(self.roster, self._control)
            self.inspector = Inspector(partial(_document_of, weakref.ref(self)))
            self._carriers = Carriers(preferred(self.settings.policy, self._transports))
            self._control.serve(
                self._segment, _Handler(self), self._carriers.exchange if self._carriers else None
            )
            idle = self.settings.peers.idle_timeout_s
            self._control.every(_tick_of(idle), partial(self.roster.retire_idle, idle))
        except BaseException:
            self._leave_slots()
            self._transports.stop()
            self._control.stop(1.0)
            raise
        _open_engines.add(self)
        self._hooks.fire("tent_engine_started", engine=self)
        self._log.info("engine_started", transports=sorted(self._transports.numbers))

    def _share_slots(self) -> None:
        """Take turns with the other processes of this user, if the settings say so. Raises TentError."""
        from tent_core.slotfile import join
        from tent_core.turns import Turns

        qos = self.settings.qos
        if not qos.shared_slots:
            return
        dispatcher = self.dispatcher
        promotion = self.settings.scheduling.promotion_timeout_s
        self._slots = slots = join()
        dispatcher.turns = Turns(slots, qos.shared_slots, promotion, dispatcher.alarm)
        dispatcher.taking_turns = qos.priorities()

    def _leave_slots(self) -> None:
        from tent_core.slotfile import leave

        slots, self._slots = self._slots, None
        if slots is not None:
            leave(slots)

    def _start_transports(self, registry: Registry) -> None:
        from tent_core.config import Enable
        from tent_core.runner import Context

        host = self._control.advertised_host
        listen = self._control.listen_host

        def context(declaration: TransportDeclaration, settings: Any, log: Any) -> Context:
            return Context(
                self.key,
                self._host,
                settings,
                self._topology,
                log,
                host,
                listen,
                self._segment,
                declaration,
                self._control.notified,
            )

        enabled = self.settings.enabled
        self._transports.start(
            enabled, registry, context, lambda n: enabled[n].enable is Enable.TRUE
        )
        for name, reason in self.settings.skipped.items():
            self._log.debug("transport_skipped", transport=name, reason=reason)
        numbers = MappingProxyType(self._transports.numbers)
        self._segment.update(lambda old: replace(old, transports=numbers))

    # ---------------------------------------------------------------- who this is

    @property
    def segment_name(self) -> str:
        """The name under which peers open this engine's segment: `host:port`, IPv6 `[addr]:port`."""
        return self._segment.snapshot.name

    @property
    def key(self) -> PeerKey:
        """Name and incarnation."""
        return self._segment.snapshot.key

    @property
    def descriptor(self) -> SegmentDescriptor:
        """The snapshot that peers are told."""
        return self._segment.snapshot

    @property
    def aio(self) -> AsyncEngine:
        """The same engine for asyncio: what blocks here is a coroutine there."""
        from tent_core.aio import AsyncEngine

        return AsyncEngine(self)

    # ---------------------------------------------------------------- memory

    def allocate(
        self,
        size: int,
        location: str = "cpu:0",
        *,
        name: str | None = None,
        permission: Permission = Permission.GLOBAL_READ_WRITE,
    ) -> Buffer:
        """Make and register zeroed host memory that peers on this host can map: the fastest kind to move.

        `size` in bytes. Raises MemoryUnsupported, RangeError.
        """
        self.check_open()
        return self._add([memory.allocate(size, location)], [name], permission)[0]

    def register(
        self,
        obj: Any,
        *,
        name: str | None = None,
        location: str | None = None,
        permission: Permission = Permission.GLOBAL_READ_WRITE,
    ) -> Buffer:
        """Register the memory of `obj`: a buffer (numpy array, bytearray, mmap), `__array_interface__`,
        DLPack or `__cuda_array_interface__` object, contiguous; or (address, length) in bytes; or the path of
        a file (`os.PathLike`), of its size of now, where a transport to files runs.

        The object stays alive until the buffer is unregistered; a raw address is the caller's to keep.
        Overlapping registrations are buffers of their own. Raises MemoryUnsupported, RangeError, UsageError.
        """
        self.check_open()
        return self._add([memory.describe(obj, location)], [name], permission)[0]

    def register_many(
        self,
        objects: Sequence[Any],
        *,
        names: Sequence[str | None] | None = None,
        location: str | None = None,
        permission: Permission = Permission.GLOBAL_READ_WRITE,
    ) -> list[Buffer]:
        """Register many at once, with one update to the peers that watch. All or none."""
        self.check_open()
        names = [None] * len(objects) if names is None else names
        if len(names) != len(objects):
            raise UsageError(f"there are {len(names)} names for {len(objects)} objects")
        return self._add([memory.describe(o, location) for o in objects], names, permission)

    def _add(
        self, memories: Sequence[Memory], names: Sequence[str | None], permission: Permission
    ) -> list[Buffer]:
        def made(local: LocalBuffer, mem: Memory, offers: dict[str, int]) -> Buffer:
            return Buffer(self, local, mem, offers)

        buffers = self._buffers.add(memories, names, permission, made)
        for buffer in buffers:
            self._hooks.fire("tent_buffer_registered", engine=self, buffer=buffer.local)
        return buffers

    def unregister(self, buffer: Buffer, timeout: float | None = None) -> None:
        """Revoke a buffer: when this returns, nobody can touch its memory any more and it may be reused.

        Waits for the transfers that use it and for every peer that could still touch it to let go. Raises
        RevocationTimeout naming who has not after `timeout` seconds (default `revocation.timeout_s`): the
        memory then stays alive and refuses new requests, and calling again goes on waiting.
        """
        self.check_open()
        self._buffers.remove(
            buffer, self.settings.revocation.timeout_s if timeout is None else timeout
        )
        self._hooks.fire("tent_buffer_unregistered", engine=self, buffer=buffer.local)

    def locate(self, address: int, length: int) -> BufferSlice:
        """The slice of a registered buffer at a raw address. Raises RangeError naming the nearest buffer."""
        buffer, offset = self._buffers.locate(address, length)
        return BufferSlice(buffer, offset, length)

    def sessions(self) -> list[SessionInfo]:
        """The sessions that peers have opened here."""
        return self._control.sessions()

    def buffers(self) -> list[Buffer]:
        """The registered buffers."""
        return self._buffers.all()

    # ---------------------------------------------------------------- peers

    def open_segment(self, name: str, timeout: float | None = None) -> Segment:
        """Open the segment of the engine that answers at `name`, or reuse the peer that is known.

        Raises UnknownSegment when nobody answers within `timeout` seconds (default `control.call_timeout_s`),
        PeerRefused when the engine there takes no more peers.
        """
        self.check_open()
        return Segment(self, self.roster.open(name, self.call_timeout(timeout)))

    def peers(self) -> list[PeerInfo]:
        """Every peer that this engine opened, or that opened it, as it is now."""
        self.check_open()
        return self.roster.infos(self._control.sessions())

    # ---------------------------------------------------------------- notifications

    def next_notification(self, timeout: float | None = None) -> Notification:
        """The oldest notification that has not been taken yet; waits for one. Raises WaitTimeout."""
        self.check_open()
        return self.inbox.take(timeout)

    def poll_notifications(self) -> list[Notification]:
        """All notifications that have arrived and were not taken yet. Never blocks."""
        return self.inbox.take_all()

    def notifications(self) -> Iterator[Notification]:
        """Iterate over notifications as they arrive, until the engine closes."""
        while True:
            try:
                yield self.next_notification()
            except ClosedError:
                return

    # ---------------------------------------------------------------- selection

    def explain(
        self,
        segment: Segment | None = None,
        size: int = 1 << 20,
        *,
        local_memory: str = "cpu:0",
        remote_memory: str = "cpu:0",
        priority: Priority = Priority.MEDIUM,
        intent: Intent = Intent.UNSPEC,
        policy: str | None = None,
        transport: str | None = None,
    ) -> Selection:
        """How a request of `size` bytes would be carried: the policy entry, the candidates in order, and why
        each other transport is out. Without a segment: to a peer like this engine on this machine."""
        from tent_core.planning import trait_of

        numbers = self._transports.numbers
        there = numbers if segment is None else dict(segment.descriptor.transports)
        peer = None if segment is None else segment.peer
        plan = self.dispatcher.planner.plan(
            trait_of(local_memory, numbers),
            trait_of(remote_memory, there),
            Options(None, priority, intent, policy, transport),
            same_machine=peer is None or peer.same_machine,
            same_process=peer is not None and peer.same_process,
            unreachable={} if peer is None else peer.unreachable,
        )
        index = int(plan.edges.searchsorted(size, side="right")) - 1
        return plan.selections[max(0, index)]

    def _overrule(self, peer: LivePeer, group: Group) -> tuple[str, ...]:
        names = group.selection.candidates
        entry = group.selection.entry
        answer = self._hooks.select(
            engine=self,
            peer=peer.key,
            candidates=names,
            entry=entry.name if entry is not None else "",
            total=group.requests.total,
            requests=len(group.requests),
        )
        return names if answer is None else tuple(n for n in answer if n in names)

    def _observe(
        self, peer: LivePeer, name: str, tasks: int, moved: int, failed: int, seconds: float
    ) -> None:
        self._hooks.fire(
            "tent_transfers_finished",
            engine=self,
            peer=peer.key,
            transport=name,
            tasks=tasks,
            bytes_moved=moved,
            failed=failed,
            seconds=seconds,
        )

    # ---------------------------------------------------------------- numbers

    def stats(self) -> dict[str, Any]:
        """Counters since the start: `transports` (bytes, tasks, failures, and what each holds), `peers` (the
        same by transport), `buffers`, `notifications`, `failovers`, `deadlines` (by priority, of transfers
        that were given one). Plain values, ready for JSON."""
        transports: dict[str, Any] = {
            r.name: {"bytes": 0, "tasks": 0, "failures": 0} for r in self._transports
        }
        for name, counters in self.stats_.totals().items():
            transports[name] = counters
        for running in self._transports:
            transports[running.name]["holdings"] = dict(running.transport.holdings())
        buffers = self._buffers.all()
        return {
            "engine": self.segment_name,
            "transports": transports,
            "peers": {f"{p.name}#{p.incarnation[:8]}": p.as_dict() for p in self.peers()},
            "buffers": {
                "count": len(buffers),
                "bytes": sum(b.length for b in buffers),
                "allocated": sum(b.local.memory_fd >= 0 for b in buffers),
            },
            "sessions": len(self._control.sessions()),
            "failovers": self.stats_.failovers,
            "deadlines": self.stats_.deadlines.as_dict(),
            "notifications": {
                "waiting": len(self.inbox),
                "received": self.inbox.received,
                "carried": dict(self._carriers.carried),
                "verified": self._integrity.verified,
                "wrong": self._integrity.wrong,
            },
        }

    # ---------------------------------------------------------------- the end

    def close(self, timeout: float | None = None) -> None:
        """Stop: finish what is in flight or fail it, revoke every buffer, say goodbye, release everything.

        Bounded by about `timeout` seconds (5), also when peers are unreachable. Memory that a peer which
        does not answer could still write to is kept alive for the life of the process, and logged.
        Idempotent. In a forked child it does nothing: the engine is the parent's. Raises UsageError, and
        closes nothing, in a callback that runs on the control thread.
        """
        if self.inherited:
            return
        if self._control.here and not self._closed:
            raise UsageError(
                "close waits, and this is the control thread, for which it would wait: close the engine from "
                "another thread than that of a callback"
            )
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = Deadline(DEFAULT_CLOSE_S if timeout is None else timeout)
        self._hooks.fire("tent_engine_stopping", engine=self)
        self.inbox.close()
        self.inspector.close()
        if self.dispatcher.turns is not None:
            self.dispatcher.turns.shut()
        self.roster.close(deadline.left)
        self.announcer.close()
        self._control.leave(max(0.2, min(deadline.left, 1.0)))
        held = self._buffers.withdraw_all(Deadline(min(deadline.left, 2.0)))
        self._control.stop(max(0.2, min(deadline.left, 2.0)))
        self._transports.stop()
        for buffer, holders in held:
            assert buffer.memory is not None
            _kept_alive.append(buffer.memory)
            self._log.warning("memory_kept_alive", buffer=buffer.name, holders=holders)
        self._integrity.close(0.5)
        self._buffers.forget_all()
        self.stager.lender.close(0.5)
        self.dispatcher.close(0.5)
        self._leave_slots()
        self._hooks.close(0.5)
        _open_engines.discard(self)
        self._log.info("engine_closed")

    def check_open(self) -> None:
        """Raise ClosedError if this engine cannot be used (any more, or in this process)."""
        if self._closed:
            raise ClosedError("the engine is closed; make a new one")
        if self.inherited:
            raise ClosedError(
                "this engine belongs to the process that forked this one, and its threads are not here: "
                'start workers with the "spawn" method and make an engine in each'
            )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = (
            "closed"
            if self._closed
            else ", ".join(sorted(self._transports.numbers)) or "no transports"
        )
        return f"<Engine {self.segment_name} ({state}), {len(self.roster)} peers opened>"

    # ---------------------------------------------------------------- times, for the handles

    def call_timeout(self, timeout: float | None) -> float:
        """Seconds for a control-plane call."""
        return self.settings.control.call_timeout_s if timeout is None else timeout

    def notify_timeout(self, timeout: float | None) -> float:
        """Seconds for a notification."""
        return self.settings.notifications.timeout_s if timeout is None else timeout

    def deadline(self, options: Options, now: float) -> float:
        """When a transfer that starts `now` must have ended, on the monotonic clock."""
        timeout = options.timeout
        latest = now + (self._transfer_s if timeout is None else timeout)
        return latest if options.deadline is None else min(latest, options.deadline)

    def wait_limit(self, timeout: float | None) -> float:
        """How long a blocking call waits: a little longer than its transfer may take."""
        return (self._transfer_s if timeout is None else timeout) + 1.0


def _relief(roster: Roster, control: ControlPlane) -> Callable[[LivePeer | None], bool]:
    """Has idle peers let go of what transports lack: those opened here, and one that opened this engine."""

    def relieve(sparing: LivePeer | None) -> bool:
        opened_here = roster.relieve(sparing)
        return control.relieve() or opened_here

    return relieve


class _Handler:
    """What the control plane calls, on its own thread; implements `control.plane.ControlHandler`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def bootstrap(
        self, peer: PeerKey, transport: str, number: int, payload: bytes
    ) -> concurrent.futures.Future[bytes]:
        """Hand a peer's bootstrap message to the transport, on the transport's own queue."""
        engine = self._engine()
        if engine is not None and transport == engine.stager.channel:
            return engine.stager.lender.asked(peer, payload)
        running = engine._transports.get(transport) if engine is not None else None
        if running is None or running.number != number:
            refused: concurrent.futures.Future[bytes] = concurrent.futures.Future()
            refused.set_exception(TransportError(f"no transport {transport} ({number}) runs here"))
            return refused
        assert engine is not None
        return engine.roster.bootstrap(running, peer, payload)

    def notification(self, note: Notification) -> bool:
        """Queue a notification for the application; False when the queue is full."""
        engine = self._engine()
        return engine is not None and engine.inbox.put(note)

    def verify(self, checksums: Sequence[Checksum]) -> concurrent.futures.Future[str | None]:
        """Compare memory with what a sender says that it has to be, in a thread of its own."""
        engine = self._engine()
        if engine is not None:
            return engine._integrity.verify(checksums)
        gone: concurrent.futures.Future[str | None] = concurrent.futures.Future()
        gone.set_result("not verified: the engine is closed")
        return gone

    def inspect(self) -> concurrent.futures.Future[bytes]:
        """What the engine knows of itself and its peers, gathered in a thread of its own."""
        engine = self._engine()
        if engine is not None:
            return engine.inspector.ask()
        refused: concurrent.futures.Future[bytes] = concurrent.futures.Future()
        refused.set_exception(ClosedError("the engine is closed"))
        return refused

    def session_opened(self, info: SessionInfo) -> None:
        """A peer opened this engine's segment."""
        engine = self._engine()
        if engine is not None:
            engine.roster.session_opened(info)

    def session_departed(
        self, info: SessionInfo, reason: str
    ) -> list[concurrent.futures.Future[None]]:
        """A peer that opened this engine's segment is gone."""
        engine = self._engine()
        if engine is None or engine._closed:
            return []
        engine.stager.lender.departed(info.key)
        return engine.roster.session_departed(info, reason)


def _document_of(engine: weakref.ref[Engine]) -> bytes:
    from tent_core.inspection import document

    found = engine()
    if found is None:
        raise ClosedError("the engine is closed")
    stats = found.stats()
    peers = stats.pop("peers")
    facts = {
        "engine": found.segment_name,
        "incarnation": found.incarnation.hex(),
        "pid": found._pid,
        "uptime_s": round(time.monotonic() - found._started, 3),
        "most_peers": found._control.most_peers,
        "stats": stats,
    }
    return document(facts, peers.values())


def _tick_of(idle_timeout_s: float) -> float:
    """How often to look for idle peers: to be an eighth late at most, and to tell them soon."""
    return min(1.0, max(0.02, idle_timeout_s / 8))


def _disown() -> None:
    """The engines there are came with a fork, and their threads did not."""
    for engine in list(_open_engines):
        engine.inherited = True


os.register_at_fork(after_in_child=_disown)


@atexit.register
def _close_all() -> None:
    """Say goodbye to peers when the interpreter ends with engines still open."""
    for engine in list(_open_engines):
        engine.close(1.0)
