"""`python -m tent_core.cli`: the command `tent`, where it is not on the path."""

from __future__ import annotations

from tent_core.cli import main

if __name__ == "__main__":
    main()
