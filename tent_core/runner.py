"""The transports of one engine: started, called one call at a time each, and stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from tent_core.descriptor import Attribute, HostIdentity, PeerKey, SegmentDescriptor
from tent_core.errors import (
    ConfigError,
    PluginError,
    TentError,
    TransportError,
    TransportUnavailable,
)
from tent_core.policy import TransportFacts
from tent_core.segments import LocalSegment
from tent_core.serial import SerialQueue
from tent_core.topology import Topology
from tent_core.transport import LocalBuffer, Transport, TransportDeclaration
from tent_core.types import Capabilities, MemoryKind

T = TypeVar("T")
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 3.0
CALL_TIMEOUT_S = 10.0
ADD_TIMEOUT_S = 30.0
"""A transport may have to start a process for the first buffer, which takes its time on a slow machine."""


@dataclass(frozen=True)
class Context:
    """What an engine gives to one of its transports; implements `transport.TransportContext`."""

    key: PeerKey
    host: HostIdentity
    settings: Any
    topology: Topology
    log: Any
    advertise_host: str
    listen_host: str
    segment: LocalSegment
    declaration: TransportDeclaration
    deliver: Callable[[PeerKey, bytes], bytes]

    def notified(self, peer: PeerKey, message: bytes) -> bytes:
        """A message arrived that the peer's engine had carried by this transport; the answer."""
        return self.deliver(peer, message)

    def publish(self, payload: bytes | None) -> None:
        """Set (or with None withdraw) this transport's attribute of the segment."""
        name, number = self.declaration.name, self.declaration.number
        self.segment.update(lambda old: _with_attribute(old, name, number, payload))


def _payloads(transport: Transport, buffers: Sequence[LocalBuffer]) -> list[bytes | None]:
    answered = list(transport.add_buffers(buffers))
    if len(answered) != len(buffers):
        raise TransportError(f"add_buffers answered {len(answered)} of {len(buffers)} buffers")
    return answered


def _with_attribute(
    old: SegmentDescriptor, name: str, number: int, payload: bytes | None
) -> SegmentDescriptor:
    attributes = dict(old.attributes)
    attributes.pop(name, None)
    if payload is not None:
        attributes[name] = Attribute(number, name, payload)
    return replace(old, attributes=MappingProxyType(attributes))


class Running:
    """One started transport. `calls` runs everything but submit, bootstrap and exchange, in order.

    `bootstraps` has a thread of its own, so that two engines that connect to each other at once cannot wait
    for each other, and so have `exchanges`, since a notification is not to wait for a connection.
    """

    def __init__(self, declaration: TransportDeclaration, transport: Transport, log: Any) -> None:
        self.declaration = declaration
        self.name = declaration.name
        self.number = declaration.number
        self.capabilities = declaration.capabilities
        self.transport = transport
        self.log = log
        self.calls = SerialQueue(f"tent-{self.name}")
        self.bootstraps = SerialQueue(f"tent-{self.name}-bootstrap")
        self.exchanges = SerialQueue(f"tent-{self.name}-exchange")

    def call(self, function: Callable[[], T], timeout: float, doing: str) -> T:
        """Run `function` on this transport's queue and wait. What is no TentError is wrapped in one."""
        future = self.calls.submit(function)
        try:
            return self.result(future, timeout, doing)
        finally:
            future.cancel()  # one that has not begun by now is wanted no more

    def result(self, future: Future[T], timeout: float, doing: str) -> T:
        """The outcome of a call that was queued, as a value or a TentError; others may wait for it too."""
        try:
            return future.result(timeout)
        except TentError:
            raise
        except FutureTimeout:
            busy = self.calls.busy_for()
            raise TransportError(
                f"transport {self.name} did not finish {doing} within {timeout:g} s"
                + (f"; it has been in one call for {busy:.1f} s" if busy else "")
            ) from None
        except Exception as error:
            self.log.error("transport_raised", transport=self.name, doing=doing, error=repr(error))
            raise TransportError(f"transport {self.name} raised {error!r} while {doing}") from error

    def stop(self) -> None:
        """Stop the transport and its queues, within a bound."""
        try:
            self.call(self.transport.stop, STOP_TIMEOUT_S, "stop")
        except TentError as error:
            self.log.error("transport_stop_failed", transport=self.name, error=str(error))
        self.calls.close(0.5)
        self.bootstraps.close(0.5)
        self.exchanges.close(0.5)


