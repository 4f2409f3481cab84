"""Whether the vendor's library, and a device for it, are on this machine."""

from __future__ import annotations

from functools import cache

from tent_core import topology
from tent_mock.mpcomm import __version__ as version_of_the_stand_in
from tent_mpcomm import adapter
from tent_mpcomm.transport import device_list


@cache
def missing() -> str:
    """Why tests of the library itself cannot run here, or ""."""
    found = adapter.load()
    if found.obstacle:
        return found.obstacle
    if found.version == version_of_the_stand_in:
        return "the module mpcomm is the stand-in"
    return "" if device_list(topology.discover()) else "no RDMA device has an active port"
