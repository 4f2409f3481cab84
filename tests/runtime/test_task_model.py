"""An engine and the model of it are driven by the same random steps, and agree after each of them.

A failure names its seed and the last steps; `TENT_TEST_SEED=n` runs that history alone.
`TENT_TEST_FULL=1` makes 10,000 steps.
"""

from __future__ import annotations

import os

import pytest

from .world import World

FULL = os.environ.get("TENT_TEST_FULL") == "1"
SEED = os.environ.get("TENT_TEST_SEED")
STEPS = 500 if FULL else 250
SEEDS = [int(SEED)] if SEED else list(range(20 if FULL else 8))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_engine_does_what_the_model_of_it_does(seed: int) -> None:
    world = World(seed)
    try:
        for _ in range(STEPS):
            world.step()
            world.compare()
        world.close()
    except BaseException as error:
        error.add_note(
            f"seed {seed}, step {len(world.history)}:\n" + "\n".join(world.history[-25:])
        )
        raise
    finally:
        world.stop()
