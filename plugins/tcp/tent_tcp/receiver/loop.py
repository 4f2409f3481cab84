"""The receiver's event loop: one thread, non-blocking sockets, a turn for every stream."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from tent_tcp.counters import Counters
from tent_tcp.protocol import Malformed
from tent_tcp.receiver.connection import Connection, Desk
from tent_tcp.receiver.orders import Outbox, receive
from tent_tcp.receiver.owner import OwnerGone
from tent_tcp.receiver.spin import Spin
from tent_tcp.tuning import tune
from tent_tcp.vectors import EndOfStream

_TICK_S = 0.25
_EVENTS = 64  # at once: orders come between
_PAUSE_S = 0.5
_EVENT_EVERY_S = 1.0


class Ended(Exception):
    """The engine has ended, or has no more use for this process."""


class Receiver:
    """Serves the streams of one listening socket until its engine ends.

    `owner_process` is a pidfd of the engine, `link` its order socket. A child that the application forked
    may keep the other end of `link` open, so the end of either ends this process. At most `max_streams`
    are open: one more takes the place of the oldest that has not said a valid hello, or is turned away.
    """

    def __init__(
        self,
        listener: socket.socket,
        link: socket.socket,
        owner_process: int,
        desk: Desk,
        counters: Counters,
        *,
        max_streams: int,
        spin_s: float,
    ) -> None:
        self._listener = listener
        self._link = link
        self._desk = desk
        self._counters = counters
        self._max_streams = max_streams
        self._spin = Spin(spin_s)
        self._outbox = Outbox(link)
        self._connections: dict[int, Connection] = {}  # in the order of acceptance
        self._accepted = self._refused = 0
        self._told: dict[str, tuple[float, int]] = {}
        self._listening = True
        self._listen_again = 0.0
        self._now = time.monotonic()
        self._next_tick = 0.0
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._watch(owner_process, self._end)
        self._watch(link.fileno(), self._obey)
        self._watch(listener.fileno(), self._accept)
        self._orders: dict[str, Callable[[dict[str, Any], list[int]], dict[str, Any]]] = {
            "add": self._add,
            "remove": self._remove,
            "release": self._release,
            "fence": self._fence,
            "probe": self._probe,
        }

    def run(self) -> None:
        """Serve. Returns when the engine has ended or closed the order socket."""
        try:
            while True:
                for descriptor, _ in self._wait():
                    connection = self._connections.get(descriptor)
                    if connection is not None:
                        self._serve(connection)
                        self._spin.came(self._now, within=not connection.between)
                        continue
                    handler = self._handlers.get(descriptor)
                    if handler is not None:  # else closed by an event of the same round
                        handler()
                if self._now >= self._next_tick:
                    self._tick()
        except (Ended, OwnerGone):
            return

    # ---------------------------------------------------------------- waiting

    def _watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._epoll.register(descriptor, select.EPOLLIN)
        self._handlers[descriptor] = handler

    def _wait(self) -> list[tuple[int, int]]:
        """What is ready."""
        events = self._epoll.poll(0, _EVENTS)
        self._now = time.monotonic()
        while not events:
            if not self._spin.goes_on(self._now):
                events = self._epoll.poll(_TICK_S if self._connections else 4 * _TICK_S)
                self._now = time.monotonic()
                break
            events = self._epoll.poll(0, _EVENTS)
            self._now = time.monotonic()
        return events

    def _tick(self) -> None:
        """Four times a second: who is late is closed, the owner is looked for."""
        self._next_tick = self._now + _TICK_S
        self._desk.owner.check()
        for connection in list(self._connections.values()):
            if connection.deadline <= self._now:
                reason = "no progress in time" if connection.peer else "no hello in time"
                self._turn_away(connection, reason)
        if not self._listening and self._now >= self._listen_again:
            self._watch(self._listener.fileno(), self._accept)
            self._listening = True

    def _count(self) -> None:
        self._counters.write(len(self._connections), self._accepted, self._refused)

    # ---------------------------------------------------------------- streams

    def _accept(self) -> None:
        try:
            stream, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                raise
            self._epoll.unregister(self._listener.fileno())  # it would be ready again and again
            del self._handlers[self._listener.fileno()]
            self._listening, self._listen_again = False, self._now + _PAUSE_S
            self._tell("streams_not_accepted", reason=error.strerror or "")
            return
        self._accepted += 1
        connection = Connection(stream, self._desk, self._now)
        if len(self._connections) >= self._max_streams:
            strangers = (c for c in self._connections.values() if c.peer is None)
            self._turn_away(
                next(strangers, connection), f"all {self._max_streams} streams are in use"
            )
            if stream.fileno() < 0:
                return
        stream.setblocking(False)
        tune(stream, self._desk.stall_s, self._desk.socket_buffer)
        self._connections[stream.fileno()] = connection
        self._epoll.register(stream.fileno(), select.EPOLLIN)
        self._count()

    def _serve(self, connection: Connection) -> None:
        before = connection.events
        try:
            events = connection.turn(self._now)
        except Malformed as error:
            self._turn_away(connection, str(error))
        except (EndOfStream, OSError):
            self._close(connection)
        except OwnerGone:
            raise
        except Exception as error:  # a mistake of ours costs the stream that met it, not the others
            self._turn_away(connection, f"internal error {error!r}")
        else:
            if events != before:
                self._epoll.modify(connection.stream.fileno(), events)

    def _turn_away(self, connection: Connection, reason: str) -> None:
        self._refused += 1
        self._tell("stream_closed", reason=reason, **connection.describe())
        self._close(connection)

    def _close(self, connection: Connection) -> None:
        self._connections.pop(connection.stream.fileno(), None)
        connection.stream.close()  # which takes it out of epoll as well
        self._count()

    def _tell(self, event: str, **fields: Any) -> None:
        """Tell the engine, at most once a second for each kind of event; the rest is counted."""
        since, repeated = self._told.get(event, (0.0, 0))
        if self._now - since < _EVENT_EVERY_S:
            self._told[event] = (since, repeated + 1)
            return
        self._told[event] = (self._now, 0)
        if repeated:
            fields["repeated"] = repeated
        self._outbox.tell(event, **fields)
        self._epoll.modify(self._link.fileno(), self._outbox.flush())

    # ---------------------------------------------------------------- orders

    def _end(self) -> None:
        raise Ended

    def _obey(self) -> None:
        try:
            received = receive(self._link)
        except (BlockingIOError, InterruptedError):
            received = ({}, [])
        except OSError:
            raise Ended from None
        if received is None:
            raise Ended
        order, descriptors = received
        try:
            if order:
                self._outbox.answer(order["number"], **self._carry_out(order, descriptors))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._epoll.modify(self._link.fileno(), self._outbox.flush())

    def _carry_out(self, order: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        try:
            return self._orders[order["order"]](order, descriptors)
        except Exception as error:
            return {"error": f"{order['order']}: {error!r}"}

    def _add(self, order: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        failed = []
        for buffer, generation, address, length, permission, position in order["buffers"]:
            descriptor = descriptors[position] if 0 <= position < len(descriptors) else -1
            if descriptor < 0 <= position:
                failed.append([buffer, "its descriptor did not arrive: no descriptor is left here"])
                continue
            try:
                self._desk.registry.add(buffer, generation, address, length, permission, descriptor)
            except OSError as error:
                failed.append([buffer, f"cannot be mapped: {error.strerror}"])
        return {"failed": failed}

    def _remove(self, order: dict[str, Any], _: list[int]) -> dict[str, Any]:
        for connection in self._connections.values():
            connection.revoke(order["buffer"])
        self._desk.registry.remove(order["buffer"], order["generation"])
        return {}

    def _release(self, order: dict[str, Any], _: list[int]) -> dict[str, Any]:
        peer = (order["name"], bytes.fromhex(order["incarnation"]))
        leaving = [c for c in self._connections.values() if c.peer == peer]
        for connection in leaving:
            self._close(connection)
        return {"closed": len(leaving)}

    def _fence(self, order: dict[str, Any], _: list[int]) -> dict[str, Any]:
        """Stop a stream of a peer. Nothing is being taken from it now, as one thread does all, and what the
        kernel still holds of it goes with it. One that is not known was closed before: its user had the
        welcome, which comes after the stream has a name here."""
        peer = (order["name"], bytes.fromhex(order["incarnation"]))
        identity = bytes.fromhex(order["stream"])
        for connection in list(self._connections.values()):
            if connection.peer == peer and connection.identity == identity:
                self._close(connection)
        return {}

    def _probe(self, order: dict[str, Any], _: list[int]) -> dict[str, Any]:
        self._desk.owner.probe_again(bytes.fromhex(order["token"]))
        return {"obstacle": self._desk.owner.obstacle}
