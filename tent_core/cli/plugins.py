"""`tent plugins`: which transports are installed, and which of them could be loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tent_core.cli import console
from tent_core.cli.options import debug_option, json_option

if TYPE_CHECKING:
    from tent_core.plugins import PluginReport
    from tent_core.types import Capabilities


@click.command("plugins", short_help="List the installed transports.")
@json_option
@debug_option
def command(as_json: bool) -> None:
    """List the installed transports: which package each is from, what it can do, and why one is not usable.

    A transport is a package of its own: `pip install tent-tcp` adds one, and nothing else has to be edited. A
    package that is listed as usable was imported here and knows of nothing that is in its way; whether its
    transport runs shows when an engine starts it: see `tent doctor`.

    \b
    Examples:
      tent plugins
      tent plugins --json
    """
    from tent_core import plugins

    report = plugins.discover().report()
    if as_json:
        console.emit([_document(row) for row in report])
        return
    if not report:
        console.say("No transport is installed. `pip install tent-shm tent-tcp` gets two.")
        return
    console.table(
        ("transport", "number", "usable", "reach", "memory", "package", "about"),
        [_row(row) for row in report],
        right=("number",),
    )


def _row(row: PluginReport) -> tuple[object, ...]:
    able = row.capabilities
    return (
        row.name,
        "" if row.number is None else row.number,
        "no" if row.reason else "yes",
        "" if able is None else able.reach.name.lower(),
        "" if able is None else ", ".join(sorted(f"{a}-{b}" for a, b in able.memory_pairs)),
        f"{row.package} {row.version}",
        row.reason or row.summary,
    )


def _document(row: PluginReport) -> dict[str, Any]:
    return {
        "name": row.name,
        "number": row.number,
        "usable": not row.reason,
        "reason": row.reason,
        "package": row.package,
        "version": row.version,
        "module": row.target,
        "api_version": row.api_version,
        "summary": row.summary,
        "capabilities": _capabilities(row.capabilities),
    }


def _capabilities(able: Capabilities | None) -> dict[str, Any] | None:
    if able is None:
        return None
    from dataclasses import asdict

    found = asdict(able)
    found["memory_pairs"] = sorted([a.value, b.value] for a, b in able.memory_pairs)
    found["reach"] = able.reach.name.lower()
    return found
