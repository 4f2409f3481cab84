"""All that this side keeps for one peer: its address, and the streams to it."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from tent_core import address, gil
from tent_core.descriptor import SegmentDescriptor
from tent_core.errors import TransportError, Unreachable
from tent_core.transport import BoundCall, Endpoint, Peer, Resume
from tent_core.types import Priority, Status
from tent_core.work import Requests, Work
from tent_tcp.carriage import CANCELED, Carriage, Rest
from tent_tcp.dialing import Dialing, Target, dial
from tent_tcp.messages import Message, Short, messages_of
from tent_tcp.mover import Mover
from tent_tcp.patience import Canceled, DeadlinePassed, Patience, StreamFailed, spins
from tent_tcp.pool import Pool
from tent_tcp.protocol import Attribute, Malformed, pack_hello
from tent_tcp.settings import Settings
from tent_tcp.streams import Stream

NAME = "tcp"


class TcpEndpoint(Endpoint):
    """Carries work to one peer: in the submitting thread if that waits anyway, else in the mover's."""

    def __init__(
        self,
        peer: Peer,
        settings: Settings,
        mover: Mover,
        target: Callable[[SegmentDescriptor], Target],
        on_close: Callable[[TcpEndpoint], None],
    ) -> None:
        """`target` resolves a snapshot's attribute. Raises Unreachable and TransportError, as it does."""
        self._peer = peer
        self._settings = settings
        self._mover = mover
        self._spin_s = spins(settings.spin / 1e6)
        self._find_target = target
        self._on_close = on_close
        self.pool = Pool(settings.streams, lambda: mover.resume(self))
        self._target: Target | TransportError = target(peer.segment)

    def submit(self, work: Work) -> None:
        if not work.may_block:
            if self.pool.closed is not None:
                raise StreamFailed(self.pool.closed)
            self._mover.submit(self, work)
            return

        interrupted = partial(self._why_interrupted, work)
        try:
            stream = self.pool.take(
                work.deadline,
                lambda: self._dial(work.deadline, interrupted),
                interrupted,
                bulk=work.priority is Priority.LOW,
            )
        except StreamFailed as cause:
            self.suspect(cause)
            if isinstance(cause, Canceled):
                work.fail(cause, status=Status.CANCELED)
                return
            raise
        self._carry(self.carriage(work, stream), interrupted)

    def bind(self, requests: Requests) -> BoundCall | None:
        message = next(messages_of(requests)) if len(requests) == 1 else None
        if message is None or message.short is None:
            return None
        return partial(self._carry_out, message, message.short)

    def _carry_out(self, message: Message, short: Short) -> bool | Resume:
        """Send a short request and look for its answer; see `BoundCall`."""
        stream = self.pool.borrow()
        if stream is None:  # one has to be made, or waited for
            return False if self.pool.closed is not None else self.submit
        stream.work = None
        try:
            done = stream.converse(message, short, self._spin_s[gil.contended()])
        except BaseException:  # such as KeyboardInterrupt, which may come anywhere
            self.pool.discard(stream)
            raise
        if done:
            self.pool.give(stream)
            return True
        return partial(self._carry_on, stream)

    def _carry_on(self, stream: Stream, work: Work) -> None:
        """Wait for the answer to what `_carry_out` has sent, with the patience that the work allows."""
        carriage = self.carriage(work, stream, Rest(deque(), 0))
        self._carry(carriage, partial(self._why_interrupted, work))

    def _carry(self, carriage: Carriage, interrupted: Callable[[], StreamFailed | None]) -> None:
        work, stream = carriage.work, carriage.stream
        crowded = gil.contended()
        patience = Patience(
            work.deadline,
            self._settings.stall_timeout,
            interrupted,
            self._spin_s[crowded],
            crowded,
            self._settings.keep_gil,
        )
        try:
            carriage.carry(patience)
        except StreamFailed as cause:
            self.abandon(carriage, cause)
            self.suspect(cause)
        except BaseException as error:  # such as KeyboardInterrupt, which may come anywhere
            self.abandon(carriage, StreamFailed(f"the transfer was interrupted by {error!r}"))
            raise
        else:
            self.pool.give(stream)

    def cancel(self, work: Work) -> None:
        """End it soon: a thread that carries it looks up at every tick and between messages."""
        self._mover.cancel(work)

    def refresh(self, old: SegmentDescriptor, new: SegmentDescriptor) -> None:
        attribute = new.attributes.get(NAME)
        current = self._target.attribute if isinstance(self._target, Target) else b""
        if attribute is None:
            self._target = TransportError(f"peer {self._peer.key} serves tcp no more")
        elif attribute.payload != current:
            try:
                self._target = self._find_target(new)
            except TransportError as error:
                self._target = error
        else:
            return
        self.pool.renew()

    def close(self, reason: str) -> None:
        text = f"the connection to peer {self._peer.key} was closed: {reason}"
        self.pool.close(text)
        self._mover.close(self, text)
        self._on_close(self)

    def holdings(self) -> Mapping[str, int]:
        return {"streams": len(self.pool)}

    # ---------------------------------------------------------------- for the mover

    def carriage(self, work: Work, stream: Stream, rest: Rest | None = None) -> Carriage:
        """The work, or the rest of it, ready to go over that stream."""
        return Carriage(work, stream, self._peer, rest)

    def abandon(self, carriage: Carriage, cause: StreamFailed) -> None:
        """Report what a stream could not carry, and close the stream unless it is in step."""
        stream = carriage.stream
        if isinstance(cause, Canceled) and not stream.waiting:
            self.pool.give(stream)
        else:
            self.pool.discard(stream)
        carriage.abandon(cause, self._fence, lambda rest: self._again(carriage.work, rest, cause))

    def _again(self, work: Work, rest: Rest, cause: StreamFailed) -> None:
        """Carry on with another stream, in the mover's thread, whoever did so far."""
        if self.pool.closed is not None or not self._mover.carry_on(self, work, rest):
            rest.fail(work, cause)

    def _fence(self, stream: Stream, expires: float, answer: Callable[[str], None]) -> None:
        if self.pool.closed is not None:
            answer("nobody is left to ask whether its peer has stopped reading it")
        else:
            self._mover.fences.ask(self, self._peer, stream.identity, expires, answer)

    def dialing(self) -> Dialing:
        """A new connection in the making. Raises StreamFailed."""
        target = self._target
        if not isinstance(target, Target):
            raise StreamFailed(str(target))
        return Dialing(target, self._settings.stall_timeout)

    def suspect(self, cause: StreamFailed) -> None:
        """Tell the engine, unless it was this side that had no more time, no more wish, or closed."""
        if not isinstance(cause, DeadlinePassed | Canceled) and self.pool.closed is None:
            self._peer.suspect(cause)

    def _dial(self, deadline: float, interrupted: Callable[[], StreamFailed | None]) -> Stream:
        until = min(deadline, time.monotonic() + self._settings.connect_timeout)
        patience = Patience(until, self._settings.connect_timeout, interrupted)
        dialing = self.dialing()
        try:
            return dial(dialing, patience)
        except DeadlinePassed:
            if until == deadline:
                raise
            raise StreamFailed(
                f"no connection to peer {self._peer.key} at {dialing.where} within "
                f"{self._settings.connect_timeout:g} s"
            ) from None

    def _why_interrupted(self, work: Work) -> StreamFailed | None:
        if work.cancelled:
            return Canceled(CANCELED)
        closed = self.pool.closed
        return None if closed is None else StreamFailed(closed)


def make_target(
    settings: Settings, name: str, incarnation: bytes, same_machine: bool, payload: bytes
) -> Target:
    """What an attribute says, resolved. Raises Unreachable if it never can be used, else TransportError."""
    try:
        attribute = Attribute.decode(payload)
        where = address.parse(attribute.address)
    except (Malformed, address.AddressError) as error:
        raise Unreachable(f"its tcp {error}; both sides need versions that go together") from None
    if address.is_loopback(where.host) and not same_machine:
        raise Unreachable(
            f"it advertises {attribute.address}, which is loopback, and is on another machine; "
            "set `advertise` (and `listen`) there to an address that reaches it"
        )
    try:
        found = address.look_up(where.host, where.port, socket.SOCK_STREAM)
    except OSError as error:
        raise TransportError(
            f"its address {attribute.address} cannot be resolved: {error}"
        ) from None
    return Target(
        payload,
        [(family, sockaddr) for family, _, _, _, sockaddr in found],
        partial(pack_hello, attribute.secret, name, incarnation, same_machine),
        same_machine,
        settings.socket_buffer,
    )
