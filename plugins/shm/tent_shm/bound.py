"""A prepared request as one function that carries it out: what `submit` does, with nothing to look up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tent_core import gil
from tent_core.transport import BoundCall
from tent_shm import syscalls
from tent_shm.owner import Owner
from tent_shm.plan import Plan
from tent_shm.stream import Stream, Whole


def bind(plan: Plan, owner: Owner) -> BoundCall | None:
    """A function that moves the one request of `plan`; None where it is refused, or for threads to share.

    It answers True when every byte has arrived, and False when that cannot be said: the buffer is gone, or
    the owner is, or the kernel has moved less; `submit` finds out which. Marks and checks are those of
    `submit`: the target is marked before anything is looked at, and what its owner has not lived through has
    not arrived. They take 0.15 microseconds (`submit` with its work 2.5). Thread-safe.
    """
    if plan.whole is None:
        return None
    (target,) = plan.targets
    move, answer = _arranged(plan.streams[0], plan.whole, plan.quick)
    held = plan.held
    if not plan.quick and held is not None:
        move = partial(_unless_contended, move, held.call)
    begin, end, word, keeper = target.begin, target.end, owner.word, owner.keeper

    def carry_out() -> bool:
        if not begin():
            return False
        try:
            return (
                word.value == keeper
                and move() == answer
                and word.value == keeper
                and target.gone is None
            )
        finally:
            end()

    return carry_out


def _unless_contended(move: Callable[[], int | None], held: Callable[[], int | None]) -> int | None:
    return held() if gil.contended() else move()


def _arranged(stream: Stream, whole: Whole, quick: bool) -> Whole:
    """The call `whole` with its arguments made once; a short copy of mapped memory, which keeps the GIL, is
    an assignment of a memoryview: 0.08 instead of 0.21 microseconds for 4 KiB."""
    if not stream.direct:
        vectors = (stream.local, stream.remote)
        call = syscalls.arranged_call(stream.opcode, stream.pid, *vectors, keep_gil=quick)
        return Whole(call, stream.total)
    if not quick:
        return whole
    target, source = (syscalls.memory(address, stream.total) for address in stream.copied(0))
    return Whole(partial(target.__setitem__, slice(None), source), None)
