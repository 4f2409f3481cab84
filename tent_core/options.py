"""The keyword options of transfers, as applications write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from numpy.typing import ArrayLike

from tent_core.batch import Options
from tent_core.errors import UsageError
from tent_core.types import Intent, Priority


class TransferOptions(TypedDict, total=False):
    """Keyword options of every transfer.

    - `timeout`: seconds that bound the transfer, not only the wait (default: `transfer.timeout_s`);
      `deadline`: the same as an absolute time on `time.monotonic()`. The earlier one counts.
    - `priority`, `intent`: may match policy entries; `priority` also says who goes first.
    - `policy`: names an entry; `transport`: a hint for the first try.
    - `attempt_timeout`: seconds that one transport may take before the next candidate is tried, and
      `stall`: seconds without a byte, where the transport can say so. Both come from the policy entry
      otherwise, and without either only the timeout counts.
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


class Columns(TypedDict, total=False):
    """Which buffer each request means, when sequences of buffers are given: integers, shape (n,)."""

    local_index: ArrayLike
    remote_index: ArrayLike


class ManyOptions(TransferOptions, Columns, total=False):
    """Options of a batch."""


def read_options(given: Mapping[str, Any]) -> Options:
    """Options from keyword arguments, with the columns left out."""
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
    )
