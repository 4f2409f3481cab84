"""The suite that any transport must pass, ours or a stranger's, through the public API and over real engines.

A package's own tests subclass it, and pytest runs the rest:

    from tent_core.testing.conformance import TransportConformance

    class TestConformance(TransportConformance):
        transport = "mine"

What a transport does not claim in its capabilities is tried as well, and must be refused; what cannot be
tried is skipped with the reason. With `-p tent_core.testing.report` a table at the end says which is which.
Nothing here knows any transport by name.
"""

from __future__ import annotations

from tent_core.testing.conformance.base import Base, Ends
from tent_core.testing.conformance.batches import Batches
from tent_core.testing.conformance.buffers import Buffers
from tent_core.testing.conformance.cancellation import Cancellation
from tent_core.testing.conformance.claims import Claims
from tent_core.testing.conformance.closing import Closing
from tent_core.testing.conformance.content import Content
from tent_core.testing.conformance.contract import Contract
from tent_core.testing.conformance.departures import Departures
from tent_core.testing.conformance.files import FileConformance
from tent_core.testing.conformance.leaks import PEERS, WARM_UP, Leaks
from tent_core.testing.conformance.machines import Machines
from tent_core.testing.conformance.notifications import Notifications
from tent_core.testing.conformance.permissions import Permissions
from tent_core.testing.conformance.processes import Processes

__all__ = ["PEERS", "WARM_UP", "Base", "Ends", "FileConformance", "TransportConformance"]


class TransportConformance(
    Machines,
    Processes,
    Leaks,
    Claims,
    Contract,
    Closing,
    Departures,
    Cancellation,
    Notifications,
    Buffers,
    Permissions,
    Batches,
    Content,
):
    """Subclass it as `Test...`, name the `transport`, and give its `settings` as YAML would.

    pytest runs the last base first.
    """
