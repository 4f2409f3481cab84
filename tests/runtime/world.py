"""An engine, its peers and mock transports, pushed on step by step, beside the model of it."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np

import tent_core as tent
import tent_mock
from tent_core.plugins import Registry
from tent_core.testing.steps import StepAlarm, StepQueue, steps
from tent_core.types import Opcode, Priority
from tent_mock.script import Do, Step

from .model import CANCELS, ENTRIES, MAX_TRIES, RULES, TRANSFER_S, Batch, Model, Wish

SIZE = 1 << 16
BLOCK = 512
SLICE = 4096
PROMOTION_S = 2.0
CLOSE_S = 60.0


class World:
    """What a step is done to, at both sides, and where they are compared. One seed makes one history."""

    def __init__(self, seed: int, peers: int = 2) -> None:
        self.random = random.Random(seed)
        self.drive, self.alarm, self.queue = self._steps()
        self.registry = Registry.of(
            *(
                tent_mock.declare(
                    name,
                    1001 + i,
                    clock=self.alarm,
                    cancellation=cancels,
                    partial_progress=name == "c",
                )
                for i, (name, cancels) in enumerate(CANCELS.items())
            )
        )
        self.here = tent.Engine(self._settings(), plugins=self.registry, drive=self.drive)
        self.source = self.here.allocate(SIZE, name="source")
        self.source.array[:] = self._noise()
        self.there: list[tent.Engine] = []
        self.segments: list[tent.Segment] = []
        for _ in range(peers):
            self._open_peer(len(self.there))
        self.model = Model(
            list(CANCELS),
            [engine.segment_name for engine in self.there],
            self.here.settings.scheduling.admission(),
            SLICE,
            self.source.array.tobytes(),
            [self._memory(i) for i in range(peers)],
        )
        self.batches: list[tuple[tent.Batch, Batch]] = []
        self.history: list[str] = []

    @staticmethod
    def _steps() -> tuple[Any, StepAlarm, StepQueue]:
        return steps()

    def _settings(self) -> dict[str, Any]:
        return {
            "transports": {name: {"enable": True} for name in CANCELS},
            "policy": [
                {
                    "name": name,
                    "transports": list(names),
                    **({} if attempt is None else {"attempt_timeout_s": attempt}),
                }
                for name, (names, attempt) in ENTRIES.items()
            ],
            "failover": {
                "max_attempts": MAX_TRIES - 1,
                "failures": RULES.failures,
                "window_s": RULES.window,
                "pause_s": RULES.pause,
                "longest_pause_s": RULES.longest,
            },
            "scheduling": {
                "low": {"bytes": 2 * SLICE, "tasks": 16},
                "slice": SLICE,
                "promotion_timeout_s": PROMOTION_S,
                "order": self.random.choice(["arrival", "deadline"]),
            },
            "transfer": {"timeout_s": TRANSFER_S},
            "log": {"level": "error"},
        }

    def _noise(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.random.randbytes(SIZE), np.uint8)

    def _open_peer(self, at: int) -> None:
        there = tent.Engine(self._settings(), plugins=self.registry)
        there.allocate(SIZE, name="target").array[:] = self._noise()
        segment = self.here.open_segment(there.segment_name)
        for name in CANCELS:
            segment.peer.endpoint(name)
        self.there[at : at + 1] = [there]
        self.segments[at : at + 1] = [segment]

    def _memory(self, peer: int) -> bytes:
        return self.there[peer].buffers()[0].array.tobytes()

    # ---------------------------------------------------------------- steps

    def step(self) -> None:
        """Do something at both sides."""
        does = [
            (self.submit, 30),
            (self.fault, 16),
            (self.heal, 3),
            (self.advance, 12),
            (self.pump, 16),
            (self.poll, 8),
            (self.release, 12),
            (self.cancel, 10),
            (self.depart, 0.4),
        ]
        chosen = self.random.choices(*zip(*does, strict=True))[0]
        chosen()

    def _rows(self) -> tuple[tuple[int, int, int], ...]:
        """Blocks that overlap neither here nor there: what overlaps has no order."""
        if self.random.random() < 0.2:
            length = self.random.choice([SLICE, 3 * SLICE + 100, 6 * SLICE])
            far = self.random.randrange(SIZE - length)
            return ((self.random.randrange(SIZE - length), far, length),)
        n = self.random.choice([1, 1, 2, 5, 12])
        local = self.random.sample(range(SIZE // BLOCK), n)
        remote = self.random.sample(range(SIZE // BLOCK), n)
        if self.random.random() < 0.5:  # neighbours
            start, far = (self.random.randrange(SIZE // BLOCK - n) for _ in range(2))
            local, remote = list(range(start, start + n)), list(range(far, far + n))
            if n > 3 and self.random.random() < 0.5:
                remote[2], remote[3] = remote[3], remote[2]
        return tuple((a * BLOCK, b * BLOCK, BLOCK) for a, b in zip(local, remote, strict=True))

    def submit(self) -> None:
        draw = self.random
        wish = Wish(
            peer=draw.randrange(len(self.there)),
            opcode=draw.choice(list(Opcode)),
            rows=self._rows(),
            priority=draw.choice(list(Priority)),
            policy=draw.choice(list(ENTRIES)),
            transport=draw.choice([None, None, "a", "c"]),
            timeout=draw.choice([0.0, 0.25, 1.5, 8.0, 8.0, TRANSFER_S, TRANSFER_S]),
            attempt=draw.choice([None, None, 0.25, 2.0]),
            stall=draw.choice([None, None, 0.125]),
            retry_unfenced=draw.random() < 0.3,
        )
        self._say(f"submit {wish}")
        segment = self.segments[wish.peer]
        local, remote, lengths = (np.array(column) for column in zip(*wish.rows, strict=True))
        real = segment.submit(
            wish.opcode,
            self.source,
            local,
            segment.buffer("target"),
            remote,
            lengths,
            priority=wish.priority,
            policy=wish.policy,
            transport=wish.transport,
            deadline=self.alarm.now() + wish.timeout,
            attempt_timeout=wish.attempt,
            stall=wish.stall,
            retry_unfenced=wish.retry_unfenced,
        )
        self.batches.append((real, self.model.submit(wish)))

    def fault(self) -> None:
        draw = self.random
        name = draw.choice(list(CANCELS))
        do = draw.choice(
            [
                Do.REFUSE, Do.FAIL, Do.FAIL, Do.DELAY, Do.HANG, Do.HANG,
                Do.SHORT, Do.TWICE, Do.LOSE, Do.RAISE, Do.CRASH,
            ]
        )  # fmt: skip
        fields: dict[str, Any] = {"every": draw.choice([1, 2, 3]), "times": draw.choice([2, 8, 40])}
        if do is Do.DELAY:
            fields["seconds"] = draw.choice([0.0, 0.125, 0.5, 4.0])
        if do is Do.FAIL:
            fields["fenced"] = draw.random() < 0.6
        if do is Do.SHORT:
            fields["moved"] = draw.choice([None, 700])
        if draw.random() < 0.3:
            fields["peer"] = draw.choice(self.there).segment_name
        if draw.random() < 0.3:
            fields["opcode"] = draw.choice(["read", "write"])
        self._say(f"fault {name} {do} {fields}")
        self._mock(name).plan(do, **fields)
        self.model.transports[name].script.add(Step(do=do, **fields))

    def heal(self) -> None:
        for name, transport in self.model.transports.items():
            self._mock(name).clear()
            transport.script.clear()
        self._say("heal")

    def advance(self) -> None:
        seconds = self.random.choice([0.0, 0.125, 0.125, 0.25, 1.0, 4.0])
        self._say(f"advance {seconds}")
        self.alarm.advance(seconds)
        self.model.alarm.advance(seconds)

    def pump(self) -> None:
        most = self.random.choice([1, 2, 8])
        self._say(f"pump {most}")
        self.queue.run(most)
        self.model.pump(most)

    def poll(self) -> None:
        open_ = [pair for pair in self.batches if not pair[1].done]
        if open_:
            real, model = self.random.choice(open_)
            self._say(f"poll {self.batches.index((real, model))}")
            real.poll()
            self.model.pump(1)

    def release(self) -> None:
        name, most = self.random.choice(list(CANCELS)), self.random.choice([1, 2, 100])
        self._say(f"release {name} {most}")
        self._mock(name).release(most)
        self.model.transports[name].release(most)

    def cancel(self) -> None:
        open_ = [pair for pair in self.batches if not pair[1].done]
        if open_:
            real, model = self.random.choice(open_)
            self._say(f"cancel {self.batches.index((real, model))}")
            real.cancel()
            self.model.cancel(model)

    def depart(self) -> None:
        """A peer goes, all that was under way to it ends, and another comes in its place."""
        at = self.random.randrange(len(self.there))
        self._say(f"depart {at}")
        self._pump_all()
        self.segments[at].peer.depart("scripted")
        self._join_transports()
        self.model.depart(at)
        self._pump_all()
        for real, model in self.batches:
            if model.wish.peer == at:
                assert real.done, f"{real!r} goes on although its peer has departed"
        self._same_counters_again()
        self.there[at].close()
        self._open_peer(at)
        self.model.welcome(at, self.there[at].segment_name, self._memory(at))

    def close(self) -> None:
        """The engine is closed with work under way: all of it ends."""
        self._say("close")
        self._pump_all()
        closing = threading.Thread(target=self.here.close, args=(CLOSE_S,))
        closing.start()
        while closing.is_alive():
            closing.join(0.001)
            self.queue.run()
        for at in range(len(self.there)):
            self.model.depart(at)
        self.model.pump()
        self.queue.run()
        self.compare_batches()

    def stop(self) -> None:
        """Nothing of the engines is left."""
        self.here.close()
        for engine in self.there:
            engine.close()

    def _pump_all(self) -> None:
        self.queue.run()
        self.model.pump()

    def _join_transports(self) -> None:
        """Wait until the transports' own threads have done what they were asked to."""
        for running in self.here._transports:
            running.calls.submit(lambda: None).result(10)

    def _mock(self, name: str) -> tent_mock.Controller:
        return tent_mock.controller(self.here, name)

    def _say(self, what: str) -> None:
        self.history.append(f"{self.alarm.now()}: {what}")

    # ---------------------------------------------------------------- the same at both sides

    def compare(self) -> None:
        """Everything that both sides know is the same."""
        self.compare_batches()
        assert self._counters() == +self.model.counters
        assert self.here.stats_.failovers == self.model.failovers
        for name, transport in self.model.transports.items():
            assert self._mock(name).held == sum(p.hangs for p in transport.pending), name
        assert self.source.array.tobytes() == self.model.memory
        for peer, memory in enumerate(self.model.memories):
            assert self._memory(peer) == memory

    def compare_batches(self) -> None:
        for number, (real, model) in enumerate(self.batches):
            what = f"batch {number}"
            assert real.status.tolist() == model.status, what
            assert real.moved.tolist() == model.moved, what
            assert real.done == model.done, what
            assert real.transports() == {by: n for by, n in model.carried.items() if n}, what
        self.batches = [pair for pair in self.batches if not pair[1].done] or self.batches[-1:]

    def _counters(self) -> dict[tuple[str, str], int]:
        return {
            (name, key): value
            for name, known in self.here.stats_.totals().items()
            for key, value in known.items()
            if isinstance(value, int) and value
        }

    def _same_counters_again(self) -> None:
        """After a departure: which transport failed first is a matter of the transports' threads."""
        self.model.counters.clear()
        self.model.counters.update(self._counters())
        self.model.failovers = self.here.stats_.failovers
