"""The stand-in for the vendor's MPComm: its calls, and the quirks that the transport has to live with."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from numpy.typing import NDArray

from tent_core.testing.leaks import nothing_stays_behind
from tent_core.testing.waiting import wait_until
from tent_mock.mpcomm import ON_THE_PATH, Code, MPComm, StandIn


def free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


def where(array: NDArray[np.uint8]) -> int:
    return int(array.ctypes.data)


class Pair:
    """`a` has connected to `b`, which publishes `target`."""

    def __init__(self, library: StandIn) -> None:
        self.library = library
        self.a, self.b = library.MPComm(), library.MPComm()
        for name, comm in (("a", self.a), ("b", self.b)):
            assert comm.init(name, "", free_port()) == 0
            assert comm.start_accept_thread() == 0
        self.source = np.arange(1, 101, dtype=np.uint8)
        self.target = np.zeros(100, np.uint8)
        assert self.a.register_memory(where(self.source), 100) == 0
        assert self.b.register_memory(where(self.target), 100) == 0
        assert self.b.publish_buffer(where(self.target), 100, 1) == 0

    @property
    def at(self) -> tuple[str, int]:
        return "127.0.0.1", self.b.get_tcp_port()

    def join(self) -> None:
        assert self.a.connect("b", *self.at) == 0
        assert self.a.query_remote_buffers("b", *self.at)

    def put(self) -> int:
        return self.a.put_async(where(self.source), "b", where(self.target), 100)

    def outcome(self, handle: int) -> tuple[int, int]:
        wait_until(lambda: self.a.is_transfer_complete(handle))
        result = self.a.get_transfer_result(handle)
        assert self.a.release_transfer(handle) == 0
        return result["error_code"], result["bytes_transferred"]

    def close(self) -> None:
        self.library.let_go()
        self.a.shutdown()
        self.b.shutdown()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(StandIn())
    yield made
    made.close()


def test_bytes_go_both_ways_between_published_and_registered_memory(pair: Pair) -> None:
    pair.join()
    assert pair.outcome(pair.put()) == (0, 100)
    assert np.array_equal(pair.source, pair.target)
    pair.target[:] = 7
    handle = pair.a.get_async(where(pair.source), "b", where(pair.target), 50)
    assert pair.outcome(handle) == (0, 50)
    assert pair.source.tolist() == [7] * 50 + list(range(51, 101))


def test_calls_for_several_hosts_do_the_same_for_one(pair: Pair) -> None:
    pair.join()
    arguments = (where(pair.source), ["b"], [where(pair.target)], [100])
    assert pair.outcome(pair.a.scatter_async(*arguments)) == (0, 100)
    assert pair.outcome(pair.a.gather_async(*arguments)) == (0, 100)


def test_a_query_says_what_is_published_now_and_replaces_all_keys(pair: Pair) -> None:
    pair.join()
    (shown,) = pair.a.query_remote_buffers("b", *pair.at)["buffers"]
    assert (shown["addr"], shown["length"], shown["numa_node"]) == (where(pair.target), 100, 1)
    assert pair.b.unpublish_buffer(where(pair.target)) == 0
    assert pair.outcome(pair.put())[0] == 0  # the key is still good
    assert pair.a.query_remote_buffers("b", *pair.at) == {"buffers": []}
    assert pair.outcome(pair.put()) == (Code.TRANSFER, 100)  # posted, not moved


def test_a_range_without_a_key_and_a_key_whose_memory_is_gone_fail_the_transfer(pair: Pair) -> None:
    pair.join()
    outside = pair.a.put_async(where(pair.source), "b", where(pair.target) + 50, 51)
    assert pair.outcome(outside)[0] == Code.TRANSFER
    assert pair.b.unregister_memory(where(pair.target)) == 0
    assert pair.outcome(pair.put())[0] == Code.TRANSFER
    assert pair.b.register_memory(where(pair.target), 100) == 0
    assert pair.outcome(pair.put())[0] == Code.TRANSFER  # another key
    assert not pair.target.any()


def test_a_second_connect_replaces_the_record_and_drops_its_keys(pair: Pair) -> None:
    pair.join()
    assert pair.a.connect("b", *pair.at) == 0
    assert pair.outcome(pair.put())[0] == Code.TRANSFER
    assert pair.library.leaked == 1
    pair.a.query_remote_buffers("b", *pair.at)
    assert pair.outcome(pair.put())[0] == 0


def test_an_unknown_host_and_memory_that_is_not_registered_are_handle_0(pair: Pair) -> None:
    assert pair.put() == 0
    pair.join()
    assert pair.a.put_async(where(pair.target), "b", where(pair.target), 10) == 0


def test_port_0_is_the_default_port_and_a_taken_one_fails_without_another_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setenv("MPCOMM_TCP_PORT", str(taken.getsockname()[1]))
        comm = StandIn().MPComm()
        assert comm.init("a", "", 0) == Code.CONTEXT
        assert comm.get_tcp_port() == taken.getsockname()[1]
        comm.shutdown()


def test_the_environment_is_read_when_an_instance_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = MPComm(StandIn())
    monkeypatch.setenv("MPCOMM_GID_INDEX", "9")
    assert "MPCOMM_GID_INDEX" not in comm.environment
    assert MPComm(StandIn()).environment["MPCOMM_GID_INDEX"] == "9"


def test_handles_are_good_until_they_are_released(pair: Pair) -> None:
    pair.join()
    handle = pair.put()
    pair.outcome(handle)
    assert pair.a.get_transfer_result(handle)["error_code"] == Code.INVALID_HANDLE
    assert pair.a.release_transfer(handle) == Code.INVALID_HANDLE
    assert pair.a.wait_transfer(handle) == Code.INVALID_HANDLE


def test_waiting_returns_the_outcome_or_a_timeout(pair: Pair) -> None:
    pair.join()
    assert pair.a.wait_transfer(pair.put()) == 0
    pair.library.hold()
    assert pair.a.wait_transfer(pair.put(), 5) == Code.TIMEOUT


def test_what_is_held_stays_under_way_and_planned_outcomes_come_in_order(pair: Pair) -> None:
    pair.join()
    pair.library.hold()
    pair.library.plan("transfer", -4, 60, 0)
    handles = [pair.put() for _ in range(3)]
    assert not any(map(pair.a.is_transfer_complete, handles))
    pair.library.let_go()
    assert [pair.outcome(handle) for handle in handles] == [(-4, 100), (0, 60), (0, 100)]


def test_a_mode_that_moves_nothing_ends_transfers_at_once() -> None:
    pair = Pair(StandIn(moves=False))
    pair.join()
    handle = pair.put()
    assert pair.a.is_transfer_complete(handle)
    assert pair.outcome(handle) == (0, 100)
    assert not pair.target.any()
    pair.close()


def test_garbage_at_the_port_harms_nobody(pair: Pair) -> None:
    for garbage in (b"\n", b"\xff\xfe\n", b"[1]\n", b'{"ask": "secrets"}\n', b"x" * 70000):
        with socket.create_connection(pair.at, 5) as stranger:
            stranger.sendall(garbage)
            stranger.settimeout(5)
            with suppress(ConnectionError):
                assert stranger.recv(100) == b""
    pair.join()
    assert pair.outcome(pair.put()) == (0, 100)


def test_an_instance_that_was_shut_down_leaves_nothing_and_its_port_is_free() -> None:
    def life() -> int:
        pair = Pair(StandIn())
        pair.join()
        pair.outcome(pair.put())
        port = pair.b.get_tcp_port()
        pair.close()
        return port

    life()
    with nothing_stays_behind():
        port = life()
    socket.create_server(("", port)).close()


CONNECTS = """
import os, sys, threading
from tent_mock.mpcomm import StandIn
library = StandIn()
comm = library.MPComm()

