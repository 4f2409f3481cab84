"""What `tent doctor` shows of MPComm: the library, what it is told, and what would fail. Changes nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tent_core.doctor.finding import Finding, Level
from tent_core.errors import TransportUnavailable
from tent_core.topology import Topology
from tent_mpcomm import adapter
from tent_mpcomm.adapter import Adapter
from tent_mpcomm.environment import settle
from tent_mpcomm.settings import Settings
from tent_mpcomm.transport import device_list

_TOPIC = "mpcomm"


def findings(
    topology: Topology,
    settings: Settings,
    library: Adapter | None = None,
    environ: Mapping[str, str] = os.environ,
) -> list[Finding]:
    """Findings about what this transport needs and would do here, with these settings."""
    library = library if library is not None else adapter.load()
    if library.obstacle:
        reason, _, remedy = library.obstacle.rpartition(": ")
        return [Finding(_TOPIC, "library", Level.INFO, f"{reason}, so it is not used", remedy)]
    level = Level.WARN if library.warning else Level.OK
    found = [Finding(_TOPIC, "library", level, library.warning or f"version {library.version}")]
    try:
        settled, values = settle(settings, environ)
    except TransportUnavailable as error:
        remedy = "mend or unset these variables"
        return [*found, Finding(_TOPIC, "environment", Level.BAD, str(error), remedy)]
    told = ", ".join(f"{name}={value}" for name, value in sorted(values.items()))
    found.append(Finding(_TOPIC, "tuning", Level.INFO, told or "all defaults of the library"))
    return [*found, _devices(topology, settled), _port(settled), _gpu(topology, settled)]


def _devices(topology: Topology, settings: Settings) -> Finding:
    if settings.nic_filter is not None:
        missing = [n for n in settings.nic_filter if topology.rdma_device(n) is None]
        if missing:
            text = f"{', '.join(missing)} of the filter are not on this machine"
            return Finding(_TOPIC, "devices", Level.WARN, text, "mend nic_filter or the variable")
        return Finding(_TOPIC, "devices", Level.OK, f"filtered: {', '.join(settings.nic_filter)}")
    names = device_list(topology)
    if names:
        return Finding(_TOPIC, "devices", Level.OK, names.replace(",", ", "))
    remedy = "bring a port up; `tent doctor` lists the devices above"
    return Finding(_TOPIC, "devices", Level.WARN, "no RDMA device has an active port", remedy)


def _port(settings: Settings) -> Finding:
    port = settings.listen_port or "one that is free"
    found = (
        f"{port}, on all interfaces, answers anybody with addresses and keys of registered memory"
    )
    return Finding(
        _TOPIC, "handshake port", Level.INFO, found, "firewall it from all but the peers"
    )


def _gpu(topology: Topology, settings: Settings) -> Finding:
    subject = "nvidia_peermem"
    if not settings.gpu:
        return Finding(_TOPIC, subject, Level.INFO, "GPU memory is kept away by the setting `gpu`")
    if subject in topology.modules:
        found = "loaded: GPU memory is offered, if the library and the application have CUDA"
        return Finding(_TOPIC, subject, Level.OK, found)
    return Finding(
        _TOPIC, subject, Level.INFO, "not loaded: host memory only", "modprobe nvidia_peermem"
    )
