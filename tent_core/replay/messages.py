"""What prefill and decode say to each other: small typed messages with arrays, carried by notifications.

    hello    -> welcome    the geometry; how many pages the receiver's pool has
    want     -> grant      the blocks of a request; which are missing, and the pages that await them
    complete -> checked    every missing block has been written; what the receiver found
    bye                    nothing more will come
    refused                the answer to anything that cannot be done, with the reason

A notification carries up to 64 KiB, so a message travels in parts, and notifications keep their order.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tent_core.descriptor import PeerKey
from tent_core.errors import WaitTimeout
from tent_core.replay.errors import Refused, ReplayError

NOTIFICATION = "tent.replay"
VERSION = 1
MALFORMED = "malformed"

_PART = struct.Struct("<II")  # index of the part, parts in all
_HEAD = struct.Struct("<I")  # bytes of JSON that follow
_PART_BYTES = 60_000
_MOST_PARTS = 4096
_POLL_S = 0.25
_DTYPES = frozenset({"<i8", "<u8", "|b1"})


@dataclass(frozen=True, slots=True)
class Message:
    """A kind, plain fields, and one-dimensional arrays of int64, uint64 or bool."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def number(self, name: str) -> int:
        """A field that is a whole number of at least 0. Raises ReplayError."""
        value = self.fields.get(name)
        if not isinstance(value, int) or not 0 <= value < 1 << 63:
            raise ReplayError(f"a message {self.kind!r} in which {name} is {value!r}")
        return value

    def column(self, name: str, dtype: type[np.generic]) -> NDArray[Any]:
        """An array of that type. Raises ReplayError."""
        found = self.arrays.get(name)
        if found is None or found.dtype != np.dtype(dtype):
            raise ReplayError(
                f"a message {self.kind!r} without a column {name} of {dtype.__name__}"
            )
        return found


def encode(message: Message) -> list[bytes]:
    """The payloads that carry a message, at least one, in the order in which they must be sent."""
    arrays = {name: np.ascontiguousarray(a) for name, a in message.arrays.items()}
    head = json.dumps(
        {
            "kind": message.kind,
            "fields": dict(message.fields),
            "arrays": [(name, a.dtype.str, a.size) for name, a in arrays.items()],
        }
    ).encode()
    body = b"".join([_HEAD.pack(len(head)), head, *(a.tobytes() for a in arrays.values())])
    chunks = [body[i : i + _PART_BYTES] for i in range(0, len(body), _PART_BYTES)]
    if len(chunks) > _MOST_PARTS:
        raise ReplayError(f"a {message.kind!r} message of {len(body)} bytes is too large to send")
    return [_PART.pack(i, len(chunks)) + chunk for i, chunk in enumerate(chunks)]


def decode(body: bytes) -> Message:
    """The message whose parts, joined, are `body`. Raises ReplayError for bytes that are none."""
    try:
        (size,) = _HEAD.unpack_from(body)
        head = json.loads(body[_HEAD.size : _HEAD.size + size])
        arrays, at = {}, _HEAD.size + size
        for name, dtype, count in head["arrays"]:
            if dtype not in _DTYPES or not 0 <= count <= len(body):
                raise ValueError(f"an array of {count} {dtype}")
            arrays[str(name)] = np.frombuffer(body, np.dtype(dtype), count, at)
            at += arrays[str(name)].nbytes
        return Message(str(head["kind"]), dict(head["fields"]), arrays)
    except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise ReplayError(f"a message that is none of tent replay's: {error}") from None


class Assembler:
    """Joins the parts that one sender sends."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def add(self, payload: bytes) -> Message | None:
        """The message that this part completes, or None. Raises ReplayError for a part out of place."""
        if len(payload) < _PART.size:
            raise ReplayError("a message that is none of tent replay's: it is too short")
        index, count = _PART.unpack_from(payload)
        if index != len(self._parts) or not index < count <= _MOST_PARTS:
            raise ReplayError(f"part {index} of {count} came where part {len(self._parts)} was due")
        self._parts.append(payload[_PART.size :])
        if index + 1 < count:
            return None
        body = b"".join(self._parts)
        self._parts = []
        return decode(body)


class Stopped(Exception):
    """`alive` said no while a message was awaited."""


class Notification(Protocol):
    """What an engine hands over."""

    @property
    def sender(self) -> PeerKey: ...
    @property
    def name(self) -> str: ...
    @property
    def payload(self) -> bytes: ...


class Receiver(Protocol):
    """The part of an engine that takes notifications."""

    def next_notification(self, timeout: float | None = None) -> Notification: ...


class Sender(Protocol):
    """The part of a segment that sends notifications."""

    def notify(self, name: str, payload: bytes = b"", timeout: float | None = None) -> None: ...


def send(to: Sender, message: Message, timeout: float) -> None:
    """Send a message; it has arrived at the other engine when this returns. Raises TentError."""
    for payload in encode(message):
        to.notify(NOTIFICATION, payload, timeout)


class Mailbox:
    """Takes messages out of an engine's notifications. Used by one thread."""

    def __init__(self, engine: Receiver, alive: Callable[[], bool] = lambda: True) -> None:
        self._engine = engine
        self._alive = alive
        self._senders: dict[PeerKey, Assembler] = {}

    def take(self, timeout: float | None, what: str) -> tuple[PeerKey, Message]:
        """The next message and who sent it. `what` says in an error what was waited for.

        Bytes that are no message come as one of kind `malformed`, with the reason. Without a timeout it waits
        until `alive` says no, and then raises Stopped. Raises ReplayError after the timeout.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while self._alive():
            left = _POLL_S if end is None else min(_POLL_S, end - time.monotonic())
            if left <= 0:
                raise ReplayError(
                    f"waited {timeout:g} s for {what}, and nothing came: is the other side still running?"
                )
            try:
                note = self._engine.next_notification(left)
            except WaitTimeout:
                continue
            if note.name != NOTIFICATION:
                continue
            try:
                message = self._senders.setdefault(note.sender, Assembler()).add(note.payload)
            except ReplayError as error:
                del self._senders[note.sender]
                message = Message(MALFORMED, {"reason": str(error)})
            if message is not None:
                return note.sender, message
        raise Stopped

    def expect(self, kind: str, sender: PeerKey, timeout: float, what: str) -> Message:
        """The next message of `sender`, which must be of this kind; others' are passed over.

        Raises Refused with the sender's reason, ReplayError for another kind and after the timeout.
        """
        end = time.monotonic() + timeout
        while True:
            found, message = self.take(max(end - time.monotonic(), 0.001), what)
            if found != sender:
                continue
            return expected(message, kind, what)


def expected(message: Message, kind: str, what: str) -> Message:
    """The message, if it is of that kind. Raises Refused with the sender's reason, or ReplayError."""
    if message.kind == "refused":
        raise Refused(str(message.fields.get("reason", "it gave no reason")))
    if message.kind != kind:
        reason = message.fields.get("reason", f"a message {message.kind!r}")
        raise ReplayError(f"expected {what}, found {reason}")
    return message


def hashes_of(blocks: Iterable[int]) -> NDArray[np.uint64]:
    """Block hashes as the column that messages and patterns use."""
    return np.array(tuple(blocks), np.uint64)