def tick():
    while True:
        os.write(1, b".")
        threading.Event().wait(0.001)

threading.Thread(target=tick, daemon=True).start()
print(comm.connect("b", "127.0.0.1", int(sys.argv[1])), file=sys.stderr)
sys.stdin.read()
"""


def test_a_blocking_call_stops_every_thread_of_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(20)
        child = subprocess.Popen(
            [sys.executable, "-c", CONNECTS, str(silent.getsockname()[1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        with child, silent.accept()[0] as connection:
            connection.settimeout(20)
            connection.recv(4096)  # the question: it waits for the answer now
            out = child.stdout.fileno()
            while select.select([out], [], [], 0.2)[0]:
                os.read(out, 4096)  # what was written before; then nothing comes for 0.2 s
            connection.sendall(b"{}\n")
            assert os.read(out, 1) == b"."
            child.stdin.close()
            assert child.stderr.read().strip() == b"-4"


def test_the_stand_in_can_be_imported_under_the_name_of_the_module() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "tent_mock.mpcomm"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert printed == str(ON_THE_PATH)
    look = "import mpcomm; print(mpcomm.__version__, mpcomm.INVALID_TRANSFER_HANDLE, mpcomm.MPComm)"
    found = subprocess.run(
        [sys.executable, "-c", look],
        env={**os.environ, "PYTHONPATH": printed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "stand.in 0" in found
