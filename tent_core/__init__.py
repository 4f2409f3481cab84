"""TENT moves bytes between the memories of processes: `Engine` says what, a YAML policy says how.

Importing this package does not import grpc: that comes when an engine starts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tent_core.aio import AsyncEngine
    from tent_core.batch import Batch
    from tent_core.control.contract import Notification
    from tent_core.engine import Engine
    from tent_core.errors import (
        BufferRevoked,
        ClosedError,
        ConfigError,
        MemoryUnsupported,
        NotificationFailed,
        PeerDeparted,
        PermissionDenied,
        PluginError,
        RangeError,
        RevocationTimeout,
        StaleHandle,
        TentError,
        TransferFailed,
        TransportError,
        UnknownSegment,
        UsageError,
        WaitTimeout,
    )
    from tent_core.memory import Buffer
    from tent_core.remote import Prepared, Segment
    from tent_core.remote_buffer import RemoteBuffer
    from tent_core.types import Intent, Opcode, Permission, Priority, Status, TransportType

__version__ = "0.1.0"

_HOME = {
    "tent_core.aio": ("AsyncEngine",),
    "tent_core.batch": ("Batch",),
    "tent_core.engine": ("Engine",),
    "tent_core.errors": (
        "BufferRevoked",
        "ClosedError",
        "ConfigError",
        "MemoryUnsupported",
        "NotificationFailed",
        "PeerDeparted",
        "PermissionDenied",
        "PluginError",
        "RangeError",
        "RevocationTimeout",
        "StaleHandle",
        "TentError",
        "TransferFailed",
        "TransportError",
        "UnknownSegment",
        "UsageError",
        "WaitTimeout",
    ),
    "tent_core.control.contract": ("Notification",),
    "tent_core.memory": ("Buffer",),
    "tent_core.remote_buffer": ("RemoteBuffer",),
    "tent_core.remote": ("Prepared", "Segment"),
    "tent_core.types": ("Intent", "Opcode", "Permission", "Priority", "Status", "TransportType"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "AsyncEngine",
    "Batch",
    "Buffer",
    "BufferRevoked",
    "ClosedError",
    "ConfigError",
    "Engine",
    "Intent",
    "MemoryUnsupported",
    "Notification",
    "NotificationFailed",
    "Opcode",
    "PeerDeparted",
    "Permission",
    "PermissionDenied",
    "PluginError",
    "Prepared",
    "Priority",
    "RangeError",
    "RemoteBuffer",
    "RevocationTimeout",
    "Segment",
    "StaleHandle",
    "Status",
    "TentError",
    "TransferFailed",
    "TransportError",
    "TransportType",
    "UnknownSegment",
    "UsageError",
    "WaitTimeout",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
