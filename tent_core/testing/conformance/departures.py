"""Peers depart while they are used: in order, killed, or for a while."""

from __future__ import annotations

import threading
import time
from typing import ClassVar

import tent_core as tent
from tent_core.testing.conformance.base import GONE, KIB, MIB, Base, Ends
from tent_core.testing.conformance.verdicts import must_fail
from tent_core.testing.peers import PeerProcess
from tent_core.testing.waiting import wait_until
from tent_core.types import Opcode

DEADLINE_S, LATE_S = 1.0, 9.0
"""Of a transfer to a peer that is stopped, and how late it may end: before the engine counts the peer as
departed (about 12 s) and closes the endpoint, which ends it anyhow."""


class Departures(Base):
    """Departure, seen from both sides."""

    lets_go_s: ClassVar[float] = 10.0
    """How long a departed peer may be known."""

    def test_transfers_to_an_engine_that_closed_fail_with_a_cause(self, ends: Ends) -> None:
        with self.engine() as short_lived:
            target = ends.offer(short_lived, ends.bytes(KIB))
            source = ends.buffer(ends.here, ends.bytes(KIB))
            segment = ends.here.open_segment(short_lived.segment_name)
            remote = segment.buffer(target.name)
            segment.write(source, remote)
        with must_fail(GONE, "a WRITE to an engine that has closed was reported as completed"):
            segment.write(source, remote, timeout=5.0)
        _let_go(ends.here, short_lived.segment_name, self.lets_go_s)
        ends.segment.write(source, ends.remote(ends.offer(ends.there, ends.bytes(KIB))))

    def test_a_peer_killed_in_the_middle_fails_the_transfer_with_a_cause(
        self, elsewhere: PeerProcess
    ) -> None:
        with self.engine() as here, here.open_segment(elsewhere.segment_name) as segment:
            source = here.allocate(MIB)
            prepared = segment.prepare(Opcode.WRITE, source, segment.buffer("pool"))
            prepared.run()
            failure: list[BaseException] = []

            def write_until_it_fails() -> None:
                try:
                    while True:
                        prepared.run()
                except BaseException as error:
                    failure.append(error)

            writer = threading.Thread(target=write_until_it_fails, daemon=True)
            writer.start()
            wait_until(lambda: here.stats()["transports"][self.transport]["bytes"] > 4 * MIB)
            elsewhere.kill()
            writer.join(10)
            assert not writer.is_alive()
            assert isinstance(failure[0], tent.TentError)
            assert elsewhere.segment_name in str(failure[0])
            _let_go(here, elsewhere.segment_name, self.lets_go_s)

    def test_a_transfer_to_a_peer_that_is_stopped_ends_about_its_deadline(
        self, elsewhere: PeerProcess
    ) -> None:
        with self.engine() as here, here.open_segment(elsewhere.segment_name) as segment:
            source, pool = here.allocate(MIB), segment.buffer("pool")
            segment.write(source, pool)
            elsewhere.stop()
            try:
                batch = segment.submit(
                    Opcode.WRITE, source, [0], pool, [0], [MIB], timeout=DEADLINE_S
                )
                began = time.monotonic()
                batch.wait(40, check=False)
                late = time.monotonic() - began - DEADLINE_S
            finally:
                elsewhere.resume()
            assert late < LATE_S, (
                f"{self.transport} reported a request {late:.1f} s after its deadline, "
                "and has to give up by itself at work.deadline"
            )

    def test_an_engine_of_the_same_name_is_another_peer(self, ends: Ends) -> None:
        source = ends.buffer(ends.here, ends.bytes(KIB))
        with self.engine() as first:
            name = first.segment_name
            ends.offer(first, ends.bytes(KIB))
            old = ends.here.open_segment(name)
            (remote,) = old.buffers()
            old.write(source, remote)
        with self.engine(control={"listen": name}) as second:
            target = ends.offer(second, ends.bytes(KIB))
            before = target.array.copy()
            with must_fail(GONE, "a WRITE to an engine that has gone was reported as completed"):
                old.write(source, remote, timeout=5.0)
            assert (target.array == before).all(), (
                "a WRITE to an engine that has gone met its successor"
            )
            with ends.here.open_segment(name) as segment:
                segment.write(source, segment.buffer(target.name))
            assert (target.array == source.array).all()
        old.close()


def _let_go(engine: tent.Engine, name: str, seconds: float) -> None:
    """The peer is forgotten: `Endpoint.close` and `Transport.release` have returned."""
    wait_until(
        lambda: name not in [peer.name for peer in engine.peers()],
        seconds,
        "a departed peer is let go of (Endpoint.close and Transport.release return)",
    )
