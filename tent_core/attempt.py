"""The first attempt of a batch that nothing stands in the way of: its work, and what can be cancelled."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING

from tent_core.carry import Carry, interrupt
from tent_core.work import Work

if TYPE_CHECKING:
    from tent_core.batch import Batch, Options
    from tent_core.dispatch import Dispatcher
    from tent_core.peers import LivePeer
    from tent_core.planning import Group
    from tent_core.transport import Endpoint


class FirstWork(Work):
    """A direct group in the hands of its first candidate, with all that its end needs: a closure over as much
    takes longer to make. Where it fails, a Carry takes it up: `inline` is for the thread that submits it."""

    __slots__ = (
        "attempt",
        "batch",
        "began",
        "dispatcher",
        "group",
        "inline",
        "name",
        "options",
        "peer",
        "submitting",
    )

    def __init__(
        self,
        dispatcher: Dispatcher,
        batch: Batch,
        peer: LivePeer,
        group: Group,
        options: Options,
        deadline: float,
        began: float,
        may_block: bool,
    ) -> None:
        selection = group.selection
        entry = selection.entry
        assert entry is not None
        Work.__init__(  # `super()` takes longer
            self,
            group.requests,
            _finished,
            may_block=may_block,
            deadline=deadline,
            devices=entry.devices,
            qp_pool=entry.qp_pool,
            priority=options.priority,
        )
        self.dispatcher = dispatcher
        self.batch = batch
        self.peer = peer
        self.group = group
        self.options = options
        self.began = began
        self.name = selection.candidates[0]
        self.attempt: FirstAttempt | None = None
        self.inline: Carry | None = None
        self.submitting = get_ident()


def _finished(work: Work) -> None:
    assert isinstance(work, FirstWork)
    batch, rows, attempt = work.batch, work.group.rows, work.attempt
    if not work.causes:
        if attempt is not None:
            attempt.ended()
        work.dispatcher.count(work.peer, work.name, work, len(work.status), 0, work.began)
        batch.settle(rows, work.status, work.moved, work.name, work.requests.total)
        return
    selection = work.group.selection
    carry = Carry(
        work.dispatcher,
        batch,
        work.peer,
        work.requests,
        rows,
        selection,
        selection.candidates,
        work.options,
        work.deadline,
        work.may_block,
        False,
    )
    carry.take_up(work.began)
    if attempt is not None:
        attempt.failed(carry)
    if work.submitting == get_ident():
        work.inline = carry  # this same thread goes on
    else:
        carry.go_on_later(work)


class FirstAttempt:
    """Work that a transport has, before there is a Carry for it; implements `batch.Cancellable`.

    `cancelled` says whether somebody does not want it any more.
    """

    __slots__ = ("_carry", "_endpoint", "_work", "cancelled")

    def __init__(self, work: FirstWork, endpoint: Endpoint | None) -> None:
        """`endpoint` has the work, if it can interrupt it."""
        self._work: FirstWork | None = work
        self._endpoint = endpoint
        self._carry: Carry | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """End it as soon as may be, by its transport or by the Carry that goes on from it. Idempotent."""
        self.cancelled = True
        carry, work = self._carry, self._work
        if carry is not None:
            carry.cancel()
        elif work is not None and not work.finished:
            work.cancel(work.dispatcher.now())
            endpoint = self._endpoint
            if endpoint is not None:
                interrupt(endpoint, work, work.name, work.dispatcher.log)

    def ended(self) -> None:
        """Nothing is left to cancel. The work knows whoever made it, so to keep it would leave all of them to
        the garbage collector."""
        self._work = self._endpoint = None

    def failed(self, carry: Carry) -> None:
        """The attempt has failed, and `carry` is about to go on."""
        self._carry = carry
        self.ended()
        if self.cancelled:
            carry.cancel()
