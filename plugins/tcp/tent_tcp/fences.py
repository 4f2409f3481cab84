"""Fences: peers confirm that nothing of a stream that was lost is or will be written any more.

A receiver goes on reading what its kernel has taken of a stream after the sender has closed or reset it (5 to
11 MB were measured), so late bytes of one write could overwrite the next. It is asked on another path, the
control plane, by the random name of the stream, to stop it; its answer is the fence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from tent_core.transport import Peer
from tent_tcp.protocol import STOPPED, pack_fence
from tent_tcp.reactor import Reactor

Answer = Callable[[str], None]
"""Told "" when the peer has confirmed, else why not."""


class _Question:
    """One stream that a peer has been asked about."""

    __slots__ = ("answer", "owner", "until")

    def __init__(self, owner: object, until: float, answer: Answer) -> None:
        self.owner = owner
        self.until = until
        self.answer = answer


class Fences:
    """Asks without waiting, in the reactor's thread, which also calls the answers; each within its time."""

    def __init__(self, reactor: Reactor, timeout_s: float) -> None:
        self._reactor = reactor
        self._timeout_s = timeout_s
        self._open: set[_Question] = set()
        self._ticking = False

    def ask(self, owner: object, peer: Peer, stream: bytes, expires: float, answer: Answer) -> None:
        """Have `peer` stop a stream; `answer` is called once, from any thread. After `expires` nobody is
        asked, and after that or the time-out the answer is no. `owner` is for `close`."""
        now = time.monotonic()
        until = min(expires, now + self._timeout_s)
        if until <= now:
            answer("there was no time left to have its peer confirm that it stopped reading it")
            return
        question = _Question(owner, until, answer)
        if not self._reactor.call(partial(self._begin, question, peer, stream)):
            answer("the transport tcp has stopped, and cannot ask its peer to stop reading it")

    def close(self, owner: object | None, reason: str) -> None:
        """Answer what that owner, or anybody, has asked. In the reactor's thread."""
        for question in [q for q in self._open if owner is None or q.owner is owner]:
            self._end(question, f"its peer was asked to stop reading it, but {reason}")

    # ---------------------------------------------------------------- in the reactor's thread

    def _begin(self, question: _Question, peer: Peer, stream: bytes) -> None:
        self._open.add(question)
        if not self._ticking:
            self._ticking = True
            self._reactor.every_tick(self._tick)
        left = question.until - time.monotonic()
        try:
            future = peer.begin_bootstrap(pack_fence(stream, left), left)
        except Exception as error:
            self._end(question, _not_confirmed(error))
            return
        future.add_done_callback(
            lambda done: self._reactor.call(partial(self._answered, question, done))
        )

    def _answered(self, question: _Question, done: Future[bytes]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None or done.cancelled():
            self._end(question, _not_confirmed(error))
        elif done.result() != STOPPED:
            self._end(question, _not_confirmed("it answered something else"))
        else:
            self._end(question, "")

    def _end(self, question: _Question, why_not: str) -> None:
        if question in self._open:
            self._open.discard(question)
            question.answer(why_not)

    def _tick(self, now: float) -> bool:
        for question in [q for q in self._open if now >= q.until]:
            self._end(question, _not_confirmed("there was no answer in time"))
        self._ticking = bool(self._open)
        return self._ticking


def _not_confirmed(why: object) -> str:
    return f"its peer did not confirm that it stopped reading it: {why}"
