"""Mistakes over real transports: each is a clear error, no byte is written, and everything goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tent_core as tent
from tent_core.errors import ClosedError, PermissionDenied, RangeError, StaleHandle, UsageError
from tent_core.testing.peers import PeerProcess

from .conftest import Make, Start
from .support import only, program

SIZE = 1 << 16
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])
OFFER = """
whole = np.zeros(3 * size, np.uint8)
writable = engine.register(whole[size:2 * size], name="writable")
readable = engine.allocate(size, name="readable", permission=tent_core.types.Permission.GLOBAL_READ_ONLY)
private = engine.allocate(size, name="private", permission=tent_core.types.Permission.LOCAL_READ_WRITE)
"""
UNTOUCHED = "not (whole.any() or readable.array.any() or private.array.any())"


class Joined:
    """An engine here, a peer with buffers of each permission, and memory around one of them."""

    def __init__(self, here: tent.Engine, there: PeerProcess) -> None:
        self.here, self.there = here, there
        there.run("import tent_core.types\n" + OFFER, size=SIZE)
        self.local = here.register(np.full(SIZE, 5, np.uint8), name="local")
        self.segment = here.open_segment(there.segment_name)
        self.remote = self.segment.buffer("writable")

    def write(self, here: Any, there: Any, lengths: Any) -> tent.Batch:
        return self.segment.write_many(self.local, here, self.remote, there, lengths)


@pytest.fixture
def joined(make: Make, start: Start, transport: str) -> Joined:
    return Joined(make(only(transport)), start(only(transport)))


def u64(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.uint64)


MISTAKES: dict[str, tuple[type[Exception], Callable[[Joined], object]]] = {
    "past the end": (RangeError, lambda j: j.write([0], [SIZE - 63], 64)),
    "past the local end": (RangeError, lambda j: j.write([SIZE], [0], 1)),
    "one of many": (RangeError, lambda j: j.write([0, 0, 0], [0, 64, SIZE], 64)),
    "an offset that wraps": (RangeError, lambda j: j.write([0], u64(2**64 - 64), 128)),
    "a length that wraps": (RangeError, lambda j: j.write([64], [64], u64(2**64 - 64))),
    "all bits": (RangeError, lambda j: j.write(u64(2**64 - 1), u64(2**64 - 1), u64(2**64 - 1))),
    "no length": (RangeError, lambda j: j.write([0], [0], [0])),
    "a negative offset": (RangeError, lambda j: j.write([-1], [0], 64)),
    "rounded offsets": (UsageError, lambda j: j.write([0], [2.0**53], 64)),
    "beyond 64 bits": (UsageError, lambda j: j.write([0], [2**64], 64)),
    "columns of two sizes": (UsageError, lambda j: j.write([0, 64], [0], 64)),
    "two dimensions": (UsageError, lambda j: j.write([[0]], [0], 64)),
    "a slice too long": (RangeError, lambda j: j.segment.write(j.local, j.remote[: SIZE - 1])),
    "a slice outside": (RangeError, lambda j: j.remote[0 : SIZE + 1]),
    "memory that is not registered": (
        UsageError,
        lambda j: j.segment.write(np.zeros(64, np.uint8), j.remote[:64]),
    ),
    "an address outside": (RangeError, lambda j: j.here.locate(j.local.address - 1, 2)),
    "a write to what is to be read": (
        PermissionDenied,
        lambda j: j.segment.write(j.local, j.segment.buffer("readable")),
    ),
    "a read of what is private": (
        PermissionDenied,
        lambda j: j.segment.read(j.local, j.segment.buffer("private")),
    ),
    "a buffer that is not there": (RangeError, lambda j: j.segment.buffer("no such")),
    "no address": (UsageError, lambda j: j.here.open_segment("nowhere")),
    "a segment that does not exist": (
        tent.UnknownSegment,
        lambda j: j.here.open_segment("127.0.0.1:1", timeout=2),
    ),
    "an opcode": (UsageError, lambda j: j.segment.submit("swap", j.local, [0], j.remote, [0], 64)),
    "a policy entry": (
        UsageError,
        lambda j: j.segment.write(j.local, j.remote, policy="no such"),
    ),
    "a notification too large": (UsageError, lambda j: j.segment.notify("n", bytes(1 << 16))),
    "memory from 2^64 on": (RangeError, lambda j: j.here.register((2**64 - 64, 64))),
    "device memory": (
        tent.MemoryUnsupported,
        lambda j: j.here.register((4096, 64), location="cuda:0"),
    ),
}


@TRANSPORTS
def test_each_mistake_is_its_own_error_and_no_byte_moves(joined: Joined) -> None:
    for name, (kind, call) in MISTAKES.items():
        with pytest.raises(tent.TentError) as raised:
            call(joined)
        assert isinstance(raised.value, kind), f"{name}: {raised.value!r}"
        assert len(str(raised.value)) > 20, name
    assert joined.there.run(UNTOUCHED)
    assert (joined.local.array == 5).all()
    joined.segment.write(joined.local, joined.remote)
    assert joined.there.run("int(whole.sum())") == 5 * SIZE


@TRANSPORTS
def test_what_was_closed_says_so_and_what_has_ended_can_still_be_looked_at(joined: Joined) -> None:
    batch = joined.write([0], [0], 64)
    prepared = joined.segment.prepare("write", joined.local, joined.remote)
    joined.segment.close()
    for call in (prepared.run, prepared.post, lambda: joined.write([0], [0], 64)):
        with pytest.raises(ClosedError, match="closed"):
            call()
    joined.here.close()
    for call in (prepared.run, joined.here.allocate, joined.here.next_notification):
        with pytest.raises(ClosedError, match="closed"):
            call(*([64] if call == joined.here.allocate else []))
    assert batch.wait(0).done
    assert batch.status.tolist() == [tent.Status.COMPLETED]
    assert "COMPLETED" in repr(batch)


@TRANSPORTS
def test_addresses_around_2_to_the_53_and_the_64_are_used_exactly_as_they_are(
    joined: Joined,
) -> None:
    there = joined.there
    there.run("everything = engine.register((4096, 2**64 - 8192), name='everything')")
    address = there.run("whole.ctypes.data")
    remote = joined.segment.buffer("everything")
    for offset in (2**53 - 1, 2**53 + 1, 2**63 - 1, 2**63 + 1, 2**64 - 8200):
        with pytest.raises(tent.TransferFailed, match=r"(?i)bad address"):
            joined.segment.write_many(joined.local, [0], remote, u64(offset), 8)
    for size in (2**63, 2**64 - 8192):
        giant = joined.here.register((4096, 2**64 - 8192))
        with pytest.raises(RangeError, match="2\\^63"):
            joined.segment.write_many(giant, [0], remote, [0], u64(size))
    assert there.run(UNTOUCHED)
    joined.segment.write_many(joined.local, [0], remote, u64(address - 4096), SIZE)
    assert there.run("int(whole[:size].sum()), int(whole.sum())") == (5 * SIZE, 5 * SIZE)


@TRANSPORTS
def test_a_registered_range_that_is_no_memory_fails_its_transfers_and_nothing_else(
    joined: Joined,
) -> None:
    joined.there.run("import mmap; gone = mmap.mmap(-1, size)")
    joined.there.run("address = np.frombuffer(gone, np.uint8).ctypes.data; gone.close()")
    joined.there.run("hole = engine.register((address, size), name='hole')")
    hole = joined.segment.buffer("hole")
    hole_here = joined.here.register((4096, SIZE), name="hole here")
    for call in (
        lambda: joined.segment.write(joined.local, hole),
        lambda: joined.segment.read(joined.local, hole),
        lambda: joined.segment.write(hole_here, joined.remote),
        lambda: joined.segment.read(hole_here, joined.remote),
    ):
        with pytest.raises(tent.TransferFailed):
            call()
    both = joined.segment.submit(
        "write", joined.local, [0, 0], [joined.remote, hole], [0, 0], 64, remote_index=[0, 1]
    )
    both.wait(10, check=False)
    assert both.status[1] == tent.Status.FAILED  # and with it, maybe, what went in one message
    joined.segment.write(joined.local, joined.remote)


@TRANSPORTS
def test_a_handle_of_another_incarnation_on_the_same_port_is_stale(
    make: Make, start: Start, transport: str
) -> None:
    here, there = make(only(transport)), start(only(transport))
    joined = Joined(here, there)
    prepared = joined.segment.prepare("write", joined.local, joined.remote)
    prepared.run()
    port = there.segment_name.rpartition(":")[2]
    there.kill()
    again = start(only(transport, control={"listen": f"127.0.0.1:{port}"}))
    anew = Joined(here, again)
    assert anew.segment.name == joined.segment.name
    for call in (
        prepared.run,
        lambda: joined.segment.write(joined.local, joined.remote),
        lambda: anew.segment.write(anew.local, joined.remote),
    ):
        with pytest.raises((tent.PeerDeparted, StaleHandle)):
            call()
    assert again.run(UNTOUCHED)
    anew.segment.write(anew.local, anew.remote)


@TRANSPORTS
def test_in_a_forked_child_everything_is_an_error_that_says_spawn(
    start: Start, transport: str
) -> None:
    there, parent = start(only(transport)), start(only(transport))
    there.run("target = engine.allocate(4096, name='target')")
    parent.run(program("fork"))
    answers = parent.run(
        "try_in_child(engine, owner, 'target', config)",
        owner=there.segment_name,
        config=only(transport),
    )
    assert answers["after"] == "ended"
    assert answers.pop("close") == "nothing raised"
    for name in set(answers) - {"after"}:
        assert answers[name].startswith("ClosedError: "), (name, answers[name])
        assert "spawn" in answers[name], (name, answers[name])
    parent.run("segment.write(local, remote)")
    assert there.run("int(target.array.sum())") == 4096
