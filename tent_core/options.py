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

    `timeout` seconds bound the transfer (default: `transfer.timeout_s`); `priority` and `intent` may match
    policy entries; `policy` names one; `transport` is a hint for the first try.
    """

    timeout: float | None
    priority: Priority
    intent: Intent
    policy: str | None
    transport: str | None


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
        given.get("timeout"), priority, intent, given.get("policy"), given.get("transport")
    )
