"""Two engines in two network namespaces: nothing assumes loopback, and IPv6 works as IPv4 does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tent_core.testing import wait_until
from tent_core.testing.namespaces import Side, joined, why_not

from .conftest import Start
from .support import only

pytestmark = pytest.mark.namespaces

TRACE = Path(__file__).parents[2] / "examples" / "traces" / "small.jsonl"
TIMEOUT_S = 50


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with joined() as made:
        yield made


def replay(side: Side, family: int, role: str, *arguments: str) -> subprocess.Popen[str]:
    """One role of a replay by tcp, in one namespace."""
    listen = f"{side.address(family)}:0"
    tent = [sys.executable, "-m", "tent_core.cli", "replay", "--role", role, "--listen", listen]
    options = ["--transport", "tcp", "--json", "--pool-size", "256MiB"]
    command = [*side.wrapper, *tent, *options, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("family", [4, 6])
def test_a_trace_is_replayed_by_tcp_between_two_namespaces(
    sides: tuple[Side, Side], family: int
) -> None:
    left, right = sides
    with replay(left, family, "decode") as decode, ExitStack() as stack:
        stack.callback(decode.kill)
        assert decode.stdout is not None
        peer = json.loads(decode.stdout.readline())["segment"]
        assert peer.startswith(f"{left.address(family)}:")
        with replay(right, family, "prefill", str(TRACE), "--peer", peer) as prefill:
            stack.callback(prefill.kill)
            report = json.loads(prefill.communicate(timeout=TIMEOUT_S)[0])
        received = json.loads(decode.communicate(timeout=TIMEOUT_S)[0])
    assert (prefill.returncode, decode.returncode) == (0, 0)
    assert (report["verified"], report["mismatches"]) == (True, 0)
    assert report["transports"] == {"tcp": report["bytes"]}
    assert (received["verified"], received["pieces"]) == (True, report["pieces"])
    assert report["pieces"] > 0


@pytest.mark.parametrize("family", [4, 6])
def test_everything_that_an_engine_does_works_between_two_namespaces(
    sides: tuple[Side, Side], start: Start, family: int
) -> None:
    here, there = (
        start(config(f"{side.address(family)}:0"), wrapper=side.wrapper) for side in sides
    )
    there.run("target = engine.register(np.zeros(1 << 20, np.uint8), name='target')")
    here.run("segment = engine.open_segment(name)", name=there.segment_name)
    here.run("noise = engine.register(np.random.default_rng(1).bytes(1 << 20), permission=1)")
    here.run("segment.write(noise, segment.buffer('target'))")
    assert there.run("target.array.tobytes()") == np.random.default_rng(1).bytes(1 << 20)
    here.run("back = engine.allocate(1 << 20)")
    here.run("batch = segment.read_many(back, [0, 512], segment.buffer('target'), [4096, 0], 512)")
    assert here.run("bool((back.array[:512] == noise.array[4096:4608]).all())")
    here.run("segment.notify('done', b'payload')")
    assert there.run("engine.next_notification(10).payload") == b"payload"
    there.run("target.unregister(timeout=5)")
    wait_until(lambda: here.run("len(segment.buffers())") == 0, 10, "the peer to be told")


def test_an_engine_that_listens_everywhere_is_reached_by_what_it_advertises(
    sides: tuple[Side, Side], start: Start
) -> None:
    left, right = sides
    control = {"control": {"listen": "[::]:0", "advertise": left.v4}}
    there = start(only("tcp", **control), wrapper=left.wrapper)
    here = start(config(f"{right.v4}:0"), wrapper=right.wrapper)
    assert there.segment_name.startswith(f"{left.v4}:")
    there.run("target = engine.allocate(4096, name='target')")
    here.run("segment = engine.open_segment(name)", name=there.segment_name)
    here.run("local = engine.register(np.full(4096, 9, np.uint8))")
    here.run("segment.write(local, segment.buffer('target'))")
    assert there.run("int(target.array.sum())") == 9 * 4096


def config(listen: str) -> dict[str, Any]:
    """Engines that only tcp joins, at this address."""
    return only("tcp", control={"listen": listen})
