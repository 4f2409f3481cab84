"""The command `tent`. Importing this imports neither click nor rich; `main` does."""

from __future__ import annotations

import sys

_NEEDED = ("click", "rich")


def main() -> None:
    """Run the command line; the exit status is 0 for success, 1 for a failure, 2 for wrong usage."""
    try:
        from tent_core.cli.app import tent
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        sys.exit(
            f"tent: the command line needs {' and '.join(_NEEDED)}: pip install 'tent-core[cli]'"
        )
    tent(prog_name="tent")
