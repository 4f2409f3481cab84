"""Verbs without hardware: a stand-in for the seam `tent_rdma.verbs`, which counts, moves bytes and fails.

    import tent_rdma.verbs
    fabric = FakeVerbs(tent_rdma.verbs)     # what is passed is the module whose words it speaks
    device = fabric.open("fake0")

All that take one `FakeVerbs` are on one fabric: their queue pairs find each other by GID and number, and
bytes move between memories of this process. The NICs of the fabric (`fabric.nics`) are what a test reaches
behind the devices for: ports go down, work is held until the test lets it go, everything is counted.

Where real devices differ, this one does what is harder on its user: keys differ between lkey and rkey and
between NICs, places in a send queue come back when the completion is polled, a request that failed is
followed by one flushed completion for each request after it, signalled or not, and what was completed stays
in the completion queue when the queue pair is closed.
"""

from tent_mock.verbs.counts import Counts, Kind
from tent_mock.verbs.fabric import FakeVerbs
from tent_mock.verbs.faults import Faults, Gate, Operation
from tent_mock.verbs.nic import Nic
from tent_mock.verbs.words import Status, Words

__all__ = ["Counts", "FakeVerbs", "Faults", "Gate", "Kind", "Nic", "Operation", "Status", "Words"]
