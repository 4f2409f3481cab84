"""The descriptor number that an owner published comes to stand for another file, which is never touched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tent_core as tent
from tent_core.testing import wait_until

from .conftest import Make, Start
from .support import only, program

SIZE = 1 << 20


@pytest.mark.parametrize("kind", ["alike", "unsealed", "shorter", "on disk", "none"])
def test_a_file_that_has_taken_a_published_descriptor_number_is_not_written_to(
    make: Make, start: Start, tmp_path: Path, kind: str
) -> None:
    owner = start(only("shm"))
    owner.run(program("descriptors"))
    owner.run("target = engine.allocate(size, name='target')", size=SIZE)
    here = make(only("shm"))
    local = here.register(np.full(SIZE, 7, np.uint8))
    with here.open_segment(owner.segment_name) as segment:
        remote = segment.buffer("target")
        owner.run(
            "other = replace_descriptor(target, kind, folder)", kind=kind, folder=str(tmp_path)
        )
        segment.write(local, remote)
        assert owner.run("int((target.array == 7).sum())") == SIZE
        assert owner.run("touched(other)") == 0


REGISTER_ANEW = """
old, old_array = target, target.array
old.unregister()
target = engine.allocate(old.length, name="target")
(old.id, old.local.memory_fd) == (target.id, target.local.memory_fd)
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_buffer_with_the_id_and_descriptor_of_one_before_is_another_buffer(
    make: Make, start: Start, transport: str
) -> None:
    owner = start(only(transport))
    owner.run("target = engine.allocate(size, name='target')", size=SIZE)
    here = make(only(transport))
    local = here.allocate(SIZE)
    with here.open_segment(owner.segment_name) as segment:
        for round_ in range(1, 6):
            before = segment.buffer("target")
            local.array[:] = round_
            segment.write(local, before)
            assert owner.run(REGISTER_ANEW), "both were to be used again"
            with pytest.raises(tent.StaleHandle):
                segment.write(local, before)
            wait_until(lambda old=before: segment.buffer("target").generation > old.generation)
            local.array[:] = 100
            segment.write(local[: SIZE // 2], segment.buffer("target")[: SIZE // 2])
            assert owner.run("int((old_array == round_).sum())", round_=round_) == SIZE
            assert owner.run("int((target.array == 100).sum())") == SIZE // 2


def test_what_waits_for_its_turn_does_not_go_to_a_buffer_that_has_the_id_meanwhile(
    make: Make, start: Start
) -> None:
    large = 256 << 20
    narrow = only("tcp", transports={"tcp": {"enable": True, "streams": 1}})
    owner, here = start(narrow), make(narrow)
    owner.run("memory = np.zeros(size, np.uint8)", size=SIZE)
    owner.run("target = engine.register(memory, name='target')")
    owner.run("busy = engine.allocate(size, name='busy')", size=large)
    local = here.register(np.full(SIZE, 7, np.uint8))
    with here.open_segment(owner.segment_name) as segment:
        before = segment.buffer("target")
        segment.write(local, before)
        owner.run("memory[:] = 0")
        first = segment.submit(
            "write", here.allocate(large), [0], segment.buffer("busy"), [0], large
        )
        waiting = segment.submit("write", local, [0], before, [0], SIZE)
        owner.run("target.unregister()")
        owner.run(
            "anew, more = engine.register(memory, name='anew'), engine.allocate(64, name='more')"
        )
        assert owner.run("anew.id == target.id")
        wait_until(lambda: {"anew", "more"} <= {b.name for b in segment.buffers()})
        last = segment.submit("write", local, [0], segment.buffer("more"), [0], 64)
        assert not waiting.done
        for batch in (first, waiting, last):
            batch.wait(30, check=False)
        assert [int(b.status[0]) for b in (first, waiting, last)] == [
            tent.Status.COMPLETED,
            tent.Status.INVALID,
            tent.Status.COMPLETED,
        ]
        assert not owner.run("bool(memory.any())")
