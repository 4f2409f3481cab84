"""The keyword options of transfers, as applications write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from numpy.typing import ArrayLike

from tent_core.batch import Note, Options
from tent_core.control.contract import check_notification
from tent_core.errors import UsageError
from tent_core.mistakes import nearest
from tent_core.types import Intent, Priority


class TransferOptions(TypedDict, total=False):
    """Keyword options of every transfer.

    - `timeout`: seconds that bound the transfer, not only the wait (default: `transfer.timeout_s`);
      `deadline`: the same as an absolute time on `time.monotonic()`. The earlier one counts. With either,
      `Batch.feasible` says at once whether that can be expected, and `Engine.stats` how such transfers do.
    - `priority`, `intent`: may match policy entries; `priority` also says who goes first.
    - `policy`: names an entry; `transport`: a hint for the first try.
    - `attempt_timeout`: seconds that one transport may take before the next candidate is tried, and
      `stall`: seconds without a byte, where the transport can say so. Both come from the policy entry
      otherwise, and without either only the timeout counts.
    - `notify`: a name, or (name, payload): the peer's application gets this notification when all bytes
      have arrived where it sees them, or when it is clear that they will not (`Notification.error`). The
      transfer then ends when the peer's engine has acknowledged it, and its timeout bounds that as well.
    - `integrity`: "crc32c" has the notification carry checksums of all ranges, which the peer's engine
      compares with its memory before it hands the notification over. Needs `tent-core[integrity]`.
    - `retry_unfenced`: a WRITE whose failed attempt may still write goes on to the next candidate all the
      same; the caller sees to it that late bytes do no harm.
    """

    timeout: float | None
    deadline: float | None
    priority: Priority
    intent: Intent
    policy: str | None
    transport: str | None
    attempt_timeout: float | None
    stall: float | None
    retry_unfenced: bool
    notify: str | tuple[str, bytes] | None
    integrity: Literal["crc32c"] | None


class Columns(TypedDict, total=False):
    """Which buffer each request means, when sequences of buffers are given: integers, shape (n,)."""

    local_index: ArrayLike
    remote_index: ArrayLike


class ManyOptions(TransferOptions, Columns, total=False):
    """Options of a batch."""


_KNOWN = frozenset(ManyOptions.__annotations__)
_DEFAULT = Options()


def read_options(given: Mapping[str, Any]) -> Options:
    """Options from keyword arguments, with the columns left out. Raises UsageError, for unknown ones too."""
    if not given:
        return _DEFAULT
    for name in given.keys() - _KNOWN:
        close = nearest(name, sorted(_KNOWN))
        raise UsageError(
            f"a transfer has no option {name!r}"
            + (
                f"; did you mean {close!r}?"
                if close
                else f": there are {', '.join(sorted(_KNOWN))}"
            )
        )
    try:
        priority = Priority(given.get("priority", Priority.MEDIUM))
        intent = Intent(given.get("intent", Intent.UNSPEC))
    except ValueError as error:
        raise UsageError(
            f"{error}: use the members of tent_core.Priority and tent_core.Intent"
        ) from None
    return Options(
        given.get("timeout"),
        priority,
        intent,
        given.get("policy"),
        given.get("transport"),
        given.get("deadline"),
        given.get("attempt_timeout"),
        given.get("stall"),
        given.get("retry_unfenced", False),
        _read_note(given) if "notify" in given or "integrity" in given else None,
    )


def read_notify(notify: Any, integrity: Any = None) -> Note | None:
    """What `notify` and `integrity` ask for. Raises UsageError."""
    if integrity not in (None, "crc32c"):
        raise UsageError(f"integrity={integrity!r} is not known: it is 'crc32c' or None")
    if notify is None:
        if integrity is not None:
            raise UsageError(
                "integrity='crc32c' goes with a notification: say notify=(name, payload)"
            )
        return None
    name, payload = (notify, b"") if isinstance(notify, str) else _pair(notify)
    check_notification(name, payload)
    return Note(name, bytes(payload), integrity is not None)


def _read_note(given: Mapping[str, Any]) -> Note | None:
    return read_notify(given.get("notify"), given.get("integrity"))


def _pair(notify: Any) -> tuple[Any, Any]:
    if isinstance(notify, tuple) and len(notify) == 2:
        return notify
    raise UsageError(f"notify is a name, or (name, payload): found {notify!r}")
