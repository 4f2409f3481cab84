"""Messages survive being cut into notifications, and bytes that are none harm nobody."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tent_core.control.contract import NOTIFICATION_LIMIT, Notification
from tent_core.descriptor import PeerKey
from tent_core.errors import WaitTimeout
from tent_core.replay.errors import Refused, ReplayError
from tent_core.replay.messages import (
    NOTIFICATION,
    Assembler,
    Mailbox,
    Message,
    Stopped,
    decode,
    encode,
)

ANNA, BERT = PeerKey("anna:1", b"a"), PeerKey("bert:2", b"b")


def notes(message: Message, sender: PeerKey = ANNA) -> list[Notification]:
    return [Notification(sender, NOTIFICATION, payload, 0) for payload in encode(message)]


def mailbox(*arrived: Notification) -> Mailbox:
    waiting = list(arrived)

    def next_notification(timeout: float | None = None) -> Notification:
        if not waiting:
            time.sleep(min(timeout or 0, 0.01))
            raise WaitTimeout("nothing")
        return waiting.pop(0)

    return Mailbox(SimpleNamespace(next_notification=next_notification))


@given(st.text(max_size=9), st.integers(0, 20_000), st.integers(-(2**63), 2**63 - 1))
def test_a_message_comes_out_as_it_went_in(text: str, size: int, value: int) -> None:
    message = Message(
        "grant", {"text": text, "n": value}, {"a": np.full(size, value), "b": np.ones(3, bool)}
    )
    parts = encode(message)
    assert all(len(NOTIFICATION) + len(part) <= NOTIFICATION_LIMIT for part in parts)
    assembler = Assembler()
    *early, found = [assembler.add(part) for part in parts]
    assert not any(early)
    assert found is not None
    assert (found.kind, found.fields) == ("grant", {"text": text, "n": value})
    assert (found.arrays["a"] == value).all()
    assert found.arrays["a"].size == size
    assert found.arrays["b"].tolist() == [True] * 3


@given(st.binary(max_size=80))
def test_any_bytes_are_a_message_or_an_error_of_ours(body: bytes) -> None:
    for read in (decode, Assembler().add):
        with contextlib.suppress(ReplayError):
            read(body)


@given(st.data())
def test_a_damaged_message_is_a_message_or_an_error_of_ours(data: st.DataObject) -> None:
    (part,) = encode(Message("want", {"request": 1}, {"hashes": np.arange(4)}))
    at = data.draw(st.integers(0, len(part) - 1))
    damaged = part[:at] + bytes([data.draw(st.integers(0, 255))]) + part[at + 1 :]
    with contextlib.suppress(ReplayError):
        Assembler().add(damaged)


def test_parts_out_of_order_are_refused() -> None:
    _, second = encode(Message("want", {}, {"hashes": np.arange(9000)}))
    with pytest.raises(ReplayError, match="part 1 of 2 came where part 0 was due"):
        Assembler().add(second)


def test_parts_of_two_senders_do_not_mix() -> None:
    large = Message("want", {}, {"hashes": np.arange(9000)})
    first, second = notes(large)
    box = mailbox(first, *notes(Message("bye"), BERT), second)
    assert box.take(1, "anything")[0] == BERT
    sender, message = box.take(1, "anything")
    assert (sender, message.kind) == (ANNA, "want")


def test_other_notifications_and_other_senders_are_passed_over() -> None:
    box = mailbox(
        Notification(ANNA, "other", b"", 0), *notes(Message("bye"), BERT), *notes(Message("grant"))
    )
    assert box.expect("grant", ANNA, 1, "a grant").kind == "grant"


def test_a_refusal_reaches_who_waits_with_its_reason() -> None:
    box = mailbox(*notes(Message("refused", {"reason": "the pool is too small"})))
    with pytest.raises(Refused, match=r"^the pool is too small$"):
        box.expect("grant", ANNA, 1, "a grant")


def test_silence_ends_in_an_error_that_says_what_was_awaited() -> None:
    with pytest.raises(ReplayError, match=r"waited .* s for a grant, and nothing came"):
        mailbox().expect("grant", ANNA, 0.05, "a grant")


def test_bytes_that_are_no_message_do_not_stop_the_mailbox() -> None:
    box = mailbox(Notification(BERT, NOTIFICATION, b"junk-junk-junk", 0), *notes(Message("bye")))
    assert box.take(1, "anything")[1].kind == "malformed"
    assert box.take(1, "anything")[1].kind == "bye"


def test_a_wait_without_a_bound_ends_when_it_is_told_to() -> None:
    answers = iter([True, True, False])
    box = mailbox()
    box._alive = lambda: next(answers)
    with pytest.raises(Stopped):
        box.take(None, "a prefill process")


def test_a_message_too_large_to_send_is_refused_before_it_is_sent() -> None:
    huge: Any = np.broadcast_to(np.int64(0), (40_000_000,))
    with pytest.raises(ReplayError, match="too large to send"):
        encode(Message("want", {}, {"hashes": huge}))
