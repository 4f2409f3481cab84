"""Engines in processes of their own: alive, stopped, killed."""

from __future__ import annotations

import time

import numpy as np
import pytest
from numpy.typing import NDArray

import tent_core as tent
from tent_core.testing.conformance.base import BOTH_KINDS, KIB, MIB, REGISTERED, Base, Ends, Refuses
from tent_core.testing.conformance.verdicts import assert_untouched
from tent_core.testing.peers import PeerProcess
from tent_core.testing.waiting import wait_until
from tent_core.types import Reach

HAMMER = """
import threading

def hammer(segment_name, buffer_name):
    global hammering, outcome, rounds
    outcome, rounds = [], 0
    segment = engine.open_segment(segment_name)
    remote = segment.buffer(buffer_name)
    source = engine.allocate(remote.length)
    source.array[:] = 255
    offsets = np.arange(0, remote.length, 1024)

    def write():
        global rounds
        try:
            while True:
                segment.write_many(source, offsets, remote, offsets[::-1], 1024)
                rounds += 1
        except tent.TentError as error:
            outcome.append((type(error).__name__, str(error)))
            segment.close()
            source.unregister()

    hammering = threading.Thread(target=write, daemon=True)
    hammering.start()
"""
"""For another process: writes to a buffer of this one, again and again, until that fails."""


class Processes(Base):
    """What only another process can show."""

    def test_bytes_reach_another_process_and_come_back(self, elsewhere: PeerProcess) -> None:
        random = np.random.default_rng(3)
        with self.engine() as here, here.open_segment(elsewhere.segment_name) as segment:
            source, back = here.allocate(MIB), here.register(np.zeros(MIB, np.uint8))
            source.array[:] = random.integers(0, 256, MIB, np.uint8)
            segment.write(source, segment.buffer("pool"))
            assert elsewhere.run("bytes(pool.array)") == source.array.tobytes()
            segment.read(back, segment.buffer("pool"))
            assert np.array_equal(back.array, source.array)

    def test_a_notification_is_seen_after_the_data_that_was_written_before_it(
        self, elsewhere: PeerProcess
    ) -> None:
        with self.engine() as here, here.open_segment(elsewhere.segment_name) as segment:
            source = here.allocate(MIB)
            source.array[:] = 5
            segment.write(source, segment.buffer("pool"))
            segment.notify("written", b"5")
            look = "(lambda n: (n.name, n.payload, set(pool.array.tolist())))(engine.next_notification(10))"
            assert elsewhere.run(look) == ("written", b"5", {5})

    def test_a_batch_has_arrived_at_another_process_when_its_notification_does(
        self, elsewhere: PeerProcess
    ) -> None:
        look = "(lambda n: (n.name, n.payload, n.ok, set(pool.array.tolist())))(engine.next_notification(10))"
        with self.engine() as here, here.open_segment(elsewhere.segment_name) as segment:
            source, pool = here.allocate(MIB), segment.buffer("pool")
            offsets = np.arange(0, MIB, 64 * KIB)
            for value in range(1, 9):
                source.array[:] = value
                told = ("round", bytes([value]))
                batch = segment.submit(
                    "write", source, offsets, pool, offsets, 64 * KIB, notify=told
                )
                assert elsewhere.run(look) == (*told, True, {value})
                batch.wait(10)

    @BOTH_KINDS
    def test_no_byte_changes_after_unregister_although_another_process_goes_on_writing(
        self, elsewhere: PeerProcess, memory: str
    ) -> None:
        elsewhere.run(HAMMER)
        with self.engine() as here:
            for round_ in range(10):
                target, array = _target_of_hammer(here, elsewhere, memory)
                target.unregister()
                array[:] = round_
                _stays(array, round_)
                ended = elsewhere.run("hammering.join(10)\nnot hammering.is_alive()")
                assert ended, "its write goes on 10 s after the buffer was taken away"
                ((kind, text),) = elsewhere.run("outcome")
                assert kind in ("StaleHandle", "BufferRevoked", "TransferFailed"), text

    @BOTH_KINDS
    @pytest.mark.parametrize("end", ["resume", "kill"])
    def test_a_stopped_process_holds_up_unregister_until_it_can_write_no_more(
        self, elsewhere: PeerProcess, memory: str, end: str
    ) -> None:
        elsewhere.run(HAMMER)
        with self.engine() as here:
            target, array = _target_of_hammer(here, elsewhere, memory)
            elsewhere.stop()
            if self.capabilities().owner_checked:
                target.unregister(timeout=10.0)
                array[:] = 1
            else:
                with pytest.raises(tent.RevocationTimeout) as raised:
                    target.unregister(timeout=0.5)
                assert elsewhere.segment_name in "".join(raised.value.holders)
            getattr(elsewhere, end)()
            if not self.capabilities().owner_checked:
                target.unregister(timeout=10.0)
                array[:] = 1
            _stays(array, 1)

    def test_another_process_is_refused_if_it_is_out_of_reach(
        self, ends: Ends, refuses: Refuses
    ) -> None:
        if self.capabilities().reach >= Reach.HOST:
            pytest.skip(f"{self.transport} claims to reach other processes")
        try:
            peer = PeerProcess(self.config())
        except Exception as error:
            pytest.skip(
                f"{self.transport} does not start in another process: {str(error).splitlines()[0]}"
            )
        with peer:
            peer.run("pool = engine.allocate(4096, name='pool')")
            source = ends.buffer(ends.here, ends.bytes(4 * KIB))
            with ends.here.open_segment(peer.segment_name) as segment:
                with pytest.raises((tent.TransferFailed, tent.TransportError)):
                    segment.write(source, segment.buffer("pool"), timeout=5.0)
                assert peer.run("bool(pool.array.any())") is False
        refuses("reach: a peer in another process is no candidate")


def _target_of_hammer(
    engine: tent.Engine, elsewhere: PeerProcess, memory: str
) -> tuple[tent.Buffer, NDArray[np.uint8]]:
    """A buffer that the other process is writing to, and its memory."""
    array = np.zeros(256 * KIB, np.uint8)
    target = engine.register(array) if memory == REGISTERED else engine.allocate(len(array))
    array = target.array
    elsewhere.run("hammer(segment_name, name)", segment_name=engine.segment_name, name=target.name)
    assert wait_until(lambda: elsewhere.run("outcome or rounds > 2")) is True
    return target, array


def _stays(array: NDArray[np.uint8], value: int, seconds: float = 0.05) -> None:
    """Every byte is `value`, and stays so for a while."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert_untouched(array, np.full_like(array, value), "after `unregister` had returned")
