"""Reads request traces: one JSON object a line, as published with the Mooncake paper (FAST'25).

`timestamp` is in ms since the trace began, `input_length` and `output_length` are in tokens, and `hash_ids`
has one integer per 512-token block of the prompt: equal ids are the same KV-cache block.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tent_core.replay.errors import TraceError

BLOCK_TOKENS = 512
"""Tokens in one block of `hash_ids`."""

_LARGEST_HASH = (1 << 64) - 1
_LARGEST_LENGTH = 1 << 40


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `hashes` are its blocks in the order of the prompt, each once."""

    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    hashes: tuple[int, ...]


def read_trace(path: str | Path, limit: int | None = None) -> tuple[TraceRequest, ...]:
    """The first `limit` requests of a trace file (all without a limit). Raises TraceError."""
    try:
        with open(path, "rb") as lines:
            requests = tuple(islice(parse_trace(lines, str(path)), limit))
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error
    if not requests:
        raise TraceError(f"{path}: the trace has no request")
    return requests


def parse_trace(lines: Iterable[bytes], source: str = "trace") -> Iterator[TraceRequest]:
    """The requests of `lines`; blank lines are skipped. Raises TraceError naming `source` and the line."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _request(line, f"{source}:{number}")


def _request(line: bytes, where: str) -> TraceRequest:
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: not a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise TraceError(f"{where}: found {type(found).__name__}, a request is a JSON object")
    tokens = _integer(found, "input_length", where)
    hashes = found.get("hash_ids")
    if not isinstance(hashes, list) or not all(_is_integer(h, _LARGEST_HASH) for h in hashes):
        raise TraceError(f"{where}: hash_ids must be a list of integers from 0 to 2^64 - 1")
    blocks = -(-tokens // BLOCK_TOKENS)
    if len(hashes) != blocks:
        raise TraceError(
            f"{where}: input_length {tokens} is {blocks} blocks of {BLOCK_TOKENS} tokens, "
            f"but hash_ids has {len(hashes)}"
        )
    return TraceRequest(
        timestamp_ms=_number(found, "timestamp", where),
        input_tokens=tokens,
        output_tokens=_integer(found, "output_length", where),
        hashes=tuple(dict.fromkeys(hashes)),
    )


def _is_integer(value: object, largest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= largest


def _integer(found: dict[str, Any], key: str, where: str) -> int:
    value = found.get(key)
    if not _is_integer(value, _LARGEST_LENGTH):
        raise TraceError(f"{where}: {key} must be a number of tokens, found {_shown(value)}")
    assert isinstance(value, int)
    return value


def _number(found: dict[str, Any], key: str, where: str) -> float:
    value = found.get(key)
    # `0 <=` is false for NaN, which json.loads accepts.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e300:
        raise TraceError(f"{where}: {key} must be a time in ms, found {_shown(value)}")
    return float(value)


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
