"""An engine can be closed in every state, within a bound, and whatever was under way ends."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import numpy as np
import pytest

import tent_core as tent
from tent_core.testing.conformance.base import KIB, MIB, Base, Ends
from tent_core.types import Opcode

CLOSES_WITHIN_S = 8.0
"""How long `Engine.close` may take, whatever was going on."""

STATES = ("fresh", "registered", "opened", "used", "submitting", "written to")


class Closing(Base):
    """Closing in every state."""

    @pytest.mark.parametrize("state", STATES)
    def test_an_engine_closes_in_every_state(self, ends: Ends, state: str) -> None:
        engine = self.engine()
        over = threading.Event()
        threads: list[threading.Thread] = []
        batches: list[tent.Batch] = []
        target = ends.offer(ends.there, np.zeros(MIB, np.uint8))
        offsets = np.arange(0, MIB, 16 * KIB)

        def submit(of: tent.Engine, owner: str, name: str) -> None:
            with suppress(tent.TentError):  # it is closed in the middle
                source = of.allocate(MIB)
                segment = of.open_segment(owner)
                while not over.is_set():
                    batch = segment.submit(
                        Opcode.WRITE, source, offsets, segment.buffer(name), offsets, 16 * KIB
                    )
                    batches.append(batch)
                    batch.wait(10)

        def start(*arguments: object) -> None:
            thread = threading.Thread(target=submit, args=arguments, daemon=True)
            threads.append(thread)
            thread.start()
            deadline = time.monotonic() + 10
            while len(batches) < 3 and time.monotonic() < deadline:
                time.sleep(0.002)

        match state:
            case "registered":
                engine.allocate(MIB)
            case "opened":
                engine.open_segment(ends.there.segment_name)
            case "used":
                segment = engine.open_segment(ends.there.segment_name)
                segment.write(engine.allocate(MIB), segment.buffer(target.name))
            case "submitting":
                start(engine, ends.there.segment_name, target.name)
            case "written to":
                start(ends.here, engine.segment_name, engine.allocate(MIB).name)
        began = time.monotonic()
        engine.close()
        engine.close()  # which changes nothing
        took = time.monotonic() - began
        over.set()
        for thread in threads:
            thread.join(15)
            assert not thread.is_alive(), (
                f"a transfer did not end when an engine was closed: {state}"
            )
        assert all(batch.done for batch in batches), "a batch did not end"
        assert took < CLOSES_WITHIN_S, f"close took {took:.1f} s in the state {state!r}"