class Transports:
    """All transports that an engine was configured with: those that run, and why the others do not."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._running: dict[str, Running] = {}
        self._reasons: dict[str, str] = {}

    def start(
        self,
        choices: Mapping[str, Any],
        registry: Any,
        context: Callable[[TransportDeclaration, Any, Any], Context],
        required: Callable[[str], bool],
    ) -> None:
        """Load and start what is enabled. What fails is skipped with its reason, unless `required`."""
        for name, choice in choices.items():
            try:
                loaded = registry.load(name)
                log = self._log.bind(transport=name)
                running = Running(loaded.declaration, loaded.declaration.factory(), log)
                self._start_one(running, context(loaded.declaration, choice.settings, log))
            except (TransportUnavailable, PluginError, TransportError) as error:
                if required(name):
                    raise ConfigError(
                        [
                            f"transports.{name}.enable: true, but it cannot run here: {error}. "
                            "Mend that, or say enable: auto to run without it"
                        ]
                    ) from error
                self._reasons[name] = str(error)
                self._log.info("transport_skipped", transport=name, reason=str(error))

    def _start_one(self, running: Running, context: Context) -> None:
        began = time.monotonic()

        def start() -> Capabilities:
            running.transport.start(context)
            return running.transport.capabilities(running.capabilities)

        try:
            running.capabilities = running.call(start, START_TIMEOUT_S, "start")
        except TentError:
            running.stop()
            raise
        self._running[running.name] = running
        self._log.info(
            "transport_started",
            transport=running.name,
            number=running.number,
            seconds=round(time.monotonic() - began, 3),
        )

    def __iter__(self) -> Iterator[Running]:
        return iter(self._running.values())

    def get(self, name: str) -> Running | None:
        """The running transport of that name, or None."""
        return self._running.get(name)

    @property
    def numbers(self) -> dict[str, int]:
        """Name to number of what runs."""
        return {r.name: r.number for r in self}

    def facts(self, others: Mapping[str, str]) -> dict[str, TransportFacts]:
        """What selection needs to know of each; `others` are names with the reason why they do not run."""
        facts = {
            name: TransportFacts(name, 0, False, reason, None)
            for name, reason in {**others, **self._reasons}.items()
        }
        for r in self:
            facts[r.name] = TransportFacts(r.name, r.number, True, "", r.capabilities)
        return facts

    def moves(self, kind: MemoryKind) -> bool:
        """Whether any running transport can touch memory of this kind."""
        return any(r.capabilities.touches(kind) for r in self)

    def add_buffers(
        self, buffers: Sequence[LocalBuffer], kinds: Sequence[MemoryKind]
    ) -> list[dict[str, Attribute]]:
        """Ask every transport what to publish for each buffer; what one declines is left out and logged."""
        offers: list[dict[str, Attribute]] = [{} for _ in buffers]
        for running in self:
            mine = [i for i, kind in enumerate(kinds) if running.capabilities.touches(kind)]
            if not mine:
                continue
            batch = [buffers[i] for i in mine]
            try:
                payloads = running.call(
                    partial(_payloads, running.transport, batch),
                    ADD_TIMEOUT_S + 0.01 * len(batch),
                    "add_buffers",
                )
            except TentError as error:
                running.log.warning("buffers_declined", buffers=len(batch), reason=str(error))
                continue
            for i, payload in zip(mine, payloads, strict=True):
                if payload is not None:
                    offers[i][running.name] = Attribute(
                        running.number, running.name, bytes(payload)
                    )
        return offers

    def stop(self) -> None:
        """Stop all, in parallel, so that one that hangs does not add to the others."""
        threads = [
            threading.Thread(target=r.stop, daemon=True, name=f"tent-stop-{r.name}") for r in self
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(STOP_TIMEOUT_S + 1.5)
