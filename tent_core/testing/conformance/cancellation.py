"""A batch that nobody wants any more ends, and nothing moves after its end."""

from __future__ import annotations

import time

import numpy as np

from tent_core.testing.conformance.base import KIB, MIB, REGISTERED, Base, Ends, Refuses
from tent_core.testing.conformance.verdicts import assert_untouched
from tent_core.testing.peers import PeerProcess
from tent_core.types import Opcode, Status

DEADLINE_S, CLAIMED_DEADLINE_S = 5.0, 30.0
"""Of a transfer to a peer that is stopped."""

ENDS_S = 10.0
"""What is cancelled ends by then if that is claimed: it may take a few seconds to learn that nothing moves
any more. After about 12 s the engine counts the peer as departed and closes the endpoint, which ends it
anyhow."""


class Cancellation(Base):
    """Cancelling, where it is claimed and where it is not."""

    def test_a_cancelled_batch_ends_and_nothing_moves_after_its_end(self, ends: Ends) -> None:
        source = ends.buffer(ends.here, ends.bytes(8 * MIB))
        target = ends.offer(ends.there, np.zeros(8 * MIB, np.uint8), REGISTERED)
        remote, offsets = ends.remote(target), np.arange(0, 8 * MIB, 64 * KIB)
        for _ in range(10):
            target.array[:] = 0
            batch = ends.segment.submit(
                Opcode.WRITE, source, offsets, remote, offsets, 64 * KIB, timeout=20.0
            )
            batch.cancel()
            batch.wait(20, check=False)
            assert set(batch.status.tolist()) <= {Status.CANCELED, Status.COMPLETED}
            for row in np.flatnonzero(batch.status == Status.COMPLETED):
                a = slice(offsets[row], offsets[row] + 64 * KIB)
                assert np.array_equal(target.array[a], source.array[a]), (
                    f"request {row} of a cancelled batch was reported as completed, and is not there"
                )
            target.array[:] = 7
            time.sleep(0.01)
            assert_untouched(
                target.array, np.full(8 * MIB, 7, np.uint8), "after a cancelled batch had ended"
            )

    def test_a_batch_to_a_peer_that_is_stopped_is_interrupted_if_that_is_claimed(
        self, elsewhere: PeerProcess, refuses: Refuses
    ) -> None:
        with self.engine() as here, here.open_segment(elsewhere.segment_name) as segment:
            claimed = self.capabilities().cancellation
            deadline = CLAIMED_DEADLINE_S if claimed else DEADLINE_S
            source, pool = here.allocate(MIB), segment.buffer("pool")
            segment.write(source, pool)
            elsewhere.stop()
            try:
                batch = segment.submit(
                    Opcode.WRITE, source, [0], pool, [0], [MIB], timeout=deadline
                )
                batch.cancel()
                began = time.monotonic()
                batch.wait(40, check=False)
                took = time.monotonic() - began
            finally:
                elsewhere.resume()
            if claimed:
                assert took < ENDS_S, (
                    f"{self.transport} claims cancellation, and took {took:.1f} s to end a cancelled batch"
                )
            else:
                assert batch.status[0] in (Status.COMPLETED, Status.CANCELED, Status.TIMEOUT)
                refuses("cancellation: what is under way goes on until it ends or its time is up")
