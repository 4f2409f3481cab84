"""Prefill and decode together: what is sent, what is not, and what is found wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from tent_core.replay.decode import Decode, Received
from tent_core.replay.errors import PoolTooSmall, Refused, ReplayError
from tent_core.replay.geometry import Geometry
from tent_core.replay.messages import Mailbox, Message, Stopped, hashes_of, send
from tent_core.replay.prefill import Prefill
from tent_core.replay.report import Report
from tent_core.replay.trace import TraceRequest

GEOMETRY = Geometry("tiny", layers=2, token_bytes=4)
TIMEOUT = 5.0


def request(*hashes: int) -> TraceRequest:
    return TraceRequest(0, 512 * len(hashes), 1, hashes)


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def roles(engines: Any, blocks: int, timeout: float = TIMEOUT) -> tuple[Prefill, Decode]:
    prefill, decode = engines
    here = prefill.allocate(8 * GEOMETRY.block_bytes, name="pool")
    there = decode.allocate(blocks * GEOMETRY.block_bytes, name="pool")
    return (
        Prefill(prefill, here, GEOMETRY, seed=1, timeout=timeout),
        Decode(decode, there, seed=1, timeout=timeout),
    )


def replayed(engines: Any, blocks: int, *requests: TraceRequest) -> tuple[Report, Received]:
    prefill, decode = roles(engines, blocks)
    serving = in_thread(decode.serve)
    report = prefill.run("decode:2", requests)
    return report, serving.result(TIMEOUT)


def test_blocks_that_the_receiver_holds_are_not_sent_again(engines: Any) -> None:
    report, received = replayed(engines, 8, request(1, 2), request(1, 2, 3), request(3))
    assert (report.requests, report.blocks_sent, report.blocks_reused) == (3, 3, 3)
    assert report.pieces == 3 * GEOMETRY.pieces_per_block
    assert report.bytes == 3 * GEOMETRY.block_bytes
    assert report.transports == {"fake": report.bytes}
    assert report.verified
    assert report.mismatches == 0
    assert received == Received(3, 3, 3, report.pieces, report.bytes, 0, "")


def test_the_failovers_of_this_replay_are_counted(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, _ = engines
    prefill.failovers = 7  # before it

    def sent(here: Any, there: Any) -> None:
        prefill.failovers += 2

    monkeypatch.setattr(prefill, "sent", sent)
    report, _ = replayed(engines, 8, request(1), request(2), request(1))
    assert report.failovers == 4


def test_a_block_that_made_room_is_sent_again_when_it_is_needed(engines: Any) -> None:
    report, _ = replayed(engines, 2, request(1, 2), request(3), request(2), request(1))
    # 3 evicts 1, and 1 then evicts 3.
    assert (report.blocks_sent, report.blocks_reused) == (4, 1)
    assert report.verified


def test_requests_beyond_all_pools_are_verified_through_many_evictions(engines: Any) -> None:
    random = np.random.default_rng(4)
    requests = [request(*random.permutation(30)[:5].tolist()) for _ in range(60)]
    report, _ = replayed(engines, 7, *requests)
    assert report.requests == 60
    assert report.verified


def test_one_byte_that_did_not_arrive_is_a_mismatch(engines: Any) -> None:
    def flip(memory: Any, offsets: Any, length: int) -> None:
        memory[int(offsets[5]) + length - 1] ^= 1

    engines[1].spoil = flip
    report, received = replayed(engines, 8, request(7))
    assert not report.verified
    assert report.mismatches == received.mismatches == 1
    assert "block 7" in report.first_mismatch


def test_a_write_that_never_happened_is_found_though_the_block_lay_there_before(
    engines: Any,
) -> None:
    prefill, decode = roles(engines, 1)
    for deaf, mismatches in ((False, 0), (True, GEOMETRY.pieces_per_block)):
        engines[1].deaf = deaf
        serving = in_thread(decode.serve)
        assert prefill.run("decode:2", (request(7),)).mismatches == mismatches
        serving.result(TIMEOUT)


def test_pieces_do_not_lie_where_they_lay_at_the_sender(engines: Any) -> None:
    moved: list[Any] = []
    engines[0].sent = lambda here, there: moved.append((here, there))
    replayed(engines, 8, request(7))
    ((here, there),) = moved
    assert (here != there).mean() > 0.8


def test_a_late_write_to_a_block_that_is_reused_is_found(engines: Any) -> None:
    def corrupt_the_rest(memory: Any, offsets: Any, length: int) -> None:
        written = np.zeros(len(memory), bool)
        for offset in offsets.tolist():
            written[offset : offset + length] = True
        memory[~written] ^= 255

    engines[1].spoil = corrupt_the_rest
    report, _ = replayed(engines, 8, request(7), request(7, 8))
    assert report.mismatches == GEOMETRY.pieces_per_block


def test_a_request_larger_than_the_receivers_pool_says_which_pool_would_do(engines: Any) -> None:
    prefill, decode = roles(engines, 2)
    serving = in_thread(decode.serve)
    with pytest.raises(
        PoolTooSmall, match=r"request 2 of the trace has 3 blocks .* --pool-size 1MiB"
    ):
        prefill.run("decode:2", (request(1), request(1, 2, 3)))
    with pytest.raises(ReplayError, match="request 2 of the trace has 3 blocks"):
        serving.result(TIMEOUT)


def test_an_error_at_the_receiver_reaches_the_sender(engines: Any) -> None:
    prefill, decode = roles(engines, 4)
    engines[1].buffers["pool"].array = np.zeros(10, np.uint8)
    serving = in_thread(decode.serve)
    with pytest.raises(ReplayError, match="a pool of 10B holds no block"):
        prefill.run("decode:2", (request(1),))
    with pytest.raises(PoolTooSmall):
        serving.result(TIMEOUT)


def test_an_error_while_sending_reaches_the_receiver(engines: Any) -> None:
    def broken(*_: Any) -> None:
        raise ReplayError("the cable is cut")

    engines[1].spoil = broken
    prefill, decode = roles(engines, 4)
    serving = in_thread(decode.serve)
    with pytest.raises(ReplayError, match="the cable is cut"):
        prefill.run("decode:2", (request(1),))
    with pytest.raises(Refused, match=r"^the cable is cut$"):
        serving.result(TIMEOUT)


def test_a_receiver_that_is_silent_is_an_error_within_the_timeout(engines: Any) -> None:
    prefill, _ = roles(engines, 4, timeout=0.1)
    with pytest.raises(ReplayError, match="is the other side still running"):
        prefill.run("decode:2", (request(1),))


def test_a_receiver_that_is_told_to_stop_stops(engines: Any) -> None:
    _, decode = roles(engines, 4)
    decode._mailbox._alive = lambda: False
    with pytest.raises(Stopped):
        decode.serve()


def test_progress_is_told_after_every_request(engines: Any) -> None:
    prefill, decode = roles(engines, 4)
    serving = in_thread(decode.serve)
    told: list[int] = []
    prefill.run("decode:2", (request(1), request(2)), lambda tally: told.append(tally.requests))
    serving.result(TIMEOUT)
    assert told == [1, 2]


def test_the_document_has_the_promised_keys(engines: Any) -> None:
    report, _ = replayed(engines, 4, request(1), request(1))
    document = report.as_json()
    assert list(document) == [
        "requests", "blocks_sent", "blocks_reused", "pieces", "bytes", "seconds", "GBps",
        "latency_ms", "transports", "failovers", "verified", "mismatches",
    ]  # fmt: skip
    assert list(document["latency_ms"]) == ["p50", "p99"]
    assert document["seconds"] > 0


def test_a_request_larger_than_the_senders_own_pool_says_so_too(engines: Any) -> None:
    prefill, decode = roles(engines, 20)
    serving = in_thread(decode.serve)
    with pytest.raises(PoolTooSmall, match="request 1 of the trace has 9 blocks"):
        prefill.run("decode:2", (request(*range(9)),))
    with pytest.raises(Refused):
        serving.result(TIMEOUT)


HELLO = {"version": 1, "model": "tiny", "layers": 2, "token_bytes": 4, "parts": 2}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("hello", {**HELLO, "version": 2}), "install the same version of tent-core"),
        (Message("hello", {**HELLO, "layers": None}), "layers is None"),
        (Message("hello", {**HELLO, "parts": 3}), "a geometry that cannot be"),
        (Message("want"), "without a column hashes"),
        (Message("want", arrays={"hashes": np.arange(3)}), "without a column hashes of uint64"),
        (Message("want", arrays={"hashes": hashes_of([1, 1])}), "names a block twice"),
        (Message("want", arrays={"hashes": hashes_of(range(9))}), "a request has 9 blocks"),
        (Message("grant"), "expected the next request, found a message 'grant'"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(
    engines: Any, message: Message, reason: str
) -> None:
    _, decode = roles(engines, 4)
    serving = in_thread(decode.serve)
    with engines[0].open_segment("decode:2") as segment:
        if message.kind != "hello":
            send(segment, Message("hello", HELLO), TIMEOUT)
        send(segment, message, TIMEOUT)
    box = Mailbox(engines[0])
    answers = [box.take(TIMEOUT, "an answer")[1] for _ in range(1 + (message.kind != "hello"))]
    assert answers[-1].kind == "refused"
    assert reason in answers[-1].fields["reason"]
    with pytest.raises(ReplayError):
        serving.result(TIMEOUT)


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"fresh": np.ones(1, bool), "pages": np.arange(31)},
        {"fresh": np.ones(2, bool), "pages": np.arange(64)},
        {"fresh": np.ones(1, bool), "pages": np.arange(1000, 1032)},
        {"fresh": np.ones(1, bool), "pages": np.arange(-1, 31)},
    ],
)
def test_a_grant_that_does_not_fit_is_an_error_and_nothing_is_written(
    engines: Any, arrays: Any
) -> None:
    prefill, _ = roles(engines, 4)
    engines[0].sent = lambda here, there: pytest.fail("something was written")
    running = in_thread(lambda: prefill.run("decode:2", (request(7),)))
    with engines[1].open_segment("prefill:1") as segment:
        send(segment, Message("welcome", {"pages": 128, "buffer": "pool"}), TIMEOUT)
        send(segment, Message("grant", arrays=arrays), TIMEOUT)
    with pytest.raises(ReplayError, match="grant"):
        running.result(TIMEOUT)
