"""Which transports carry notifications, and handing messages to them without waiting for a plugin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from tent_core.descriptor import PeerKey
from tent_core.errors import ClosedError, TransportError
from tent_core.policy import PolicyEntry
from tent_core.runner import Running


def preferred(entries: Sequence[PolicyEntry], running: Iterable[Running]) -> list[Running]:
    """Those that can carry notifications, in the order in which the policy first names them.

    One that the policy does not name carries nothing, and so no notification either.
    """
    capable = {r.name: r for r in running if r.capabilities.notifications}
    names = dict.fromkeys(name for entry in entries for name in entry.transports)
    return [capable[name] for name in names if name in capable]


class Carriers:
    """The transports of one engine that carry notifications, the preferred one first. Thread-safe.

    Each is asked in a queue of its own: a plugin that does not return from `exchange` harms the notifications
    that it might have carried, and these are given up soon (`control/carrier.py`).
    """

    def __init__(self, transports: Sequence[Running]) -> None:
        self._transports = tuple(transports)
        self.carried: Counter[str] = Counter()
        """By transport, how many messages have been answered."""

    def __bool__(self) -> bool:
        return bool(self._transports)

    def exchange(self, peer: PeerKey, message: bytes) -> Future[bytes | None]:
        """Have `message` carried by the first that has a channel to `peer`; its answer, or None if none has.

        Never waits. Fails with what the transport raises; the next one is not tried then.
        """
        outcome: Future[bytes | None] = Future()
        self._ask(0, peer, message, outcome)
        return outcome

    def _ask(
        self, index: int, peer: PeerKey, message: bytes, outcome: Future[bytes | None]
    ) -> None:
        if index == len(self._transports):
            outcome.set_result(None)
            return
        running = self._transports[index]

        def ask() -> None:
            try:
                answer = running.transport.exchange(peer, message)
            except BaseException as error:
                outcome.set_exception(error)
                return
            if answer is None:
                self._ask(index + 1, peer, message, outcome)
            else:
                answer.add_done_callback(partial(self._answered, running.name, outcome))

        try:
            running.exchanges.submit(ask)
        except ClosedError as error:
            outcome.set_exception(error)

    def _answered(self, name: str, outcome: Future[bytes | None], answer: Future[bytes]) -> None:
        if answer.cancelled():
            outcome.set_exception(TransportError(f"{name} gave up the exchange"))
        elif (error := answer.exception()) is not None:
            outcome.set_exception(error)
        else:
            self.carried[name] += 1
            outcome.set_result(answer.result())
