"""What is held does not grow with peers, and nothing is left when all is closed."""

from __future__ import annotations

from contextlib import ExitStack
from typing import ClassVar

import numpy as np
import pytest

from tent_core.testing.churn import Churn, exchange
from tent_core.testing.conformance.base import ALLOCATED, MIB, REGISTERED, Base, Ends
from tent_core.testing.leaks import family, nothing_stays_behind
from tent_core.types import Reach

WARM_UP, PEERS = 3, 12
"""How many peers come and go before what is held is counted, and how many then."""

CROWD = 4
"""How many peers more are there at once, when threads and processes are compared."""


class Leaks(Base):
    """Descriptors, threads, processes, mappings, and what the transport counts itself."""

    settles_s: ClassVar[float] = 10.0
    """How long the last of many peers may take to be forgotten."""

    def test_closing_leaves_no_descriptor_thread_process_or_mapping(self) -> None:
        def life() -> None:
            with (
                self.engine() as here,
                self.engine() as there,
                here.open_segment(there.segment_name) as segment,
            ):
                ends = Ends(here, there, segment, np.random.default_rng(1))
                for memory in (ALLOCATED, REGISTERED):
                    source = ends.buffer(here, ends.bytes(MIB), memory)
                    target = ends.buffer(there, ends.bytes(MIB), memory)
                    segment.write(source, ends.remote(target))
                    segment.read(source, ends.remote(target))

        life()
        with nothing_stays_behind():
            life()

    @classmethod
    def _retained(cls) -> int:
        """Descriptors that may stay behind: what it declares to retain, for each peer of the churn."""
        retained = cls.capabilities().retained_per_peer
        return 0 if retained is None else retained.descriptors * PEERS

    @pytest.mark.slow
    @pytest.mark.timeout(240)
    def test_peers_that_come_and_go_leave_nothing_of_themselves(self) -> None:
        with self.engine(peers={"grace_s": 3.0}) as lasting:
            churn = Churn(lasting, self.transport)

            def come_and_go(peers: int) -> None:
                if self.capabilities().reach is Reach.PROCESS:
                    churn.engines(peers, self.engine)
                else:
                    churn.processes(peers, self.config())

            come_and_go(WARM_UP)
            with churn.leaves_nothing(self.settles_s, self._retained()):
                come_and_go(PEERS)

    def test_threads_and_processes_do_not_grow_with_peers(self) -> None:
        with ExitStack() as stack:
            engines = [stack.enter_context(self.engine()) for _ in range(CROWD + 2)]
            for engine in engines:
                engine.allocate(1 << 16, name="pool")
            lasting, warm, *crowd = engines
            for engine in (lasting, *crowd):  # what starts with the first peer has started then
                exchange(engine, warm.segment_name)
                exchange(warm, engine.segment_name)
            before = family()
            for peer in crowd:
                exchange(lasting, peer.segment_name)
                exchange(peer, lasting.segment_name)
            now = family()
            threads = len(now.threads) - len(before.threads)
            children = len(now.children) - len(before.children)
            names = sorted(set(now.threads) - set(before.threads)) or sorted(set(now.threads))
        assert threads < CROWD, f"{threads} threads more with {CROWD} peers more: {names}"
        assert children < CROWD, f"{children} processes more with {CROWD} peers more"
