"""What the fake needs to know of the seam that it stands for: its words, not the module."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Protocol


class Words(Protocol):
    """The vocabulary of a seam to verbs; the module `tent_rdma.verbs` is one.

    `VerbsError(what, errno)` is raised, the others are made by keyword: `Completion(wr_id, status, length,
    queue_pair)`, `Limits(...)`, `PortState(active, ethernet, lid, mtu)`. `Event` is an enumeration with
    PORT_ACTIVE, PORT_DOWN, ADDRESS_CHANGED, FATAL, QUEUE_PAIR and OTHER.
    """

    @property
    def VerbsError(self) -> Callable[[str, int], Exception]: ...

    @property
    def Completion(self) -> Callable[..., Any]: ...

    @property
    def Limits(self) -> Callable[..., Any]: ...

    @property
    def PortState(self) -> Callable[..., Any]: ...

    @property
    def Event(self) -> type[enum.Enum]: ...


class Status(enum.IntEnum):
    """How a work request ended (enum ibv_wc_status, ibv_poll_cq(3)); those that the fake answers."""

    SUCCESS = 0
    LOCAL_LENGTH = 1
    LOCAL_PROTECTION = 4
    FLUSHED = 5
    REMOTE_INVALID = 9
    REMOTE_ACCESS = 10
    RETRIES_EXCEEDED = 12
