"""Moves bytes between two engines over each transport named, with only what is installed here.

What needs a library that is not here, such as pyverbs, must say so.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

import tent_core as tent
from tent_core import plugins

LIBRARIES = {
    "rdma": ("pyverbs", "apt install python3-pyverbs"),
    "mpcomm": ("mpcomm", "install the wheel of UCL-MPComm"),
}
"""Transports that need a module from elsewhere, and what they say where it is missing."""


def move(transport: str) -> None:
    """Write over that transport alone, and check what arrived."""
    config = {
        "transports": {transport: {"enable": True}},
        "policy": [{"name": "only", "transports": [transport]}],
    }
    with tent.Engine(config) as here, tent.Engine(config) as there:
        source, target = here.allocate(1 << 20), there.allocate(1 << 20, name="target")
        source.array[:] = 7
        with here.open_segment(there.segment_name) as segment:
            segment.write(source, segment.buffer("target"))
        if not (target.array == 7).all():
            sys.exit(f"{transport}: not every byte arrived")


def refuse(transport: str, reason: str) -> None:
    """A transport that cannot be used is an error if the YAML insists, and is else passed over."""
    try:
        tent.Engine({"transports": {transport: {"enable": True}}}).close()
    except tent.TentError as error:
        if reason not in str(error):
            sys.exit(f"{transport}: expected to hear of {reason!r}, and heard: {error}")
        print(f"{transport}, as it should: {error}")
    else:
        sys.exit(f"{transport} cannot be used ({reason}), and enable: true was no error")
    with tent.Engine({"transports": {transport: {"enable": "auto"}}}) as engine:
        print(engine)


def report(transport: str, reason: str) -> None:
    """A transport that is installed and cannot run is listed with the reason."""
    listed = {row.name: row.reason for row in plugins.discover().report()}
    if reason not in listed.get(transport, ""):
        sys.exit(f"{transport}: expected to be listed with {reason!r}, found {listed}")


def move_by_the_best(expected: str) -> None:
    """One configuration for every installation: the first transport of its policy that is there carries."""
    config = {
        "transports": {"shm": {"enable": "auto"}, "tcp": {"enable": "auto"}},
        "policy": [{"name": "any", "transports": ["shm", "tcp"]}],
    }
    with tent.Engine(config) as here, tent.Engine(config) as there:
        source, target = here.allocate(1 << 20), there.allocate(1 << 20, name="target")
        source.array[:] = 9
        with here.open_segment(there.segment_name) as segment:
            batch = segment.write_many(source, [0], segment.buffer("target"), [0], 1 << 20)
        if batch.transports() != {expected: 1 << 20} or not (target.array == 9).all():
            sys.exit(f"{expected} was expected to carry everything, found {batch.transports()}")
    print(f"with enable: auto, {expected} carries")


def main() -> None:
    """The transports named must work; those of this repository that are not named must be absent."""
    for transport in ("mock", "shm", "tcp"):
        if transport in sys.argv[1:]:
            move(transport)
            print(f"{transport}: works")
        elif transport != "mock":
            refuse(transport, f"install tent-{transport}")
    for transport, (module, remedy) in LIBRARIES.items():
        if transport not in sys.argv[1:]:
            refuse(transport, f"install tent-{transport}")
        elif find_spec(module) is None:
            report(transport, remedy)
            refuse(transport, remedy)
        else:
            move(transport)
            print(f"{transport}: works over {module}")
    if best := [transport for transport in ("shm", "tcp") if transport in sys.argv[1:]]:
        move_by_the_best(best[0])


main()
