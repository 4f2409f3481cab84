"""An open NIC: who wakes whom when work completes."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from rig import fabric, topology

from tent_mock.verbs import FakeVerbs
from tent_rdma.devices import choose
from tent_rdma.nic import Listeners, Nic
from tent_rdma.settings import Settings
from tent_rdma.verbs import QueuePair

PATIENCE_S = 30.0


@pytest.fixture
def verbs() -> FakeVerbs:
    return fabric(1)


@pytest.fixture
def nic(verbs: FakeVerbs) -> Iterator[Nic]:
    ignore: Any = lambda *_: None  # noqa: E731
    (chosen,) = choose(topology(verbs), Settings()).chosen
    made = Nic(verbs, 0, chosen, Listeners(ignore, ignore, ignore, ignore))
    yield made
    made.close()
    assert set(verbs.counts.live.values()) == {0}


@pytest.fixture
def complete(nic: Nic) -> Iterator[Any]:
    """A call that has something complete on the NIC."""
    with ExitStack() as stack:

        def once() -> None:
            made: QueuePair = nic.device.queue_pair(1, nic.queue, nic.queue, send_depth=1)
            stack.callback(made.close)
            made.post_receive(1, 0, 0, 0)
            made.to_error()

        yield once


def readable(nic: Nic) -> bool:
    return bool(select.select([nic.channel], [], [], 0)[0])


class Hungry:
    """Takes all the room that it finds, and counts it."""

    def __init__(self, nic: Nic) -> None:
        self._nic = nic
        self.taken = 0

    def resume(self) -> None:
        while self._nic.take_credits(1, self):
            self.taken += 1


def test_those_that_wait_for_room_get_it_in_turn(nic: Nic) -> None:
    waiters = [Hungry(nic) for _ in range(3)]
    for waiter in waiters:
        waiter.resume()  # the first takes all there is
    before = waiters[0].taken
    for _ in range(6):
        nic.give_credits(1)
    assert [waiters[0].taken - before, waiters[1].taken, waiters[2].taken] == [2, 2, 2]


def test_an_armed_nic_wakes_once_and_again_when_it_was_armed_again(nic: Nic, complete: Any) -> None:
    complete()
    assert not readable(nic)
    nic.arm()
    assert not readable(nic)  # what had completed before was taken
    for _ in range(2):
        complete()
        assert readable(nic)
        nic.woken()
        assert not readable(nic)
        nic.arm()


def test_a_completion_between_arming_and_noting_it_does_not_end_all_waking(
    nic: Nic, complete: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = nic.queue.arm
    pollers: list[threading.Thread] = []

    def arm() -> None:
        real()
        monkeypatch.undo()
        complete()
        assert readable(nic)
        poller = threading.Thread(target=nic.woken)
        poller.start()
        poller.join(0.2)  # longer only where it has to wait for this thread
        pollers.append(poller)

    monkeypatch.setattr(nic.queue, "arm", arm)
    nic.arm()
    pollers[0].join(PATIENCE_S)
    assert not readable(nic)
    nic.arm()
    complete()
    assert readable(nic)
