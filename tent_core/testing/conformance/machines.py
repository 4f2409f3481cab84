"""Two machines, as far as one can play them: network namespaces, each with a boot id of its own."""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import pytest

from tent_core.testing.conformance.base import Base, Refuses
from tent_core.testing.namespaces import Side, joined, why_not
from tent_core.testing.peers import PeerError, PeerProcess
from tent_core.types import Reach


class Machines(Base):
    """What only another machine can show."""

    one_machine: ClassVar[str] = ""
    """Why two machines cannot be played for this transport (a device that namespaces cannot share), if so."""

    @pytest.mark.namespaces
    @pytest.mark.parametrize("family", [4, 6])
    def test_another_machine_is_reached_or_refused_as_it_claims(
        self, refuses: Refuses, tmp_path: Path, family: int
    ) -> None:
        reach = self.capabilities().reach
        if reach < Reach.HOST:
            pytest.skip(f"{self.transport} does not claim to reach other processes")
        reason = self.one_machine or why_not()
        if reason is not None:
            pytest.skip(reason)
        boot_id = tmp_path / "boot_id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        with ExitStack() as stack:
            left, right = stack.enter_context(joined())
            wrappers = left.wrapper, right.on_a_machine(boot_id)
            here, there = (
                stack.enter_context(self._in_namespace(side, wrapper, family))
                for side, wrapper in zip((left, right), wrappers, strict=True)
            )
            there.run("pool = engine.register(np.zeros(1 << 20, np.uint8), name='pool')")
            here.run("segment = engine.open_segment(name)", name=there.segment_name)
            here.run("source = engine.register(np.full(1 << 20, 9, np.uint8))")
            write = "segment.write(source, segment.buffer('pool'), timeout=10.0)"
            if reach < Reach.NETWORK:
                with pytest.raises(PeerError) as raised:
                    here.run(write)
                assert raised.value.kind == "TransferFailed"
                assert there.run("bool(pool.array.any())") is False
                refuses("reach: a peer on another machine is no candidate")
                return
            here.run(write)
            assert there.run("set(pool.array.tolist())") == {9}
            here.run("source.array[:] = 0; segment.read(source, segment.buffer('pool'))")
            assert here.run("set(source.array.tolist())") == {9}

    def _in_namespace(self, side: Side, wrapper: tuple[str, ...], family: int) -> PeerProcess:
        """An engine there; skips the test where the transport finds nothing to run on in a namespace."""
        try:
            listen = {"listen": f"{side.address(family)}:0"}
            return PeerProcess(self.config(control=listen), wrapper=wrapper)
        except PeerError as error:
            if error.kind != "ConfigError":
                raise
            pytest.skip(f"{self.transport} does not run in a network namespace: {error.message}")
