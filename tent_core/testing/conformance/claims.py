"""What a transport does not claim is passed over where it is asked for, visibly."""

from __future__ import annotations

import pytest

import tent_core as tent
from tent_core.testing.conformance.base import KIB, Base, Ends, Refuses
from tent_core.types import MemoryKind

ASKED = [({"devices": ["nic0"]}, "device_choice"), ({"qp_pool": "bulk"}, "qp_pools")]
"""What a policy entry may ask for, and the capability that it takes."""


class Claims(Base):
    """Capabilities that are not claimed."""

    @pytest.mark.parametrize(("asked", "claim"), ASKED)
    def test_what_is_not_claimed_is_refused_when_it_is_asked_for(
        self, ends: Ends, refuses: Refuses, asked: dict[str, object], claim: str
    ) -> None:
        if getattr(self.capabilities(), claim):
            pytest.skip(f"{self.transport} claims {claim}; what it is worth depends on the machine")
        entry = {"name": "asks", "transports": [self.transport], **asked}
        with self.engine(policy=[entry]) as asking:
            source = ends.buffer(asking, ends.bytes(KIB))
            target = ends.offer(ends.there, ends.bytes(KIB))
            with asking.open_segment(ends.there.segment_name) as segment:
                found = asking.explain(segment, KIB)
                assert found.candidates == ()
                assert [passed.name for passed in found.passed_over] == [self.transport]
                with pytest.raises(tent.TentError):
                    segment.write(source, segment.buffer(target.name), timeout=5.0)
        refuses(f"{claim}: an entry that asks for it passes {self.transport} over")

    def test_a_request_beyond_the_largest_that_it_claims_is_refused(
        self, ends: Ends, refuses: Refuses
    ) -> None:
        largest = self.capabilities().largest_request
        if largest is None:
            pytest.skip(f"{self.transport} claims no largest request")
        assert self.transport in ends.here.explain(ends.segment, largest).candidates
        assert self.transport not in ends.here.explain(ends.segment, largest + 1).candidates
        refuses(f"requests of more than {largest:,} bytes: it is passed over")

    @pytest.mark.parametrize("location", ["cuda:0", "file:/nowhere"])
    def test_memory_of_a_kind_that_it_does_not_claim_is_refused(
        self, refuses: Refuses, location: str
    ) -> None:
        kind = MemoryKind.GPU if location.startswith("cuda") else MemoryKind.FILE
        if self.capabilities().touches(kind):
            pytest.skip(f"{self.transport} claims {kind} memory, which takes a machine that has it")
        with self.engine() as engine, pytest.raises(tent.MemoryUnsupported):
            engine.register((1 << 40, 4 * KIB), location=location)
        refuses(f"{kind} memory: it cannot be registered")
