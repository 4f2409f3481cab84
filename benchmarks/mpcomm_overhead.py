"""What mpcomm costs in Python per request: over the stand-in for its library, which moves nothing here.

    python benchmarks/mpcomm_overhead.py [--batches 500]

From submit to terminal status through the public API, in batches of 100 requests that cannot be merged.
Exits with status 1 if the median is above 10 microseconds a request.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

os.environ["TENT_MPCOMM_STAND_IN_MOVES"] = "0"

import numpy as np

import tent_core as tent
from tent_mock.mpcomm import ON_THE_PATH

BATCH, BLOCK, BLOCKS = 100, 4096, 256
MOST_US = 10.0
CONFIG = {
    "transports": {"mpcomm": {"enable": True}},
    "policy": [{"name": "only", "transports": ["mpcomm"]}],
    "log": {"level": "error"},
}


def measure(call: Callable[[], object], batches: int) -> dict[str, float]:
    """Microseconds a request: median and 99th percentile over batches."""
    seconds = []
    for _ in range(batches):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    each = np.array(seconds) / BATCH * 1e6
    return {"p50_us": round(float(np.median(each)), 2), "p99_us": round(np.percentile(each, 99), 2)}


def main() -> int:
    """Measure both ways to submit, and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=500)
    batches = parser.parse_args().batches
    sys.path.insert(0, str(ON_THE_PATH))
    with tent.Engine(CONFIG) as here, tent.Engine(CONFIG) as there:
        source, _ = here.allocate(BLOCKS * BLOCK), there.allocate(BLOCKS * BLOCK, name="pool")
        ours = np.arange(BATCH) * BLOCK
        theirs = np.random.default_rng(1).permutation(BLOCKS)[:BATCH] * BLOCK
        with here.open_segment(there.segment_name) as segment:
            remote = segment.buffer("pool")

            def waits() -> None:
                segment.write_many(source, ours, remote, theirs, BLOCK)

            def submits() -> None:
                segment.submit("write", source, ours, remote, theirs, BLOCK).wait(10)

            waits()
            found = {"write_many": measure(waits, batches), "submit": measure(submits, batches)}
    print(json.dumps(found))
    return int(any(each["p50_us"] > MOST_US for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
