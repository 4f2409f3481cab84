"""A prepared request as one function that carries it out: what `submit` does, with nothing left to look up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tent_shm import syscalls
from tent_shm.owner import Owner
from tent_shm.plan import Plan
from tent_shm.stream import Stream, Whole


def bind(plan: Plan, owner: Owner) -> Callable[[], bool] | None:
    """A function that moves all of `plan` in the calling thread; None where that is not one call to one buffer.

    It answers True when every byte has arrived, and False when that cannot be said: the buffer is gone, or the
    owner is, or the kernel has moved less; `submit` finds out which. Marks and checks are those of `submit`:
    the target is marked before anything is looked at, and what its owner has not lived through has not arrived.
    They take 0.3 microseconds beside the copy. Thread-safe.
    """
    if plan.whole is None or len(plan.targets) != 1:
        return None
    target = plan.targets[0]
    move, answer = _arranged(plan.streams[0], plan.whole, plan.quick)
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


def _arranged(stream: Stream, whole: Whole, quick: bool) -> Whole:
    """The call `whole` with its arguments made once: 0.1 instead of 0.3 microseconds for a short copy of mapped
    memory, which keeps the GIL, and 0.4 less for a system call."""
    if not stream.direct:
        vectors = (stream.local, stream.remote)
        call = syscalls.arranged_call(stream.opcode, stream.pid, *vectors, keep_gil=quick)
        return Whole(call, stream.total)
    if not quick:
        return whole
    target, source = (syscalls.memory(address, stream.total) for address in stream.copied(0))
    return Whole(partial(target.__setitem__, slice(None), source), None)
