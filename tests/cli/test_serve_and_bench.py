"""`tent serve` and `tent bench` over real engines and transports."""

from __future__ import annotations

import json
import signal
from typing import Any

import numpy as np
import pytest

import tent_core
from tent_core.bench import content
from tent_core.bench.cases import CASES, SEED, SPAN, Case, parse_case, works
from tent_core.errors import TransferFailed, UsageError
from tent_core.types import Opcode

BOUND_S = 60
QUICK = ("--seconds", "0", "--json")
KEYS = ["peer", "op", "block", "batch", "p50_us", "GBps", "us_per_block", "transport", "memory"]


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("memory", ["allocated", "registered"])
def test_each_case_is_measured_with_each_operation(run: Any, transport: str, memory: str) -> None:
    cases = ("--case", "4096x1", "--case", "4KiBx20")
    result = run("bench", *QUICK, *cases, "--transport", transport, "--memory", memory)
    assert result.exit_code == 0, result.stderr
    found = lines(result.stdout)
    assert [(row["op"], row["block"], row["batch"]) for row in found] == [
        ("write", 4096, 1), ("write", 4096, 20), ("read", 4096, 1), ("read", 4096, 20),
    ]  # fmt: skip
    for row in found:
        assert list(row) == KEYS
        assert (row["peer"], row["transport"], row["memory"]) == ("tent", transport, memory)
        assert row["p50_us"] > 0


def test_busy_processes_and_several_threads_can_be_measured(run: Any) -> None:
    result = run(
        "bench", *QUICK, "--case", "4KiBx3", "--op", "write", "--busy", "target", "--threads", "2"
    )
    assert result.exit_code == 0, result.stderr
    (row,) = lines(result.stdout)
    assert row["threads"] == 2


def test_people_get_a_line_for_each_case(run: Any) -> None:
    result = run("bench", "--seconds", "0", "--case", "4KiBx3", "--op", "read")
    assert result.exit_code == 0, result.stderr
    head, row = result.stdout.splitlines()
    assert "us a block" in head
    assert row.startswith("read ")
    assert "3 x 4KiB" in row


@pytest.mark.parametrize("case", ["4096", "x", "4096x0", "0x4", "4 kilo x 2", "4096xmany"])
def test_what_is_no_case_is_refused(run: Any, case: str) -> None:
    result = run("bench", *QUICK, "--case", case)
    assert result.exit_code == 1
    assert f"{case!r} is no case" in result.stderr


def test_a_case_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="more than the 256MiB on either side"):
        list(works((Opcode.WRITE,), (parse_case("1MiBx257"),), SPAN, SEED))


def test_offsets_are_those_of_the_peers_benchmark() -> None:
    random = np.random.default_rng(7)
    for work in works((Opcode.WRITE, Opcode.READ), CASES, SPAN, SEED):
        block, batch = work.case.block, work.case.batch
        slots = SPAN // block
        assert work.local.tolist() == (random.permutation(slots)[:batch] * block).tolist()
        assert work.remote.tolist() == (random.permutation(slots)[:batch] * block).tolist()


def test_blocks_of_a_batch_and_of_two_rounds_differ() -> None:
    memory = np.zeros(64 * 100, np.uint8)
    offsets = np.arange(100, dtype=np.uint64)[::-1] * np.uint64(64)
    content.fill(memory, offsets, 64, 1)
    assert content.wrong(memory, offsets, 64, 1) == 0
    assert content.wrong(memory, offsets, 64, 2) == 100
    assert len({bytes(row) for row in memory.reshape(100, 64)}) == 100
    memory[70] ^= 1
    assert content.wrong(memory, offsets, 64, 1) == 1


class Liar:
    """A segment that says it has moved what it has not."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


def test_bytes_that_did_not_arrive_end_the_measurement() -> None:
    from types import SimpleNamespace

    from tent_core.bench.cases import Memory
    from tent_core.bench.measure import Bench

    local = SimpleNamespace(array=np.zeros(1 << 16, np.uint8))
    there = np.zeros(1 << 16, np.uint8)
    target = SimpleNamespace(
        wrong=lambda work, key: content.wrong(there, work.remote, work.case.block, key)
    )
    bench: Any = Bench
    lying = bench(Liar(), local, None, target, Memory.ALLOCATED, 1 << 16, 0.0)
    with pytest.raises(
        TransferFailed, match="was COMPLETED, but 3 blocks do not hold what was sent"
    ):
        list(lying.run((Opcode.WRITE,), (Case(4096, 3),)))


def test_a_served_buffer_can_be_used_and_told_until_it_is_stopped(start: Any, run: Any) -> None:
    serve = start("serve", "--size", "2MiB", "--name", "pool", "--json")
    served = json.loads(serve.stdout.readline())
    assert (served["buffer"], served["size"]) == ("pool", 2 << 20)
    assert {"shm", "tcp"} <= set(served["transports"])

    peer = ("--peer", served["segment"], "--buffer", "pool")
    result = run("bench", *QUICK, *peer, "--case", "4KiBx20", "--case", "64KiBx1")
    assert result.exit_code == 0, result.stderr
    assert len(lines(result.stdout)) == 4

    with tent_core.Engine({"log": {"level": "error"}}) as engine:
        with engine.open_segment(served["segment"]) as segment:
            segment.notify("hello", b"1234")
        told = json.loads(serve.stdout.readline())
    assert told == {"sender": engine.segment_name, "name": "hello", "bytes": 4}

    serve.send_signal(signal.SIGTERM)
    _, errors = serve.communicate(timeout=BOUND_S)
    assert serve.returncode == 0, errors


def test_what_may_only_be_read_is_not_written(start: Any, run: Any) -> None:
    serve = start(
        "serve", "--size", "1MiB", "--permission", "global_read_only", "--memory", "registered"
    )
    name = serve.stdout.readline().split()[-1]
    result = run("bench", *QUICK, "--peer", name, "--case", "4KiBx1", "--op", "write")
    assert result.exit_code == 1
    assert "GLOBAL_READ_ONLY" in result.stderr
