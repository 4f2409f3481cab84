"""Requests to transfers and back: one report each, each handle released once."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tent_core.errors import TransportError
from tent_core.types import Opcode, Status
from tent_core.work import Requests, Work
from tent_mpcomm.transfers import Posting, Rows


def requests(rows: list[tuple[int, int, int]], opcode: Opcode = Opcode.WRITE) -> Requests:
    """Rows of local address, remote address and length, in buffer 0 of either side."""
    local = np.array([(a, n) for a, _, n in rows], np.uint64)
    remote = np.array([(b, n) for _, b, n in rows], np.uint64)
    ids, total = np.zeros(len(rows), np.int32), sum(n for *_, n in rows)
    return Requests(opcode, local, remote, ids, ids, (0,), (0,), {0: 1}, total)


class Comm:
    """Transfers end when a test says so; what is submitted and released is written down."""

    def __init__(self) -> None:
        self.submitted: list[tuple[str, int, str, int, int]] = []
        self.outcomes: dict[int, dict[str, int] | Exception] = {}
        self.released: Counter[int] = Counter()
        self.refused: set[int] = set()
        """Local addresses that it does not take."""

    def _submit(self, call: str, local: int, host_id: str, remote: int, length: int) -> int:
        self.submitted.append((call, local, host_id, remote, length))
        if local in self.refused:
            self.submitted.pop()
            return 0
        return len(self.submitted)

    def put(self, *what: Any) -> int:
        return self._submit("put", *what)

    def get(self, *what: Any) -> int:
        return self._submit("get", *what)

    def ended(self, handle: int) -> bool:
        assert not self.released[handle], "asked for a handle that was released"
        return handle in self.outcomes

    def result(self, handle: int) -> dict[str, int]:
        outcome = self.outcomes[handle]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def release(self, handle: int) -> None:
        self.released[handle] += 1

    def end(self, handle: int, code: int = 0, moved: int | None = None) -> None:
        length = self.submitted[handle - 1][4]
        self.outcomes[handle] = {
            "error_code": code,
            "bytes_transferred": length if moved is None else moved,
        }


class Posted:
    """A posting whose end is counted."""

    def __init__(
        self, what: Requests, *, window: int = 100, deadline: float = float("inf")
    ) -> None:
        self.comm = Comm()
        self.finished = 0
        self.ends: list[TransportError | None] = []
        self.work = Work(what, self._finished, deadline=deadline)
        self.posting = Posting(
            self.work,
            Rows.of(what),
            self.comm,
            "host",
            window,
            lambda _, cause: self.ends.append(cause),
        )

    def _finished(self, work: Work) -> None:
        self.finished += 1

    @property
    def handles(self) -> set[int]:
        return {n + 1 for n in range(len(self.comm.submitted))}

    def ended_well_kept(self) -> None:
        """Each handle was released once, the end was told once and reported once."""
        assert self.posting.over
        assert self.comm.released == Counter(self.handles)
        assert len(self.ends) == 1
        assert (self.finished, self.work.surplus) == (1, 0)


APART = [(100, 1000, 10), (200, 2000, 20), (300, 3000, 30)]


@pytest.mark.parametrize(("opcode", "call"), [(Opcode.WRITE, "put"), (Opcode.READ, "get")])
def test_a_write_is_a_put_and_a_read_is_a_get_of_the_same_addresses(
    opcode: Opcode, call: str
) -> None:
    p = Posted(requests(APART, opcode))
    p.posting.step()
    assert p.comm.submitted == [(call, a, "host", b, n) for a, b, n in APART]
    for handle in p.handles:
        p.comm.end(handle)
    p.posting.step()
    assert p.work.status.tolist() == [Status.COMPLETED] * 3
    p.ended_well_kept()
    assert p.ends == [None]


def test_what_failed_carries_the_native_code_and_the_rest_completes() -> None:
    p = Posted(requests(APART))
    p.posting.step()
    p.comm.end(1)
    p.comm.end(2, code=-5)
    p.comm.end(3)
    p.posting.step()
    assert p.work.status.tolist() == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert "-5 (transfer)" in str(p.work.cause_of(1))
    assert not p.work.unfenced
    p.ended_well_kept()
    assert p.ends == [p.work.cause_of(1)]


def test_success_with_fewer_bytes_than_asked_is_a_failure() -> None:
    p = Posted(requests(APART))
    p.posting.step()
    for handle, moved in ((1, 10), (2, 19), (3, 30)):
        p.comm.end(handle, moved=moved)
    p.posting.step()
    assert p.work.status.tolist() == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert "19 of 20 bytes" in str(p.work.cause_of(1))
    p.ended_well_kept()


@pytest.mark.parametrize("code", [-6, -9])
def test_codes_that_do_not_say_that_it_has_ended_leave_the_outcome_unknown(code: int) -> None:
    p = Posted(requests(APART[:1]))
    p.posting.step()
    p.comm.end(1, code=code)
    p.posting.step()
    assert p.work.unfenced
    p.ended_well_kept()


def test_what_the_library_does_not_take_is_refused_and_may_go_elsewhere() -> None:
    p = Posted(requests(APART))
    p.comm.refused = {200}
    p.posting.step()
    p.comm.end(1)
    p.posting.step()
    p.posting.step()
    p.comm.end(2)
    p.posting.step()
    assert p.work.status.tolist() == [Status.COMPLETED, Status.INITIAL, Status.COMPLETED]
    assert "does not take a transfer of 20 bytes" in str(p.work.cause_of(1))
    p.ended_well_kept()
    assert p.ends == [None]  # others got through, so that nothing is wrong with the connection


def test_what_there_is_no_room_for_is_submitted_again_when_there_is() -> None:
    p = Posted(requests(APART))
    p.comm.refused = {300}
    p.posting.step()
    assert len(p.comm.submitted) == 2
    p.comm.refused = set()
    p.comm.end(1)
    p.posting.step()
    assert len(p.comm.submitted) == 3
    for handle in (2, 3):
        p.comm.end(handle)
    p.posting.step()
    assert p.work.status.tolist() == [Status.COMPLETED] * 3
    p.ended_well_kept()


def test_a_connection_that_takes_nothing_at_all_has_failed() -> None:
    p = Posted(requests(APART))
    p.comm.refused = {100, 200, 300}
    p.posting.step()
    assert p.work.status.tolist() == [Status.INITIAL] * 3
    p.ended_well_kept()
    assert p.ends == [p.work.cause_of(0)]


def test_a_result_that_raises_releases_the_handle_all_the_same() -> None:
    p = Posted(requests(APART))
    p.posting.step()
    p.comm.end(1)
    p.comm.end(3)
    p.comm.outcomes[2] = RuntimeError("oh")
    p.posting.step()
    assert p.work.status.tolist() == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert p.work.unfenced
    p.ended_well_kept()


def test_a_handle_that_cannot_be_asked_for_is_given_up_with_its_outcome_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = Posted(requests(APART))
    p.posting.step()

    def broken(handle: int) -> bool:
        raise RuntimeError("oh")

    monkeypatch.setattr(p.comm, "ended", broken)
    p.posting.step()
    assert p.work.status.tolist() == [Status.FAILED] * 3
    assert p.work.unfenced
    p.ended_well_kept()


def test_no_more_than_the_window_is_under_way() -> None:
    rows = [(1000 * i, 5000 + 2000 * i, 1) for i in range(10)]
    p = Posted(requests(rows), window=4)
    p.posting.step()
    assert len(p.comm.submitted) == 4
    for handle in (1, 2):
        p.comm.end(handle)
    p.posting.step()
    assert len(p.comm.submitted) == 6
    for _ in range(3):
        for handle in p.handles:
            p.comm.end(handle)
        p.posting.step()
    p.ended_well_kept()


def test_what_is_given_up_fails_at_once_and_is_held_until_the_library_has_let_go() -> None:
    rows = [(1000 * i, 5000 + 2000 * i, 1) for i in range(4)]
    p = Posted(requests(rows), window=3)
    p.posting.step()
    p.comm.end(1)
    p.posting.step()
    p.posting.give_up(TransportError("the peer has gone"))
    p.posting.step()
    assert p.finished == 1
    assert p.posting.reported.is_set()
    assert p.work.status.tolist() == [Status.COMPLETED, *[Status.FAILED] * 3]
    assert p.work.unfenced
    assert (p.posting.over, p.ends) == (False, [])
    for handle in (2, 3, 4):
        p.comm.end(handle, code=-5)
    p.posting.step()
    p.ended_well_kept()


def test_past_its_deadline_it_ends_as_a_timeout() -> None:
    p = Posted(requests(APART), deadline=time.monotonic() - 1)
    p.posting.step()
    assert p.comm.submitted == []
    assert p.work.status.tolist() == [Status.TIMEOUT] * 3
    p.ended_well_kept()


@pytest.mark.parametrize("given_up", [False, True])
def test_uninstalling_releases_what_is_under_way_once(given_up: bool) -> None:
    p = Posted(requests(APART))
    p.posting.step()
    if given_up:
        p.posting.give_up(TransportError("closed"))
        p.posting.step()
    p.posting.release_all()
    assert p.work.status.tolist() == [Status.FAILED] * 3
    p.ended_well_kept()


@given(st.data())
def test_whatever_happens_every_handle_is_released_once_and_every_request_reported_once(
    data: st.DataObject,
) -> None:
    rows = [(1000 * i, 5000 + 2000 * i, 4) for i in range(data.draw(st.integers(1, 8)))]
    p = Posted(requests(rows), window=data.draw(st.integers(1, 8)))
    p.comm.refused = data.draw(st.sets(st.integers(0, 7).map(lambda i: 1000 * i)))
    for _ in range(40):
        if p.posting.over:
            break
        action = data.draw(st.sampled_from(["step", "step", "end", "give up", "uninstall"]))
        if action == "step":
            p.posting.step()
        elif action == "give up":
            p.posting.give_up(TransportError("given up"))
        elif action == "uninstall":
            p.posting.release_all()
        elif under_way := sorted(p.handles - set(p.comm.released) - set(p.comm.outcomes)):
            p.comm.end(
                data.draw(st.sampled_from(under_way)), data.draw(st.sampled_from([0, 0, -5, -6]))
            )
    if not p.posting.over:
        p.posting.release_all()
    assert p.work.finished
    p.ended_well_kept()
