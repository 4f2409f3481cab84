"""An owner executes another program while a peer writes to its memory: no byte lands in the new program."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tent_core.testing import wait_until
from tent_core.testing.peers import PeerProcess

from .conftest import Start
from .support import often, only, program, program_path

SIZE = 1 << 20
PAGE = 4096
ROUNDS = often(1, 25)
LOOK_S = 0.3

# ADDR_NO_RANDOMIZE of linux/personality.h: the new program's memory lies where the old one's did.
_NO_RANDOMISATION = """
import ctypes, os, sys
ctypes.CDLL(None).personality(0x0040000)
os.execvp(sys.argv[1], sys.argv[1:])
"""
SAME_ADDRESSES = (sys.executable, "-c", _NO_RANDOMISATION)


class Exec:
    """An owner that becomes another program, and what its peer saw meanwhile."""

    def __init__(self, start: Start, peer: PeerProcess, folder: Path, thread: bool) -> None:
        self.file = folder / "memory"
        self.file.write_bytes(bytes(SIZE))
        owner = start(only("shm"), wrapper=SAME_ADDRESSES)
        owner.run(program("exec_owner"))
        self.addresses = owner.run("offer(engine, file, size)", file=str(self.file), size=SIZE)
        peer.run("stamper = Stamper(engine, owner)", owner=owner.segment_name)
        peer.run("stamper.aim(['registered', 'allocated'])")
        answer = folder / "answer"
        arguments = [str(answer), str(LOOK_S), str(SIZE), *map(str, self.addresses.values())]
        owner.begin(
            "become(successor, arguments, thread)",
            successor=str(program_path("successor")),
            arguments=arguments,
            thread=thread,
        )
        wait_until(lambda: answer.exists() or owner.process.poll() is not None, 20)
        self.stamps: dict[tuple[str, str], dict[str, Any]] = peer.run("stamper.stop()")
        assert owner.process.wait(10) == 0
        self.successor: dict[str, Any] = json.loads(answer.read_text())

    def arrived(self, size: str) -> int:
        """The smallest number that lies in what the registered buffer was: what arrived at least."""
        memory = np.fromfile(self.file, np.uint64)
        entries = PAGE // memory.itemsize
        return int((memory[:entries] if size == "small" else memory[entries:]).min())


@pytest.mark.parametrize("thread", [False, True], ids=["main thread", "other thread"])
def test_nothing_lands_in_a_program_that_an_owner_executes_and_nothing_lost_is_called_completed(
    start: Start, tmp_path: Path, thread: bool
) -> None:
    peer = start(only("shm"))
    peer.run(program("stamper"))
    for i in range(ROUNDS):
        folder = tmp_path / str(i)
        folder.mkdir()
        seen = Exec(start, peer, folder, thread)
        assert seen.addresses["registered"] in seen.successor["mine"]
        assert seen.successor["changed"] == []
        for (name, size), stamps in seen.stamps.items():
            assert stamps["began"] < seen.successor["began"], (name, size)
            assert stamps["raised"], "the exec came after the last write"
            assert all(_clear(text) for text in stamps["raised"]), stamps["raised"]
        for size in ("small", "large"):
            assert seen.stamps[("registered", size)]["completed"] <= seen.arrived(size)


def _clear(text: str) -> bool:
    return text.startswith(("PeerDeparted: ", "TransferFailed: ")) and (
        "executes another program" in text or "departed" in text or "has ended" in text
    )
