"""What tests of transports and of applications share; needs the extra `testing`.

`conformance` is the suite that any transport must pass, over two real engines. `harness` drives a transport
by the contract alone, without an engine. `peers` runs engines in processes of their own. `leaks` counts
what a process holds. `waiting` polls with a deadline.
"""

from __future__ import annotations

import sys

from tent_core.testing.leaks import Held, holding
from tent_core.testing.waiting import wait_until

if (
    "pytest" in sys.modules
):  # not in the processes that tests start: they import this package as well
    sys.modules["pytest"].register_assert_rewrite("tent_core.testing.conformance")

__all__ = ["Held", "holding", "wait_until"]
