"""The contract by itself, without an engine that would check requests first: what the owner's side refuses,
what is reported, and what happens after the end.

Another process may be of another version, or mean harm: an owner that claims to check requests has to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tent_core import topology
from tent_core.errors import TentError, TransportError
from tent_core.testing.conformance.base import KIB, MIB, Base
from tent_core.testing.conformance.verdicts import assert_arrived, assert_untouched
from tent_core.testing.harness import Context, Row, Side, Submitted, requests
from tent_core.transport import Endpoint, LocalBuffer
from tent_core.types import Opcode, Permission, Status
from tent_core.work import Work

ENDS_WITHIN_S = 10.0


@dataclass
class Pair:
    """Two sides of the transport, without engines, and an endpoint of one for the other."""

    here: Side
    there: Side
    endpoint: Endpoint
    ours: LocalBuffer
    source: NDArray[np.uint8]

    def offer(self, permission: Permission = Permission.GLOBAL_READ_WRITE) -> LocalBuffer:
        """A buffer of 4 KiB of 1s at the owner."""
        return self.there.register(np.ones(4 * KIB, np.uint8), permission=permission)

    def post(self, opcode: Opcode, *rows: Row, endpoint: Endpoint | None = None) -> Submitted:
        """Submit, past all checks of an engine."""
        return Submitted(endpoint or self.endpoint, opcode, rows, ENDS_WITHIN_S)

    def call(self, opcode: Opcode, row: Row, endpoint: Endpoint | None = None) -> bool | None:
        """Whether a bound call carries this request out, past all checks; None where nothing is bound."""
        endpoint = endpoint or self.endpoint
        try:
            call = endpoint.bind(requests(opcode, (row,)))
            done = None if call is None else call()
        except TransportError:
            return False
        if done is None or isinstance(done, bool):
            return done
        work = Submitted(endpoint, opcode, (row,), ENDS_WITHIN_S, resume=done).wait()
        return bool(work.status[0] == Status.COMPLETED)


class Contract(Base):
    """The transport called by the contract alone."""

    @pytest.fixture
    def pair(self) -> Iterator[Pair]:
        """Two sides that are connected; `ours` is 64 KiB of 9s."""
        with ExitStack() as stack:
            here, there = (stack.enter_context(self._side()) for _ in range(2))
            there.register(np.zeros(KIB, np.uint8))  # what starts with the first buffer has started
            source = np.full(64 * KIB, 9, np.uint8)
            ours = here.register(source)
            endpoint = here.connect(there)
            stack.callback(endpoint.close, "the test ends")
            yield Pair(here, there, endpoint, ours, source)

    def _side(self) -> Side:
        """A side that sees the devices of this machine, as an engine does. It has not been started."""
        side = Side(self.registry().load(self.transport).declaration, **self.settings)
        found = topology.discover()
        side.context = Context(side, side.context.settings, found)
        side.segment.update(lambda old: replace(old, devices=found.devices()))
        return side

    def _checks(self) -> None:
        if not self.capabilities().owner_checked:
            pytest.skip(
                f"{self.transport} does not claim that the owner's side checks each request"
            )

    @pytest.mark.parametrize(
        ("opcode", "permission"),
        [
            (Opcode.WRITE, Permission.GLOBAL_READ_ONLY),
            (Opcode.WRITE, Permission.LOCAL_READ_WRITE),
            (Opcode.READ, Permission.LOCAL_READ_WRITE),
        ],
    )
    def test_the_owner_refuses_what_its_permission_does_not_allow(
        self, pair: Pair, opcode: Opcode, permission: Permission
    ) -> None:
        self._checks()
        target = pair.offer(permission)
        row = (pair.ours, 0, target, 0, KIB)
        work = None
        with suppress(
            TransportError
        ):  # refused before it began: the owner has not told how to reach it
            work = pair.post(opcode, row).wait()
        what = f"the owner's side ignores the permission {permission.name} of a buffer"
        _nothing_has_moved(pair, target, what)
        if work is not None:
            _refused(work)
        called = pair.call(opcode, row)
        _nothing_has_moved(pair, target, f"in a bound call, {what}")
        assert not called, (
            "an error was swallowed: a bound call says that it did what the owner refuses"
        )

    def test_the_owner_refuses_a_range_that_leaves_its_buffer(self, pair: Pair) -> None:
        self._checks()
        memory = np.ones(12 * KIB, np.uint8)
        target = pair.there.register(memory[4 * KIB : 8 * KIB])
        for offset, length in ((0, 4 * KIB + 1), (4 * KIB, 1), (-1, 8), (4 * KIB - 1, 2)):
            work = pair.post(Opcode.WRITE, (pair.ours, 0, target, offset, length)).wait()
            what = "the owner's side does not check ranges"
            assert_untouched(memory, np.ones(12 * KIB, np.uint8), what)
            _refused(work)
            assert not pair.call(Opcode.WRITE, (pair.ours, 0, target, offset, length))
            what = "the owner's side does not check ranges of bound calls"
            assert_untouched(memory, np.ones(12 * KIB, np.uint8), what)

    def test_the_owner_refuses_a_generation_that_has_gone(self, pair: Pair) -> None:
        self._checks()
        old = pair.offer()
        pair.post(Opcode.WRITE, (pair.ours, 0, old, 0, KIB)).wait()
        pair.there.unregister(old)
        new = pair.offer()
        assert new.id == old.id
        stale = replace(new, generation=old.generation)
        work = None
        with suppress(TransportError):  # refused before it began: the newest snapshot says so
            work = pair.post(Opcode.WRITE, (pair.ours, 0, stale, 0, KIB)).wait()
        what = "the owner's side takes an id for a buffer, whatever its generation"
        assert_untouched(pair.there.arrays[new.id], np.ones(4 * KIB, np.uint8), what)
        if work is not None:
            _refused(work)
        assert not pair.call(Opcode.WRITE, (pair.ours, 0, stale, 0, KIB))
        what = "a bound call takes an id for a buffer, whatever its generation"
        assert_untouched(pair.there.arrays[new.id], np.ones(4 * KIB, np.uint8), what)

    def test_each_request_of_a_batch_is_reported_for_itself(self, pair: Pair) -> None:
        self._checks()
        good, bad = pair.offer(), pair.offer(Permission.GLOBAL_READ_ONLY)
        memory = pair.there.arrays[good.id]
        before = memory.copy()
        expected = before.copy()
        expected[:KIB] = expected[2 * KIB : 3 * KIB] = 9
        submitted = pair.post(
            Opcode.WRITE,
            (pair.ours, 0, good, 0, KIB),
            (pair.ours, KIB, bad, 0, KIB),
            (pair.ours, 2 * KIB, good, 2 * KIB, KIB),
        )
        work = submitted.wait()
        assert work.status[1] == Status.FAILED, "a request that the owner refused did not fail"
        assert isinstance(work.cause_of(1), TentError), "a failed request has no cause"
        for row, start in ((0, 0), (2, 2 * KIB)):
            if work.status[row] == Status.COMPLETED:
                assert work.moved[row] == KIB, "a completed request moved fewer bytes than it has"
            else:  # it may give up on the rest of the batch, if it says so
                expected[start : start + KIB] = memory[start : start + KIB]
        assert_arrived(memory, before, expected, "a batch of which one request was refused")
        _once(submitted)

    def test_a_completed_request_has_moved_all_of_it(self, pair: Pair) -> None:
        memory = np.ones(MIB, np.uint8)
        target = pair.there.register(memory)
        rows = [(pair.ours, 0, target, n * KIB, 1 + n * 7) for n in range(64)]
        submitted = pair.post(Opcode.WRITE, *rows)
        work = submitted.wait()
        assert set(work.status.tolist()) == {Status.COMPLETED}
        assert work.moved.tolist() == [row[4] for row in rows], (
            "completed requests moved fewer bytes than they have"
        )
        expected = np.ones(MIB, np.uint8)
        for _, _, _, at, length in rows:
            expected[at : at + length] = 9
        assert_arrived(memory, np.ones(MIB, np.uint8), expected, "a batch by the contract")
        _once(submitted)

    @pytest.mark.parametrize("length", [1, KIB, 64 * KIB])
    def test_a_bound_call_carries_out_all_of_its_request(self, pair: Pair, length: int) -> None:
        target = pair.there.register(np.ones(64 * KIB, np.uint8))
        if pair.call(Opcode.WRITE, (pair.ours, 0, target, 0, length)) is None:
            pytest.skip(f"{self.transport} binds no request of {length} bytes")
        expected = np.ones(64 * KIB, np.uint8)
        expected[:length] = 9
        memory = pair.there.arrays[target.id]
        assert_arrived(memory, np.ones(64 * KIB, np.uint8), expected, "a bound WRITE")
        memory[:] = 5
        before = pair.source.copy()
        assert pair.call(Opcode.READ, (pair.ours, 0, target, 0, length))
        expected[:] = before
        expected[:length] = 5
        assert_arrived(pair.source, before, expected, "a bound READ")

    def test_progress_grows_with_the_bytes_if_that_is_claimed(self, pair: Pair) -> None:
        if not self.capabilities().partial_progress:
            pytest.skip(f"{self.transport} does not claim partial progress")
        target = pair.there.register(np.ones(64 * KIB, np.uint8))
        rows = [(pair.ours, n * KIB, target, n * KIB, KIB) for n in range(0, 64, 2)]
        for opcode in (Opcode.WRITE, Opcode.READ):
            work = pair.post(opcode, *rows).wait()
            # Headers may be counted as well: it is there to tell a stalled attempt from one that moves.
            assert work.progress >= work.requests.total, (
                f"{self.transport} claims partial progress, and says that {work.progress} of "
                f"{work.requests.total} bytes have moved when all have"
            )

    def test_whatever_is_under_way_is_reported_when_the_endpoint_closes(self, pair: Pair) -> None:
        memory = np.ones(4 * MIB, np.uint8)
        target = pair.there.register(memory)
        rows = [(pair.ours, 0, target, n * 64 * KIB, 64 * KIB) for n in range(64)]
        endpoint = pair.here.connect(pair.there)
        submitted = [pair.post(Opcode.WRITE, *rows, endpoint=endpoint) for _ in range(4)]
        endpoint.close("the peer has departed")
        endpoint.close("a second time, which changes nothing")
        for each in submitted:
            work = each.wait(2.0)
            assert set(work.status.tolist()) <= {
                Status.COMPLETED,
                Status.FAILED,
                Status.CANCELED,
                Status.TIMEOUT,
                Status.INITIAL,
            }
            _once(each)
        assert not pair.call(Opcode.WRITE, rows[0], endpoint), "a closed endpoint makes bound calls"
        try:
            late = pair.post(Opcode.WRITE, rows[0], endpoint=endpoint)
        except TransportError:
            return
        assert late.wait(2.0).status[0] != Status.COMPLETED, "a closed endpoint carries work"

    def test_stopping_is_allowed_twice_and_before_any_start(self) -> None:
        self._side().transport.stop()
        with self._side() as side:
            side.transport.stop()


def _nothing_has_moved(pair: Pair, target: LocalBuffer, what: str) -> None:
    assert_untouched(pair.there.arrays[target.id], np.ones(4 * KIB, np.uint8), what)
    assert_untouched(pair.source, np.full(64 * KIB, 9, np.uint8), what)


def _once(submitted: Submitted) -> None:
    """Every request was reported once."""
    assert submitted.work.surplus == 0, f"{submitted.work.surplus} requests were reported twice"
    assert submitted.finished == 1


def _refused(work: Work) -> None:
    """The request failed."""
    assert work.status[0] == Status.FAILED, (
        f"an error was swallowed: what the owner refused was reported as {Status(work.status[0]).name}"
    )
