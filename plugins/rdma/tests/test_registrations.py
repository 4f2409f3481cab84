"""Buffers on NICs: once on each, all or nothing, and deregistered exactly once."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tent_core.errors import TransportError
from tent_core.transport import LocalBuffer
from tent_core.types import Permission
from tent_mock.verbs import FakeVerbs
from tent_rdma import verbs
from tent_rdma.registrations import PAGE, Registrations
from tent_rdma.verbs import VerbsError

PATIENCE_S = 30
NICS = ("fake0", "fake1", "fake2")
LENGTH = 10 * PAGE + 100


class Machine:
    """Three NICs, open, and registrations on them."""

    def __init__(self, largest: int = 1 << 30, **limits: int) -> None:
        gids = {name: f"::ffff:10.0.0.{i + 1}" for i, name in enumerate(NICS)}
        self.fabric = FakeVerbs(verbs, gids, limits=limits)
        self.devices = [self.fabric.open(name) for name in NICS]
        self.registrations = Registrations(
            [SimpleNamespace(device=device) for device in self.devices], largest, one_by_one
        )
        self.memory = np.zeros(LENGTH, np.uint8)

    def buffer(
        self,
        id: int = 0,
        generation: int = 1,
        permission: Permission = Permission.GLOBAL_READ_WRITE,
        length: int = LENGTH,
    ) -> LocalBuffer:
        address = int(self.memory.ctypes.data)
        return LocalBuffer(id, generation, f"buffer-{id}", address, length, "cpu:0", permission, -1)

    @property
    def live(self) -> list[int]:
        """Registrations of each NIC, as its own count has them."""
        return [self.fabric.nics[name].counts.alive("registration") for name in NICS]

    @property
    def closed(self) -> tuple[int, int]:
        """How many were deregistered, and how many once more."""
        counts = self.fabric.counts
        return counts.closed["registration"], counts.closed_again["registration"]


def one_by_one(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    made.fabric.faults.clear()
    assert made.registrations.close() == []
    assert made.live == [0, 0, 0]
    for device in made.devices:
        device.close()
    assert made.fabric.counts.pinned == 0
    assert set(made.fabric.counts.live.values()) == {0}


def test_a_buffer_is_registered_once_on_every_nic_and_deregistered_once(machine: Machine) -> None:
    buffers = [machine.buffer(i) for i in range(4)]
    for buffer in buffers:
        machine.registrations.add(buffer)
    assert machine.live == [4, 4, 4]
    assert len(machine.registrations) == 12
    assert machine.fabric.counts.pinned == 12 * LENGTH
    for buffer in buffers:
        machine.registrations.remove(buffer)
        machine.registrations.remove(buffer)
    assert machine.live == [0, 0, 0]
    assert machine.closed == (12, 0)
    assert len(machine.registrations) == 0


def test_what_is_published_are_the_rkeys_and_what_is_looked_up_the_lkeys(machine: Machine) -> None:
    attribute = machine.registrations.add(machine.buffer(3))
    (keys,) = machine.registrations.lookup([3])
    for index, name in enumerate(NICS):
        nic = machine.fabric.nics[name]
        assert set(nic.by_rkey) == set(attribute.rkeys[index])
        assert set(nic.by_lkey) == set(keys.keys[index].tolist())


@pytest.mark.parametrize(
    ("permission", "access"),
    [
        (Permission.LOCAL_READ_WRITE, (False, False)),
        (Permission.GLOBAL_READ_ONLY, (True, False)),
        (Permission.GLOBAL_READ_WRITE, (True, True)),
    ],
)
def test_the_permission_decides_what_peers_may_do(
    machine: Machine, permission: Permission, access: tuple[bool, bool]
) -> None:
    attribute = machine.registrations.add(machine.buffer(permission=permission))
    for name in NICS:
        (made,) = machine.fabric.nics[name].by_lkey.values()
        assert (made.remote_read, made.remote_write) == access
    offered = permission is not Permission.LOCAL_READ_WRITE
    assert [len(row) for row in attribute.rkeys] == [int(offered)] * 3


@given(st.integers(PAGE, 12 * PAGE), st.integers(1, LENGTH))
def test_chunks_cover_a_buffer_without_gap_or_overlap_within_the_limits_of_every_nic(
    largest: int, length: int
) -> None:
    machine = Machine(largest, max_registration=7 * PAGE + 5)
    buffer = machine.buffer(length=length)
    attribute = machine.registrations.add(buffer)
    for index, name in enumerate(NICS):
        made = list(machine.fabric.nics[name].by_rkey.values())
        end = buffer.address
        for chunk, region in enumerate(made):
            assert region.address == end == buffer.address + chunk * attribute.chunk
            assert region.length <= min(largest, 7 * PAGE + 5)
            assert region.rkey == attribute.rkeys[index][chunk]
            end += region.length
        assert end == buffer.address + length
    assert machine.registrations.close() == []
    for device in machine.devices:
        device.close()


@pytest.mark.parametrize("step", range(9))
def test_when_any_registration_fails_those_before_it_are_deregistered(step: int) -> None:
    machine = Machine(4 * PAGE)  # three chunks on each of three NICs
    machine.fabric.faults.fail_next("register", errno.ENOMEM, after=step)
    with pytest.raises(VerbsError, match="Cannot allocate memory") as caught:
        machine.registrations.add(machine.buffer())
    assert caught.value.scarce
    assert machine.live == [0, 0, 0]
    counts = machine.fabric.counts
    assert counts.closed_again["registration"] == 0
    assert counts.pinned == 0
    with pytest.raises(TransportError, match="not registered"):
        machine.registrations.lookup([0])
    machine.registrations.add(machine.buffer())  # there is nothing in its way
    assert machine.live == [3, 3, 3]
    assert machine.registrations.close() == []


def test_a_deregistration_that_fails_is_taken_up_where_it_stopped(machine: Machine) -> None:
    buffer = machine.buffer()
    machine.registrations.add(buffer)
    machine.fabric.faults.fail_next("close_registration", errno.EAGAIN, after=1, nic=None)
    with pytest.raises(VerbsError):
        machine.registrations.remove(buffer)
    assert sum(machine.live) == 2
    machine.registrations.remove(buffer)
    assert machine.live == [0, 0, 0]
    assert machine.closed == (3, 0)


def test_what_could_not_be_deregistered_when_adding_failed_is_not_forgotten(
    machine: Machine,
) -> None:
    faults = machine.fabric.faults
    faults.fail_next("register", errno.ENOMEM, nic="fake2")
    faults.fail_next("close_registration", errno.EAGAIN)
    with pytest.raises(VerbsError):
        machine.registrations.add(machine.buffer())
    assert sum(machine.live) == 2
    assert machine.registrations.close() == []
    assert machine.live == [0, 0, 0]


def test_what_could_not_be_deregistered_is_not_forgotten_when_its_id_is_used_again(
    machine: Machine,
) -> None:
    faults = machine.fabric.faults
    faults.fail_next("register", errno.ENOMEM, nic="fake2")
    faults.fail_next("close_registration", errno.EAGAIN)
    with pytest.raises(VerbsError):
        machine.registrations.add(machine.buffer(generation=1))
    machine.registrations.add(machine.buffer(generation=2))
    machine.registrations.remove(machine.buffer(generation=2))
    assert machine.registrations.close() == []
    assert machine.live == [0, 0, 0]


def test_an_old_generation_does_not_take_a_new_one_away(machine: Machine) -> None:
    machine.registrations.add(machine.buffer(generation=1))
    machine.registrations.remove(machine.buffer(generation=1))
    machine.registrations.add(machine.buffer(generation=2))
    machine.registrations.remove(machine.buffer(generation=1))
    assert machine.live == [1, 1, 1]


def test_two_who_deregister_at_once_do_it_once(machine: Machine) -> None:
    buffer = machine.buffer()
    machine.registrations.add(buffer)
    gate = machine.fabric.faults.gate("close_registration")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(machine.registrations.remove, buffer)
        assert gate.entered.wait(PATIENCE_S)
        begun = threading.Event()

        def second() -> None:
            begun.set()
            machine.registrations.remove(buffer)

        other = pool.submit(second)
        assert begun.wait(PATIENCE_S)
        gate.open()
        first.result(PATIENCE_S)
        other.result(PATIENCE_S)
    assert machine.live == [0, 0, 0]
    assert machine.closed[0] == 3


def test_closing_deregisters_all_and_says_what_it_could_not(machine: Machine) -> None:
    for i in range(3):
        machine.registrations.add(machine.buffer(i))
    machine.fabric.faults.fail_next("close_registration", errno.EAGAIN, after=4)
    (failure,) = machine.registrations.close()
    assert failure.errno == errno.EAGAIN
    assert 0 < sum(machine.live) <= 3
    assert machine.registrations.close() == []
    assert machine.closed == (9, 0)
