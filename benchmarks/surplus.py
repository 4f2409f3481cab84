"""More peers than an engine has descriptors for: who is refused, what is held, how soon there is room."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from footprint import children, footprint

from tent_core.testing.peers import Nursery, PeerProcess

HERE = Path(__file__).resolve().parent
BEFORE = f"import sys; sys.path.insert(0, {str(HERE)!r})"
SURPLUS = 8
"""So many more peers than the engine takes ask to be let in."""

PER_PROCESS = 12
ASKS_S = 2.0
"""How long each waits for an answer before it asks again."""

SERVED_S = 5.0
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Surplus:
    """What was found. `served_s` are the seconds from each departure to the next one who was let in."""

    most: int
    let_in: int
    refusals: list[str]
    descriptors: int
    served_s: list[float]

    def wrong(self, limit: int) -> list[str]:
        """What is not as it has to be under that limit of descriptors."""
        found = []
        if self.let_in != self.most:
            found.append(f"{self.let_in} busy peers were let in, and the engine takes {self.most}")
        if self.descriptors >= limit:
            found.append(f"{self.descriptors} descriptors were held")
        if len(self.refusals) != SURPLUS or not all("PeerRefused" in r for r in self.refusals):
            found.append(f"not all of the surplus was refused clearly: {self.refusals}")
        if max(self.served_s) > SERVED_S:
            found.append(
                f"a refused peer was served {max(self.served_s):.1f} s after there was room"
            )
        return found


def run(one: PeerProcess, nursery: Nursery, config: dict[str, Any]) -> Surplus:
    """Fill the engine of `one` with busy peers, and beyond; let some leave; then all."""
    most: int = one.run("engine._control.most_peers")
    with ExitStack() as stack:
        crowds: list[PeerProcess] = []
        left = most + SURPLUS
        while left:
            count = min(PER_PROCESS, left)
            left -= count
            crowds.append(stack.enter_context(PeerProcess(config, before=BEFORE, nursery=nursery)))
            make = "import crowd; guests = crowd.Guests(config, target, asks_s, count)"
            crowds[-1].run(make, config=config, target=one.segment_name, asks_s=ASKS_S, count=count)
            print(
                f"\rsurplus: {most + SURPLUS - left} of {most + SURPLUS} ask",
                end="",
                file=sys.stderr,
            )
        print(file=sys.stderr)

        def state() -> tuple[int, list[str]]:
            states = [crowd.run("guests.state()") for crowd in crowds]
            return sum(n for n, _ in states), [text for _, texts in states for text in texts]

        _wait(lambda: state()[0] >= most and len(state()[1]) >= SURPLUS)
        time.sleep(ASKS_S)
        let_in, refusals = state()
        held = max(footprint(pid).descriptors for pid in (one.pid, *children(one.pid)))
        served = []
        for crowd in crowds[:3]:
            before = state()[0]
            crowd.run("guests.leave(1)")
            began = time.monotonic()
            _wait(lambda: state()[0] >= before)  # noqa: B023
            served.append(round(time.monotonic() - began, 2))
        for crowd in crowds:
            crowd.run("guests.close()")
    return Surplus(most, let_in, refusals, held, served)


def _wait(ready: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not ready() and time.monotonic() < until:
        time.sleep(0.05)
