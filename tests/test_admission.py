"""Who may start and who waits: limits, turns, promotion."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tent_core.admission import Admission, Limit, Rules, Ticket
from tent_core.types import Priority

HIGH, MEDIUM, LOW = Priority
NONE = 1e9


def ticket(priority: Priority = LOW, size: int = 10, deadline: float = NONE) -> Ticket:
    return Ticket(priority, size, 1, deadline, lambda: None)


def rules(**options: float | bool) -> Rules:
    return Rules({MEDIUM: Limit(40, 8), LOW: Limit(20, 4)}, **options)  # type: ignore[arg-type]


def test_what_fits_starts_at_once_and_what_does_not_waits_for_room() -> None:
    gate = Admission(rules())
    first, second, third = ticket(), ticket(), ticket()
    assert gate.enter(first, 0)
    assert gate.enter(second, 0)
    assert not gate.enter(third, 0)
    assert gate.waiting == 1
    assert gate.leave(first, 0) == [third]
    assert gate.waiting == 0


def test_tasks_are_limited_as_bytes_are() -> None:
    gate = Admission(rules())
    assert [gate.enter(ticket(size=1), 0) for _ in range(5)] == [True] * 4 + [False]


def test_something_larger_than_the_limit_starts_when_nothing_else_is_under_way() -> None:
    gate = Admission(rules())
    small, large = ticket(), ticket(size=1000)
    gate.enter(small, 0)
    assert not gate.enter(large, 0)
    assert gate.leave(small, 0) == [large]
    assert not gate.enter(ticket(), 0)


def test_a_higher_priority_has_more_room_and_goes_first() -> None:
    gate = Admission(rules())
    running = [ticket(), ticket()]
    for one in running:
        gate.enter(one, 0)
    low = ticket()
    assert not gate.enter(low, 0)
    assert gate.enter(ticket(MEDIUM, 20), 0)
    medium = ticket(MEDIUM)
    assert not gate.enter(medium, 0)
    assert gate.leave(running[0], 0) == [medium]


def test_a_late_one_does_not_pass_those_of_its_priority_that_wait() -> None:
    gate = Admission(rules())
    running = ticket(size=15)
    gate.enter(running, 0)
    waits = ticket(size=18)
    assert not gate.enter(waits, 0)
    assert not gate.enter(ticket(size=1), 0)


def test_by_deadline_the_earliest_goes_first_within_a_priority() -> None:
    gate = Admission(rules(by_deadline=True))
    running = ticket(size=20)
    gate.enter(running, 0)
    late, early = ticket(size=20, deadline=9), ticket(size=20, deadline=5)
    gate.enter(late, 0)
    gate.enter(early, 0)
    assert gate.leave(running, 0) == [early]


def test_who_has_waited_long_moves_up_and_takes_nobody_along() -> None:
    gate = Admission(rules(promotion=1.0))
    running = ticket(size=20)
    gate.enter(running, 0)
    old, young = ticket(), ticket()
    gate.enter(old, 0)
    gate.enter(young, 0.5)
    assert gate.next_promotion() == 1.0
    assert gate.due(0.9) == []
    assert gate.due(1.0) == [old]
    assert gate.next_promotion() == 1.5


def test_who_gives_up_waits_no_more_and_holds_nobody_up() -> None:
    gate = Admission(rules())
    running, leaving, behind = ticket(size=20), ticket(size=20), ticket(size=20)
    for one in (running, leaving, behind):
        gate.enter(one, 0)
    assert gate.withdraw(leaving)
    assert not gate.withdraw(leaving)
    assert not gate.withdraw(running)
    assert gate.leave(running, 0) == [behind]


@given(
    st.lists(
        st.tuples(st.sampled_from([MEDIUM, LOW]), st.integers(1, 60), st.booleans()), max_size=60
    )
)
def test_everybody_gets_in_and_limits_hold_whatever_the_order(
    entries: Sequence[tuple[Priority, int, bool]],
) -> None:
    gate = Admission(rules(promotion=5.0))
    limits = {MEDIUM: 40, LOW: 20}
    running: list[Ticket] = []
    waiting = 0
    for now, (priority, size, leaves) in enumerate(entries):
        one = ticket(priority, size)
        if gate.enter(one, now):
            running.append(one)
            assert gate.bytes <= limits[priority] or len(running) == 1
        else:
            waiting += 1
        if leaves and running:
            admitted = gate.leave(running.pop(0), now)
            running += admitted
            waiting -= len(admitted)
        assert gate.waiting == waiting
        assert gate.bytes == sum(t.bytes for t in running)
    while running:
        running += gate.leave(running.pop(0), len(entries))
    assert (gate.waiting, gate.bytes, gate.tasks) == (0, 0, 0)


def test_who_waits_beyond_its_deadline_goes_without_having_been_admitted() -> None:
    gate = Admission(rules(promotion=600.0))
    large = ticket(size=1000)
    gate.enter(large, 0)
    late, patient = ticket(deadline=2.0), ticket(deadline=9.0)
    assert not gate.enter(late, 0.7)
    assert not gate.enter(patient, 0.8)
    assert gate.next_due() == 2.0
    assert gate.due(1.3) == []
    assert gate.due(2.0) == [late]
    assert not late.admitted
    assert gate.waiting == 1
    assert gate.leave(late, 2.0) == []
    assert gate.leave(large, 2.0) == [patient]
    assert gate.leave(large, 2.0) == []
    assert gate.bytes == patient.bytes
