"""Traces are read as published, and what is no trace is an error that names the line."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tent_core.replay.errors import TraceError
from tent_core.replay.trace import BLOCK_TOKENS, TraceRequest, parse_trace, read_trace

LINE = {"timestamp": 27, "input_length": 1000, "output_length": 52, "hash_ids": [46, 47]}


def lines(*objects: object) -> list[bytes]:
    return [json.dumps(o).encode() + b"\n" for o in objects]


def test_a_published_line_becomes_a_request() -> None:
    (request,) = parse_trace(lines(LINE))
    assert request == TraceRequest(27.0, 1000, 52, (46, 47))


def test_blank_lines_are_skipped_and_a_limit_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(lines(LINE, LINE, LINE)) + b"\n\n")
    assert len(read_trace(path)) == 3
    assert len(read_trace(path, 2)) == 2


def test_only_the_lines_that_are_asked_for_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(lines(LINE)) + b"broken\n")
    assert len(read_trace(path, 1)) == 1
    with pytest.raises(TraceError, match=r"trace\.jsonl:2: not a JSON object"):
        read_trace(path)


def test_a_file_without_requests_and_one_that_is_missing_are_errors(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(TraceError, match="has no request"):
        read_trace(empty)
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "absent.jsonl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_length": -1}, "input_length must be a number of tokens, found -1"),
        ({"input_length": True}, "input_length must be a number of tokens, found True"),
        ({"output_length": None}, "output_length must be a number of tokens, found nothing"),
        ({"timestamp": "soon"}, "timestamp must be a time in ms, found 'soon'"),
        ({"timestamp": float("nan")}, "timestamp must be a time in ms"),
        ({"hash_ids": [1, "2"]}, "hash_ids must be a list of integers"),
        ({"hash_ids": [1, 1 << 64]}, "hash_ids must be a list of integers"),
        ({"hash_ids": [1]}, "input_length 1000 is 2 blocks of 512 tokens, but hash_ids has 1"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        list(parse_trace(lines({**LINE, **change})))


def test_a_block_that_comes_twice_in_a_prompt_counts_once() -> None:
    (request,) = parse_trace(lines({**LINE, "hash_ids": [5, 5]}))
    assert request.hashes == (5,)


@given(st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=20), st.integers(1, BLOCK_TOKENS))
def test_every_well_formed_line_is_read_back(hashes: list[int], last: int) -> None:
    tokens = BLOCK_TOKENS * (len(hashes) - 1) + last if hashes else 0
    line = {**LINE, "input_length": tokens, "hash_ids": hashes}
    (request,) = parse_trace(lines(line))
    assert request.hashes == tuple(hashes)
    assert request.input_tokens == tokens


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
fields = st.sampled_from(["timestamp", "input_length", "output_length", "hash_ids"])


@given(st.binary(max_size=60) | st.dictionaries(fields, json_values).map(lambda d: lines(d)[0]))
def test_any_other_line_is_a_trace_error_and_nothing_else(line: bytes) -> None:
    with contextlib.suppress(TraceError):
        list(parse_trace([line]))
