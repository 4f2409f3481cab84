"""What all parts of the suite stand on: engines with one transport, buffers with known content."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

import tent_core as tent
from tent_core import plugins
from tent_core.testing.peers import Nursery, PeerProcess
from tent_core.types import Capabilities, MemoryKind, Permission, Reach

KIB, MIB = 1 << 10, 1 << 20
ALLOCATED, REGISTERED = "allocated", "registered"
BOTH_KINDS = pytest.mark.parametrize("memory", [ALLOCATED, REGISTERED])

WITHDRAWN = (tent.StaleHandle, tent.TransferFailed)
"""What a buffer that its owner took away gives: the first where the peer has heard of it, the second where
the owner's side refused the request before that."""

GONE = (tent.TransferFailed, tent.TransportError, tent.UsageError)
"""What a transfer to a peer that has gone gives; PeerDeparted and the like are among them."""

Refuses = Callable[[str], None]
"""Notes for the report that what the transport does not claim has been seen to be refused."""


@dataclass
class Ends:
    """Two engines of this process, and the segment of `there` opened by `here`."""

    here: tent.Engine
    there: tent.Engine
    segment: tent.Segment
    random: np.random.Generator
    files: Path | None = None
    """Where `offer` makes files instead of memory, for transports to files."""

    def bytes(self, size: int) -> NDArray[np.uint8]:
        """Random content."""
        return self.random.integers(0, 256, size, np.uint8)

    def buffer(
        self,
        engine: tent.Engine,
        content: NDArray[np.uint8],
        memory: str = ALLOCATED,
        permission: Permission = Permission.GLOBAL_READ_WRITE,
    ) -> tent.Buffer:
        """A buffer with this content, in memory made by the engine or by the application."""
        if memory == REGISTERED:
            return engine.register(content.copy(), permission=permission)
        buffer = engine.allocate(len(content), permission=permission)
        buffer.array[:] = content
        return buffer

    def offer(
        self,
        engine: tent.Engine,
        content: NDArray[np.uint8],
        memory: str = ALLOCATED,
        permission: Permission = Permission.GLOBAL_READ_WRITE,
    ) -> tent.Buffer:
        """The same at the side whose buffers are read and written: it may be of another kind of memory."""
        if self.files is None:
            return self.buffer(engine, content, memory, permission)
        path = self.files / f"{next(_numbers)}"
        path.write_bytes(content.tobytes())
        return engine.register(path, permission=permission)

    def remote(self, buffer: tent.Buffer) -> tent.RemoteBuffer:
        """A buffer of `there` as `here` sees it."""
        return self.segment.buffer(buffer.name)

    def rows(
        self, count: int, local: int, remote: int, longest: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Offsets in two buffers of these sizes and lengths, at random, disjoint at either side."""
        spans = [
            np.sort(self.random.permutation(size // longest)[:count]) for size in (local, remote)
        ]
        here, there = (self.random.permutation(span) * longest for span in spans)
        return here, there, self.random.integers(1, longest + 1, count)

    def surplus(self) -> int:
        """How many requests the transports of both engines have reported once too often."""
        return self.here.stats_.surplus_reports + self.there.stats_.surplus_reports


def apply(
    target: NDArray[np.uint8],
    at: NDArray[np.int64],
    source: NDArray[np.uint8],
    origin: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> NDArray[np.uint8]:
    """What `target` must hold after the ranges of `source` were copied into it."""
    expected = target.copy()
    for a, o, n in zip(at.tolist(), origin.tolist(), lengths.tolist(), strict=True):
        expected[a : a + n] = source[o : o + n]
    return expected


_numbers = itertools.count()


class Base:
    """A transport, how to make engines with it, and the fixtures of all parts."""

    conformance: ClassVar[bool] = True
    """By this the report knows the suite's tests."""

    transport: ClassVar[str]
    settings: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def registry(cls) -> plugins.Registry:
        """Where the transport is found: what is installed, unless a subclass knows better."""
        return plugins.discover()

    @classmethod
    def config(cls, **changes: Any) -> dict[str, Any]:
        """A configuration in which this transport is the only one, and other top-level sections as given."""
        return {
            "transports": {cls.transport: {"enable": True, **cls.settings}},
            "policy": [{"name": "conformance", "transports": [cls.transport]}],
            "log": {"level": "error"},
            **changes,
        }

    @classmethod
    def engine(cls, **changes: Any) -> tent.Engine:
        """An engine with this transport alone, and other top-level sections as given."""
        return tent.Engine(cls.config(**changes), plugins=cls.registry())

    @classmethod
    def capabilities(cls) -> Capabilities:
        """What the transport claims."""
        return cls.registry().load(cls.transport).declaration.capabilities

    remote_kind: ClassVar[MemoryKind] = MemoryKind.DRAM
    """The kind of memory at the side that is read and written."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _moves_what_is_tried(cls) -> None:
        kind = cls.remote_kind
        if not cls.capabilities().moves(MemoryKind.DRAM, kind):
            pytest.skip(f"{cls.transport} does not claim to move host memory to {kind} memory")

    @pytest.fixture
    def refuses(self, request: pytest.FixtureRequest) -> Refuses:
        """Call it once what the transport does not claim was seen to be refused."""

        def note(what: str) -> None:
            request.node.user_properties.append(("tent_refused", what))

        return note

    @pytest.fixture(scope="class")
    @classmethod
    def _shared_ends(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ends]:
        in_files = cls.remote_kind is MemoryKind.FILE
        files = tmp_path_factory.mktemp("offered") if in_files else None
        with ExitStack() as stack:
            here, there = stack.enter_context(cls.engine()), stack.enter_context(cls.engine())
            segment = stack.enter_context(here.open_segment(there.segment_name))
            yield Ends(here, there, segment, np.random.default_rng(20240607), files)

    @pytest.fixture
    def ends(self, _shared_ends: Ends) -> Iterator[Ends]:
        """Two engines, and a segment opened before anything is registered. Tests share them and make buffers
        of their own: starting an engine may cost a process."""
        before = _shared_ends.surplus()
        yield _shared_ends
        twice = _shared_ends.surplus() - before
        assert not twice, (
            f"{self.transport} reported {twice} requests twice: each is to be completed, failed or refused "
            "once"
        )

    @pytest.fixture(scope="class")
    @classmethod
    def nursery(cls) -> Iterator[Nursery]:
        """Where other processes come from."""
        with Nursery() as made:
            yield made

    @pytest.fixture
    def elsewhere(self, request: pytest.FixtureRequest) -> Iterator[PeerProcess]:
        """An engine in a process of its own, with a megabyte `pool` that this process may use."""
        if self.capabilities().reach < Reach.HOST:
            pytest.skip(f"{self.transport} does not claim to reach other processes")
        nursery = request.getfixturevalue("nursery")
        with PeerProcess(self.config(), nursery=nursery) as peer:
            self._offer_pool(peer, request)
            yield peer

    def _offer_pool(self, peer: PeerProcess, request: pytest.FixtureRequest) -> None:
        if self.remote_kind is not MemoryKind.FILE:
            peer.run(f"pool = engine.allocate({MIB}, name='pool')")
            return
        path = request.getfixturevalue("tmp_path") / "pool"
        path.write_bytes(bytes(MIB))
        peer.run("pool = engine.register(path, name='pool')", path=path)
