"""Settings of engines over real verbs, and how they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tent_core as tent
from tent_core.testing.peers import PeerProcess

IMPORTED = ("tent_rdma.transport", "pyverbs.device", "pyverbs.qp", "pyverbs.cq", "pyverbs.mr")
PATIENCE_S = 120.0
"""An emulated machine takes its time."""

Config = dict[str, Any]
Make = Callable[..., tent.Engine]
Start = Callable[..., PeerProcess]


def config(*transports: str, rdma: Config | None = None, **sections: Any) -> Config:
    """Settings of an engine that has these transports, rdma if none is named, in this order."""
    names = transports or ("rdma",)
    enabled: Config = {name: {"enable": True} for name in names}
    if rdma:
        enabled["rdma"] |= rdma
    base: Config = {
        "transports": enabled,
        "policy": [{"name": "all", "transports": list(names)}],
        "control": {"call_timeout_s": PATIENCE_S / 2},
        "transfer": {"timeout_s": PATIENCE_S},
        "log": {"level": "warning"},
    }
    return base | sections
