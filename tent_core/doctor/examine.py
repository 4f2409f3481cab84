"""Everything that is looked at, in the order in which it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tent_core import topology
from tent_core.doctor.devices import devices
from tent_core.doctor.engine import engine
from tent_core.doctor.finding import Finding
from tent_core.doctor.limits import access, limits
from tent_core.doctor.network import network
from tent_core.doctor.packages import packages


def examine(config: Mapping[str, Any], root: Path = Path("/")) -> list[Finding]:
    """Look at this machine; `config` is an engine's. Takes about as long as an engine takes to start."""
    machine = topology.discover(root)
    return [
        *engine(config),
        *limits(root, bool(machine.rdma_devices)),
        *access(root),
        *network(root),
        *devices(machine),
        *packages(config, machine),
    ]
