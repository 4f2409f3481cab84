"""`tent replay` over real engines and transports."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ("--bytes-per-token", "256", "--pool-size", "1MiB")  # blocks of 128 KiB
BOUND_S = 60


@pytest.mark.parametrize("memory", ["allocated", "registered"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_trace_is_replayed_and_every_byte_is_right(
    run: Any, trace: Path, transport: str, memory: str
) -> None:
    result = run("replay", trace, *TINY, "--transport", transport, "--memory", memory, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert list(document) == [
        "requests", "blocks_sent", "blocks_reused", "pieces", "bytes", "seconds", "GBps",
        "latency_ms", "transports", "failovers", "verified", "mismatches",
    ]  # fmt: skip
    assert document["requests"] == 6
    # Eight blocks fit. The ninth, of the last request, makes one go.
    assert (document["blocks_sent"], document["blocks_reused"]) == (9, 9)
    assert document["bytes"] == 9 * (128 << 10)
    assert document["transports"] == {transport: document["bytes"]}
    assert document["failovers"] == 0
    assert document["verified"] is True
    assert document["mismatches"] == 0


def test_a_policy_by_size_sends_small_pieces_one_way_and_large_ones_another(
    run: Any, trace: Path
) -> None:
    mixed = ("--config", EXAMPLES / "mixed.yaml", "--json", "--pool-size", "512MiB")
    small = run("replay", trace, *mixed, "--requests", "1")
    large = run("replay", trace, *mixed, "--requests", "1", "--bytes-per-token", "256KiB")
    assert list(json.loads(small.stdout)["transports"]) == ["tcp"]
    assert list(json.loads(large.stdout)["transports"]) == ["shm"]


def test_people_get_a_summary(run: Any, trace: Path) -> None:
    result = run("replay", trace, *TINY)
    assert result.exit_code == 0, result.stderr
    for words in ("6 of trace.jsonl", "9, and 9 held already", "verified", "yes", "GB/s", "p99"):
        assert words in result.stdout


def test_only_the_first_requests_are_replayed(run: Any, trace: Path) -> None:
    result = run("replay", trace, *TINY, "--requests", "2", "--json")
    assert json.loads(result.stdout)["requests"] == 2


def test_a_request_larger_than_the_pool_says_which_pool_it_needs(run: Any, trace: Path) -> None:
    result = run("replay", trace, "--pool-size", "20MiB", "--json")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "request 5 of the trace has 5 blocks of 6MiB (Qwen2.5-0.5B)" in result.stderr
    assert "it needs --pool-size 30MiB or more" in result.stderr


def test_more_memory_than_there_is_is_refused_before_anything_starts(run: Any, trace: Path) -> None:
    result = run("replay", trace, "--bytes-per-token", "64GiB", "--pool-size", "1000TiB")
    assert result.exit_code == 1
    assert "need more memory than the" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "which TRACE?"),
        (("TRACE", "--model", "Quen2.5-0.5B"), "Did you mean Qwen2.5-0.5B?"),
        (("TRACE", "--model", "Qwen2.5-7B", "--bytes-per-token", "2"), "say the same thing"),
        (("TRACE", "--role", "prefill"), "needs --peer"),
        (("TRACE", "--peer", "127.0.0.1:1"), "goes with --role prefill"),
    ],
)
def test_wrong_usage_says_what_to_give(run: Any, trace: Path, args: Any, message: str) -> None:
    result = run("replay", *(trace if word == "TRACE" else word for word in args))
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_error_of_a_process_reaches_the_user(run: Any, trace: Path) -> None:
    result = run("replay", trace, *TINY, "--transport", "mock")
    assert result.exit_code == 1
    assert "tent: prefill: " in result.stderr
    assert "reaches only engines of the same process" in result.stderr


def test_the_table_of_models_is_shown(run: Any) -> None:
    assert "Qwen2.5-0.5B" in run("replay", "--model", "list").stdout
    rows = json.loads(run("replay", "--model", "list", "--json").stdout)
    assert {"model": "Llama-3.1-8B", "bytes_per_token": 128 << 10}.items() <= rows[7].items()


def test_the_roles_run_apart(start: Any, run: Any, trace: Path) -> None:
    decode = start("replay", "--role", "decode", "--pool-size", "1MiB", "--json")
    peer = json.loads(decode.stdout.readline())["segment"]
    prefill = run("replay", trace, *TINY, "--role", "prefill", "--peer", peer, "--json")
    assert prefill.exit_code == 0, prefill.stderr
    sent = json.loads(prefill.stdout)
    out, errors = decode.communicate(timeout=BOUND_S)
    assert decode.returncode == 0, errors
    received = json.loads(out)
    assert received["verified"]
    assert (received["pieces"], received["bytes"]) == (sent["pieces"], sent["bytes"])


def test_decode_stops_when_it_is_told_to(start: Any) -> None:
    decode = start("replay", "--role", "decode", "--pool-size", "1MiB")
    assert "decode is ready" in decode.stdout.readline()
    decode.send_signal(signal.SIGTERM)
    _, errors = decode.communicate(timeout=BOUND_S)
    assert decode.returncode == 1
    assert "stopped before the replay was over" in errors


def test_nobody_at_the_peers_address_is_an_error(run: Any, trace: Path) -> None:
    result = run(
        "replay", trace, *TINY, "--role", "prefill", "--peer", "127.0.0.1:1", "--timeout", "1s"
    )
    assert result.exit_code == 1
    assert "127.0.0.1:1" in result.stderr


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in found.split()]


def role_processes(pid: int) -> list[int]:
    """The roles of a replay, in the order in which they were started."""
    lines = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children_of(pid)}
    return sorted(child for child, line in lines.items() if b"spawn_main" in line)


@pytest.mark.parametrize(("role", "name"), [(0, "decode"), (1, "prefill")])
def test_a_role_that_is_killed_ends_the_replay_with_an_error(
    start: Any, role: int, name: str
) -> None:
    # The trace is long enough that both roles are still there when one is killed.
    trace = EXAMPLES / "traces" / "small.jsonl"
    replay = start("replay", trace, "--model", "Qwen2.5-7B", "--pool-size", "1GiB")
    end = time.monotonic() + BOUND_S
    while len(role_processes(replay.pid)) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(role_processes(replay.pid)[role], signal.SIGKILL)
    _, errors = replay.communicate(timeout=BOUND_S)
    assert replay.returncode == 1
    assert errors.splitlines()[-1].startswith("tent: "), errors
    assert name in errors or "departed" in errors


def test_the_trace_that_ships_can_be_read() -> None:
    from tent_core.replay.trace import read_trace

    requests = read_trace(EXAMPLES / "traces" / "small.jsonl")
    blocks = [block for request in requests for block in request.hashes]
    assert len(requests) >= 24
    assert len(set(blocks)) < len(blocks) / 2  # prompts share what they begin with
