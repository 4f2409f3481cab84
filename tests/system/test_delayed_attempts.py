"""An attempt that was given up is let go late: what was written after it stands, whatever carried it."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

import tent_core as tent
import tent_mock
from tent_core.plugins import Registry
from tent_core.testing import wait_until
from tent_core.types import Status
from tent_shm import stream as shm_stream

from .conftest import Make, Start
from .support import only

SIZE = 32 << 20
NEVER_S = 30.0

RECEIVER = 'engine._transports.get("tcp").transport._receiver.pid'
OFFER = 'target = engine.allocate(size, name="target")'
IS = "bool((target.array == value).all())"


def _memory(engine: tent.Engine, value: int) -> tent.Buffer:
    buffer = engine.allocate(SIZE)
    buffer.array[:] = value
    return buffer


def test_over_tcp_a_write_to_a_stopped_receiver_moves_once_it_is_fenced(
    start: Start, make: Make
) -> None:
    owner = start(only("tcp", "shm"))
    owner.run(OFFER, size=SIZE)
    engine = make(only("tcp", "shm"))
    old, new = _memory(engine, 1), _memory(engine, 2)
    with engine.open_segment(owner.segment_name) as segment:
        target = segment.buffer("target")
        segment.write(old[:1], target[:1])
        receiver = owner.run(RECEIVER)
        os.kill(receiver, signal.SIGSTOP)
        try:
            batch = segment.submit("write", old, [0], target, [0], SIZE, stall=0.2)
            fences = engine._transports.get("tcp").transport._mover.fences
            wait_until(lambda: fences._open)
            assert not batch.poll()  # it waits for the fence
        finally:
            os.kill(receiver, signal.SIGCONT)
        batch.wait(NEVER_S)
        assert batch.transports() == {"shm": SIZE}
        assert owner.run(IS, value=1)
        segment.write(new, target, transport="shm")
        segment.read(old, target, transport="tcp")  # whatever was late is behind this
        assert owner.run(IS, value=2)


def test_over_tcp_a_write_to_a_receiver_that_stays_stopped_does_not_move(
    start: Start, make: Make
) -> None:
    owner = start(only("tcp", "shm"))
    owner.run(OFFER, size=SIZE)
    config = only("tcp", "shm")
    config["transports"]["tcp"]["fence_timeout"] = "0.3s"
    engine = make(config)
    old = _memory(engine, 1)
    with engine.open_segment(owner.segment_name) as segment:
        target = segment.buffer("target")
        segment.write(old[:1], target[:1])
        receiver = owner.run(RECEIVER)
        os.kill(receiver, signal.SIGSTOP)
        try:
            batch = segment.submit("write", old, [0], target, [0], SIZE, attempt_timeout=0.2)
            batch.wait(NEVER_S, check=False)
        finally:
            os.kill(receiver, signal.SIGCONT)
        assert batch.status.tolist() == [Status.FAILED]
        assert "outcome unknown" in batch.explain_failures()


def test_over_tcp_a_write_whose_receiver_was_killed_moves(start: Start, make: Make) -> None:
    owner = start(only("tcp", "shm"))
    owner.run(OFFER, size=SIZE)
    engine = make(only("tcp", "shm"))
    old = _memory(engine, 1)
    with engine.open_segment(owner.segment_name) as segment:
        target = segment.buffer("target")
        segment.write(old[:1], target[:1])
        receiver = owner.run(RECEIVER)
        os.kill(receiver, signal.SIGSTOP)
        batch = segment.submit("write", old, [0], target, [0], SIZE)
        os.kill(receiver, signal.SIGKILL)
        assert batch.wait(NEVER_S).transports() == {"shm": SIZE}
        assert owner.run(IS, value=1)


def test_over_shm_a_copy_moves_only_when_its_system_call_has_returned(
    start: Start, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, go = threading.Event(), threading.Event()
    real = shm_stream.Stream.step

    def step(self: shm_stream.Stream, begin: int, stop: int) -> int:
        if begin >= SIZE // 2 and not go.is_set():
            held.set()
            assert go.wait(NEVER_S)
        return real(self, begin, min(stop, begin + SIZE // 4))

    config = only("shm", "tcp")
    config["transports"]["shm"]["copy_threads"] = 1
    owner = start(only("shm", "tcp"))
    owner.run(OFFER, size=SIZE)
    engine = make(config)
    old, new = _memory(engine, 1), _memory(engine, 2)
    with engine.open_segment(owner.segment_name) as segment:
        target = segment.buffer("target")
        segment.write(old[:1], target[:1])
        segment.write(old[:1], target[:1], transport="tcp")
        monkeypatch.setattr(shm_stream, "STEP_BYTES", SIZE // 4)
        monkeypatch.setattr(shm_stream.Stream, "step", step)
        batch = segment.submit("write", old, [0], target, [0], SIZE, attempt_timeout=0.2)
        assert held.wait(NEVER_S)
        with pytest.raises(tent.WaitTimeout):
            batch.wait(0.5)
        go.set()
        assert batch.wait(NEVER_S).transports()["tcp"]
        assert owner.run(IS, value=1)
        segment.write(new, target, transport="tcp")
        assert owner.run(IS, value=2)


def test_over_a_mock_what_hung_and_was_given_up_writes_nothing_when_it_is_let_go() -> None:
    registry = Registry.of(
        tent_mock.declare("first", 1001, cancellation=True), tent_mock.declare("second", 1002)
    )
    config = only("first", "second")
    with (
        tent.Engine(config, plugins=registry) as there,
        tent.Engine(config, plugins=registry) as here,
    ):
        memory = there.allocate(4096, name="target")
        old, new = here.allocate(4096), here.allocate(4096)
        old.array[:], new.array[:] = 1, 2
        first = tent_mock.controller(here, "first")
        with here.open_segment(there.segment_name) as segment:
            target = segment.buffer("target")
            segment.write(old[:1], target[:1])
            first.plan("hang", at=1)
            batch = segment.submit("write", old, [0], target, [0], 4096, attempt_timeout=0.1)
            assert batch.wait(NEVER_S).transports() == {"second": 4096}
            assert (memory.array == 1).all()
            segment.write(new, target, transport="second")
            first.release()
            assert np.all(memory.array == 2)
