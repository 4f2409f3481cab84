"""The wire format: what one side packs the other parses, and nothing else is taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tent_tcp.protocol import (
    ANSWER_SIZE,
    HELLO_SIZE,
    INCARNATION_SIZE,
    MAX_NAME,
    MAX_REQUESTS,
    MAX_TEXT,
    MAX_TOTAL,
    READ,
    REQUEST_SIZE,
    SECRET_SIZE,
    STREAM_SIZE,
    VERSION,
    WRITE,
    Answer,
    Attribute,
    Malformed,
    Request,
    Verdict,
    build_request,
    check_lengths,
    pack_answer,
    pack_fence,
    pack_hello,
    parse_answer,
    parse_fence,
    parse_hello,
    parse_request,
    request_words,
    secrets_match,
)

words = st.integers(0, 2**64 - 1)
lengths = st.integers(1, MAX_TOTAL)
secrets = st.binary(min_size=SECRET_SIZE, max_size=SECRET_SIZE)
streams = st.binary(min_size=STREAM_SIZE, max_size=STREAM_SIZE)
incarnations = st.binary(min_size=INCARNATION_SIZE, max_size=INCARNATION_SIZE)
opcodes = st.sampled_from([READ, WRITE])


@given(secrets, st.text(min_size=1, max_size=100), incarnations, st.booleans(), streams)
def test_a_hello_says_who_it_is(
    secret: bytes, name: str, incarnation: bytes, same: bool, stream: bytes
) -> None:
    packed = pack_hello(secret, name, incarnation, same, stream)
    hello = parse_hello(packed[:HELLO_SIZE])
    assert hello == (secret, incarnation, same, len(name.encode()))
    assert packed[HELLO_SIZE:-STREAM_SIZE].decode() == name
    assert packed[-STREAM_SIZE:] == stream


@given(streams, st.floats(0, 60))
def test_a_fence_says_which_stream_and_for_how_long(stream: bytes, seconds: float) -> None:
    found, within = parse_fence(pack_fence(stream, seconds))
    assert found == stream
    assert within == pytest.approx(seconds, abs=1e-3)


@pytest.mark.parametrize("name", ["", "x" * (MAX_NAME + 1)])
def test_a_name_that_no_receiver_takes_is_not_packed(name: str) -> None:
    with pytest.raises(ValueError):
        pack_hello(bytes(SECRET_SIZE), name, bytes(INCARNATION_SIZE), False, bytes(STREAM_SIZE))


@given(opcodes, words, words, words, words, lengths)
def test_a_request_of_one_block_comes_back(
    opcode: int, number: int, buffer: int, generation: int, address: int, length: int
) -> None:
    row = (buffer, generation, address, length)
    packed = np.array(request_words(opcode, number, row), np.uint64).tobytes()
    assert len(packed) == REQUEST_SIZE
    assert parse_request(packed) == Request(opcode, 1, number, length, row)


@given(
    opcodes, st.lists(st.tuples(st.integers(0, 2**31 - 1), words, lengths), min_size=2, max_size=9)
)
def test_a_request_of_many_blocks_comes_back(
    opcode: int, blocks: list[tuple[int, int, int]]
) -> None:
    ids = np.array([b for b, _, _ in blocks], np.int32)
    remote = np.array([(a, n) for _, a, n in blocks], np.uint64)
    total = min(MAX_TOTAL, sum(n for _, _, n in blocks))
    message = build_request(opcode, 5, total, ids, 2**63, remote)
    head = parse_request(message.tobytes()[:REQUEST_SIZE])
    assert head == Request(opcode, len(blocks), 5, total, (blocks[0][0], 2**63, *blocks[0][1:]))
    assert message[1:].tolist() == [[b, 2**63, a, n] for b, a, n in blocks]


@given(
    st.sampled_from(Verdict),
    words,
    st.integers(0, MAX_TOTAL),
    st.integers(0, MAX_REQUESTS - 1),
    st.text(max_size=600),
)
def test_an_answer_comes_back_with_its_explanation_cut(
    verdict: Verdict, number: int, moved: int, position: int, text: str
) -> None:
    packed = pack_answer(verdict, number, moved=moved, position=position, text=text)
    explanation = text.encode()[:MAX_TEXT]
    if verdict is Verdict.OK and explanation:
        with pytest.raises(Malformed):
            parse_answer(packed[:ANSWER_SIZE])
        return
    answer = Answer(verdict, position, number, moved, len(explanation))
    assert parse_answer(packed[:ANSWER_SIZE]) == answer
    assert packed[ANSWER_SIZE:] == explanation


@given(secrets, st.text("0123456789abcdef.:[]", min_size=1, max_size=60))
def test_an_attribute_comes_back(secret: bytes, address: str) -> None:
    assert Attribute.decode(Attribute(secret, address).encode()) == (secret, address)


@given(st.binary(max_size=400))
def test_any_other_bytes_are_malformed_and_nothing_worse(data: bytes) -> None:
    def attempt(parse: object, size: int) -> None:
        try:
            parse(data[:size].ljust(size, b"\0"))  # type: ignore[operator]
        except Malformed:
            return

    for parse, size in (
        (parse_hello, HELLO_SIZE),
        (parse_request, REQUEST_SIZE),
        (parse_answer, ANSWER_SIZE),
    ):
        attempt(parse, size)
    attempt(Attribute.decode, len(data))
    attempt(parse_fence, len(data))
    attempt(parse_fence, len(pack_fence(bytes(STREAM_SIZE), 1)))


@given(opcodes, st.integers(0, REQUEST_SIZE - 1), st.integers(1, 255))
def test_a_changed_request_is_malformed_or_another_request(
    opcode: int, position: int, change: int
) -> None:
    packed = bytearray(np.array(request_words(opcode, 1, (3, 4, 5, 6)), np.uint64).tobytes())
    packed[position] ^= change
    try:
        request = parse_request(packed)
    except Malformed:
        return
    assert request != Request(opcode, 1, 1, 6, (3, 4, 5, 6))
    assert 0 < request.total <= MAX_TOTAL
    assert 0 < request.blocks <= MAX_REQUESTS


@pytest.mark.parametrize(
    ("columns", "total"),
    [
        ([0, 5], 5),
        ([2**64 - 1, 2], 1),
        ([2**63, 2**63], 2**32),
        ([2**53, 1], 2**53),
        ([1, 2], 4),
        ([1, 2], 2),
    ],
)
def test_lengths_that_are_empty_or_not_the_total_are_malformed(
    columns: list[int], total: int
) -> None:
    with pytest.raises(Malformed):
        check_lengths(np.array(columns, np.uint64), total)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20), st.integers(1, MAX_TOTAL))
def test_lengths_pass_only_if_their_true_sum_is_the_total(columns: list[int], total: int) -> None:
    good = sum(columns) == total and 0 not in columns
    try:
        check_lengths(np.array(columns, np.uint64), total)
    except Malformed:
        assert not good
    else:
        assert good


def test_secrets_match_only_when_equal() -> None:
    assert secrets_match(b"a" * SECRET_SIZE, b"a" * SECRET_SIZE)
    assert not secrets_match(b"a" * SECRET_SIZE, b"a" * (SECRET_SIZE - 1) + b"b")


def test_an_attribute_of_a_newer_version_is_named() -> None:
    with pytest.raises(Malformed, match=f"version {VERSION + 1}"):
        Attribute.decode(bytes([VERSION + 1]) + bytes(60))
