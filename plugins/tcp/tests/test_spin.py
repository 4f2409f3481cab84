"""When the receiver looks again, and when it sleeps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tent_tcp.receiver import spin
from tent_tcp.receiver.spin import Spin

SPIN_S = 200e-6


class Processor:
    """How often the process has lost its processor to another one."""

    def __init__(self) -> None:
        self.lost = 0
        self.yields = 0

    def usage(self, _: int) -> SimpleNamespace:
        return SimpleNamespace(ru_nivcsw=self.lost)


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Processor:
    made = Processor()

    def give_way() -> None:
        made.yields += 1

    monkeypatch.setattr(spin, "getrusage", made.usage)
    monkeypatch.setattr(spin.os, "sched_yield", give_way)
    return made


def serve(spinning: Spin, processor: Processor, now: float, messages: int, lost: int) -> float:
    """So many messages, at each of which the processor is lost so often; the time after them."""
    for _ in range(messages):
        processor.lost += lost
        now += 100e-6
        spinning.came(now, within=False)
    return now


def test_with_processors_to_spare_it_looks_for_a_while_and_gives_way(processor: Processor) -> None:
    spinning = Spin(SPIN_S)
    assert not spinning.goes_on(0.0)
    now = serve(spinning, processor, 1.0, 100, lost=0)
    assert all(spinning.goes_on(now + SPIN_S / 2) for _ in range(100))
    assert processor.yields
    assert not spinning.goes_on(now + SPIN_S)


def test_where_others_want_all_processors_it_sleeps_between_messages(processor: Processor) -> None:
    spinning = Spin(SPIN_S)
    now = serve(spinning, processor, 1.0, 1000, lost=1)
    assert not spinning.goes_on(now)
    spinning.came(now, within=True)  # the rest of a message is on its way
    assert all(spinning.goes_on(now) for _ in range(100))
    assert not processor.yields
    assert not spinning.goes_on(now + SPIN_S / 2)


def test_it_looks_again_whether_they_still_do(processor: Processor) -> None:
    spinning = Spin(SPIN_S)
    now = serve(spinning, processor, 1.0, 1000, lost=1)
    assert not spinning.goes_on(now)
    now = serve(spinning, processor, now + 1.0, 1000, lost=0)
    assert spinning.goes_on(now)


def test_it_gives_the_kernel_time_to_find_a_free_processor(processor: Processor) -> None:
    spinning = Spin(SPIN_S)
    now = serve(spinning, processor, 1.0, 50, lost=1)  # 5 ms
    now = serve(spinning, processor, now, 1000, lost=0)
    assert spinning.goes_on(now)
