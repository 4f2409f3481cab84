"""Who connects and who asks for keys, decided step by step, and by 32 threads at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpcomm_rig import at_once

from tent_core.descriptor import BufferDescriptor
from tent_core.errors import TransportError
from tent_core.testing.waiting import wait_until
from tent_core.types import BufferState, Permission
from tent_mpcomm.adapter import Range
from tent_mpcomm.attribute import HandshakeAddress
from tent_mpcomm.registry import Connections, Next, RangeId, Registry, State, coverage

AT = HandshakeAddress("10.0.0.1", 13579)
ELSEWHERE = HandshakeAddress("10.0.0.2", 13579)
A: frozenset[RangeId] = frozenset({(0, 1)})
B: frozenset[RangeId] = frozenset({(1, 2)})
HOST = "peer:1#ab"


def ready(connections: Connections, covered: frozenset[RangeId]) -> None:
    step, connection, owner = connections.decide(HOST, A, 0)
    assert step is Next.CONNECT
    assert connections.connected(connection, owner, AT)
    connections.answered(connection, owner, covered)


def test_the_first_to_come_connects_and_then_asks_for_keys_and_others_wait_meanwhile() -> None:
    connections = Connections()
    step, connection, owner = connections.decide(HOST, A, 0)
    assert (step, connection.state) == (Next.CONNECT, State.CONNECTING)
    assert connections.decide(HOST, A, 0)[0] is Next.WAIT
    assert connections.connected(connection, owner, AT)
    assert connection.state is State.CONNECTED_NO_KEYS
    assert connections.decide(HOST, A, 0)[0] is Next.WAIT
    connections.answered(connection, owner, A)
    assert connection.state is State.READY
    assert connections.decide(HOST, A, 0)[0] is Next.GO


def test_a_connect_that_failed_leaves_nothing() -> None:
    connections = Connections()
    _, connection, owner = connections.decide(HOST, A, 0)
    connections.failed(connection, owner)
    assert (connections.get(HOST), len(connections)) == (None, 0)
    assert connections.decide(HOST, A, 0)[0] is Next.CONNECT


def test_a_query_that_failed_keeps_the_connection_and_only_it_is_made_again() -> None:
    connections = Connections()
    _, connection, owner = connections.decide(HOST, A, 0)
    connections.connected(connection, owner, AT)
    connections.failed(connection, owner)
    step, again, _ = connections.decide(HOST, A, connections.asked(HOST))
    assert (step, again) == (Next.QUERY, connection)
    assert again.address == AT  # where the live connection was made to, whatever is advertised now


def test_a_range_that_is_not_covered_is_asked_for_and_one_that_is_goes_on_meanwhile() -> None:
    connections = Connections()
    ready(connections, A)
    step, connection, owner = connections.decide(HOST, A | B, connections.asked(HOST))
    assert step is Next.QUERY
    assert connections.decide(HOST, A, 0)[0] is Next.GO
    assert connections.decide(HOST, B, connections.asked(HOST))[0] is Next.WAIT
    connections.answered(connection, owner, A | B)
    assert connections.decide(HOST, A | B, 0)[0] is Next.GO


def test_a_refresh_that_failed_leaves_the_keys_that_there_were() -> None:
    connections = Connections()
    ready(connections, A)
    _, connection, owner = connections.decide(HOST, B, connections.asked(HOST))
    connections.failed(connection, owner)
    assert connections.decide(HOST, A, 0)[0] is Next.GO


def test_fewer_ranges_than_covered_ask_for_nothing() -> None:
    connections = Connections()
    ready(connections, A | B)
    assert connections.decide(HOST, frozenset(), 0)[0] is Next.GO
    assert connections.decide(HOST, B, 0)[0] is Next.GO


def test_what_a_query_did_not_bring_is_missing_for_whoever_came_before_it_began() -> None:
    connections = Connections()
    ready(connections, A)
    before = connections.asked(HOST)
    _, connection, owner = connections.decide(HOST, B, before)
    during = connections.asked(HOST)
    connections.answered(connection, owner, A)
    assert connections.decide(HOST, B, before)[0] is Next.MISSING
    assert connections.decide(HOST, B, during)[0] is Next.QUERY


def test_a_late_clean_up_does_not_touch_what_a_newer_owner_makes() -> None:
    connections = Connections()
    _, old, old_owner = connections.decide(HOST, A, 0)
    connections.take_over(HOST)
    step, new, new_owner = connections.decide(HOST, A, 0)
    assert step is Next.CONNECT
    assert new_owner != old_owner
    connections.failed(old, old_owner)
    assert not connections.connected(old, old_owner, ELSEWHERE)
    connections.answered(old, old_owner, A)
    assert connections.get(HOST) is new
    assert connections.connected(new, new_owner, AT)
    connections.answered(new, new_owner, A)
    assert connections.decide(HOST, A, 0)[0] is Next.GO


def test_a_connection_made_after_its_owner_was_given_up_is_not_made_twice() -> None:
    connections = Connections()
    _, connection, owner = connections.decide(HOST, A, 0)
    connections.take_over(HOST)
    assert not connections.connected(connection, owner, AT)
    assert connections.decide(HOST, A, 0)[0] is Next.QUERY


def test_a_peer_that_was_let_go_of_is_verified_before_its_keys_are_used() -> None:
    connections = Connections()
    ready(connections, A)
    connections.doubt(HOST)
    step, connection, owner = connections.decide(HOST, A, 0)
    assert step is Next.VERIFY
    assert connections.decide(HOST, A, 0)[0] is Next.WAIT
    connections.verified(connection, owner)
    assert connections.decide(HOST, A, 0)[0] is Next.GO


# ---------------------------------------------------------------- coverage


def described(
    number: int, generation: int, address: int, length: int, state: BufferState = BufferState.LIVE
) -> BufferDescriptor:
    permission = Permission.GLOBAL_READ_WRITE
    return BufferDescriptor(
        number, generation, "b", address, length, "cpu:0", permission, state=state
    )


def test_only_buffers_whose_whole_memory_was_replied_are_covered() -> None:
    buffers = {
        0: described(0, 1, 1000, 100),
        1: described(1, 2, 2000, 100),
        2: described(2, 3, 3000, 100),
        3: described(3, 4, 1010, 20),
        4: described(4, 5, 1000, 100, BufferState.REVOKING),
        5: described(5, 6, 5000, 10),
    }
    replied = [Range(1000, 100), Range(2000, 99), Range(3000, 500)]
    assert coverage(buffers, replied) == {(0, 1), (2, 3), (3, 4)}


def test_the_same_address_registered_again_is_not_covered_by_an_older_snapshot() -> None:
    before = {0: described(0, 1, 1000, 100)}
    covered = coverage(before, [Range(1000, 100)])
    assert (0, 2) not in covered
    assert (0, 1) in covered


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), max_size=6),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), max_size=6),
)
def test_every_byte_of_what_is_covered_has_a_key(
    buffers: list[tuple[int, int]], replied: list[tuple[int, int]]
) -> None:
    known = {i: described(i, i, *each) for i, each in enumerate(buffers)}
    for number, _ in coverage(known, [Range(*each) for each in replied]):
        start, length = buffers[number]
        assert any(a <= start and start + length <= a + n for a, n in replied)


# ---------------------------------------------------------------- threads


class Calls:
    """Counts what is called; `before` is called within each."""

    def __init__(self, covered: Collection[RangeId], before: Callable[[str], None]) -> None:
        self.covered = covered
        self.before = before
        self.made: list[str] = []

    def connect(self) -> HandshakeAddress:
        self.made.append("connect")
        self.before("connect")
        return AT

    def query(self, address: HandshakeAddress) -> Collection[RangeId]:
        self.made.append(f"query {address}")
        self.before("query")
        return self.covered

    def verify(self) -> None:
        self.made.append("verify")
        self.before("verify")


def test_32_threads_make_one_connection_and_one_query() -> None:
    registry = Registry()
    calls = Calls(A, lambda _: time.sleep(0.02))
    deadline = time.monotonic() + 20
    errors = at_once(32, lambda: registry.ready(HOST, A, calls=calls, deadline=deadline) and None)
    assert errors == []
    assert calls.made == ["connect", f"query {AT}"]


def test_the_failure_of_the_owner_wakes_the_others_and_one_of_them_begins_anew() -> None:
    registry = Registry()
    failures = ["connect", "query"]

    def fail(call: str) -> None:
        time.sleep(0.01)
        if call in failures:
            failures.remove(call)
            raise TransportError(f"{call} failed")

    calls = Calls(A, fail)
    deadline = time.monotonic() + 20
    errors = at_once(32, lambda: registry.ready(HOST, A, calls=calls, deadline=deadline) and None)
    assert sorted(map(str, errors)) == ["connect failed", "query failed"]
    assert calls.made == ["connect"] * 2 + [f"query {AT}"] * 2


def test_who_waits_for_another_thread_does_so_until_its_deadline() -> None:
    registry = Registry()
    inside, go_on = threading.Event(), threading.Event()

    def wait(_: str) -> None:
        inside.set()
        assert go_on.wait(20)

    slow = Calls(A, wait)
    late = time.monotonic() + 20
    owner = threading.Thread(
        target=lambda: registry.ready(HOST, A, calls=slow, deadline=late), daemon=True
    )
    owner.start()
    assert inside.wait(10)
    with pytest.raises(TransportError, match="still connecting"):
        registry.ready(HOST, A, calls=slow, deadline=time.monotonic() + 0.02)
    go_on.set()
    owner.join(10)
    registry.ready(HOST, A, calls=slow, deadline=late)
    assert len(slow.made) == 2


def test_what_the_peer_does_not_show_is_an_error_that_names_it() -> None:
    registry = Registry()
    calls = Calls(A, lambda _: None)
    with pytest.raises(TransportError, match=r"does not show buffer 1 \(generation 2\)"):
        registry.ready(HOST, A | B, calls=calls, deadline=time.monotonic() + 5)
    assert registry.ready(HOST, A, calls=calls, deadline=time.monotonic() + 5).covers(A)


def test_a_thread_that_waits_is_woken_when_the_owner_is_given_up() -> None:
    registry = Registry()
    inside, go_on = threading.Event(), threading.Event()

    def wait(_: str) -> None:
        inside.set()
        assert go_on.wait(20)

    stuck = Calls(A, wait)
    deadline = time.monotonic() + 20
    threading.Thread(
        target=lambda: registry.ready(HOST, A, calls=stuck, deadline=deadline), daemon=True
    ).start()
    assert inside.wait(10)
    quick = Calls(A, lambda _: None)
    other = threading.Thread(
        target=lambda: registry.ready(HOST, A, calls=quick, deadline=deadline), daemon=True
    )
    other.start()
    registry.take_over(HOST)
    other.join(10)
    assert quick.made == ["connect", f"query {AT}"]
    go_on.set()
    connection = registry.get(HOST)
    wait_until(lambda: len(stuck.made) >= 1)
    assert connection is not None
    assert connection.covers(A)
