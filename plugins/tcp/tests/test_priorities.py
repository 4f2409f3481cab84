"""Work of low priority leaves a stream to others, and goes after them where it waits for one."""

from __future__ import annotations

import pytest
from tcp_harness import Here, OwnerProcess
from tcp_proxy import Proxy
from test_fences import Attempt, waiting

from tent_core.types import Opcode, Priority, Status

KIB, MIB = 1 << 10, 1 << 20
READ, WRITE = Opcode.READ, Opcode.WRITE
LOW, MEDIUM, HIGH = Priority.LOW, Priority.MEDIUM, Priority.HIGH


@waiting
@pytest.mark.parametrize("bulk_waits", [True, False])
def test_bulk_leaves_a_stream_to_what_is_urgent(
    owner: OwnerProcess, bulk_waits: bool, waiting: bool
) -> None:
    with Here(streams=2) as here:
        local, remote = here.offer(8 * MIB), owner.offer(8 * MIB)
        with Proxy(owner.peer(), allowed=MIB) as proxy:
            endpoint = here.transport.connect(proxy.through)
            row = (local, 0, remote, 0, 8 * MIB)
            bulk = [
                Attempt(endpoint, WRITE, row, waiting=bulk_waits, priority=LOW) for _ in range(3)
            ]
            proxy.wait_until_holding(MIB)
            for _ in range(3):
                row = (local, 0, remote, 0, 4 * KIB)
                get = Attempt(endpoint, READ, row, waiting=waiting, priority=HIGH)
                assert get.end().status[0] == Status.COMPLETED
            assert not any(attempt.work.finished for attempt in bulk)
            assert endpoint.holdings()["streams"] == 2


def test_bulk_alone_has_its_stream_even_where_there_is_only_one(owner: OwnerProcess) -> None:
    with Here(streams=1) as here:
        local, remote = here.offer(MIB), owner.offer(MIB)
        endpoint = here.transport.connect(owner.peer())
        row = (local, 0, remote, 0, MIB)
        for is_waiting in (True, False):
            done = Attempt(endpoint, WRITE, row, waiting=is_waiting, priority=LOW).end()
            assert done.status[0] == Status.COMPLETED


def test_what_waits_for_a_stream_goes_by_priority(owner: OwnerProcess) -> None:
    ended: list[Priority] = []
    with Here(streams=1) as here:
        local, remote = here.offer(8 * MIB), owner.offer(8 * MIB)
        with Proxy(owner.peer(), allowed=MIB) as proxy:
            endpoint = here.transport.connect(proxy.through)
            first = Attempt(endpoint, WRITE, (local, 0, remote, 0, 8 * MIB), waiting=False)
            proxy.wait_until_holding(MIB)
            later = []
            for priority in (LOW, MEDIUM, HIGH):
                attempt = Attempt(
                    endpoint, READ, (local, 0, remote, 0, KIB), waiting=False, priority=priority
                )
                told = attempt.work.on_finished
                attempt.work.on_finished = lambda work, told=told: (
                    ended.append(work.priority),
                    told(work),
                )
                later.append(attempt)
            proxy.let_go_on()
            for attempt in (first, *later):
                assert attempt.end().status[0] == Status.COMPLETED
    assert ended == [HIGH, MEDIUM, LOW]
