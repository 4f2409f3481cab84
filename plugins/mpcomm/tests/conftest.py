"""The stand-in under the name of the vendor's module, here and in the processes that tests start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tent_mock.mpcomm import ON_THE_PATH

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="class")
def stand_in_on_the_path() -> object:
    """`import mpcomm` finds the stand-in: here, and in every process that is started meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "mpcomm", raising=False)
        patch.syspath_prepend(ON_THE_PATH)
        patch.setenv("PYTHONPATH", str(ON_THE_PATH))
        yield
        sys.modules.pop("mpcomm", None)
