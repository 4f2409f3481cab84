"""A busy process is served by others, and serves itself."""

from __future__ import annotations

import os
import signal

import pytest
from tcp_harness import Here, OwnerProcess, work

from tent_core.testing.computing import computing
from tent_core.types import Opcode, Status

KIB = 1 << 10


@pytest.mark.parametrize("allocated", [True, False], ids=["allocated", "registered"])
def test_an_owner_whose_interpreter_runs_nothing_at_all_is_served_by_its_receiver(
    here: Here, allocated: bool
) -> None:
    """A stopped process is the extreme of one whose interpreter is busy."""
    with OwnerProcess() as owner:
        local, remote = here.offer(64 * KIB, value=6), owner.offer(64 * KIB, allocated=allocated)
        back = here.offer(64 * KIB)
        endpoint = here.transport.connect(owner.peer())
        os.kill(owner.pid, signal.SIGSTOP)
        for opcode, buffer in ((Opcode.WRITE, local), (Opcode.READ, back)):
            done = work(endpoint, opcode, [(buffer, 0, remote, 0, 64 * KIB)])
            assert done.status[0] == Status.COMPLETED
        os.kill(owner.pid, signal.SIGCONT)
        assert set(owner.content(remote).tolist()) == {6}
        assert set(here.arrays[back.id].tolist()) == {6}
        endpoint.close("test")


def test_transfers_of_any_size_work_beside_threads_that_compute(
    owner: OwnerProcess, here: Here
) -> None:
    with computing():
        for size in (100, 100 * KIB, 3000 * KIB, 20_000 * KIB):
            local, remote = here.offer(size, value=3), owner.offer(size)
            endpoint = here.transport.connect(owner.peer())
            for opcode in (Opcode.WRITE, Opcode.READ):
                for waiting in (True, False):
                    done = work(endpoint, opcode, [(local, 0, remote, 0, size)], waiting=waiting)
                    assert done.status[0] == Status.COMPLETED
            assert set(owner.content(remote).tolist()) == {3}
            endpoint.close("test")
