"""`tent plugins`: which transports are installed, and which of them could be loaded."""

from __future__ import annotations

from collections.abc import Iterator
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
        ("transport", "number", "usable", "reach", "package", "API"),
        [_row(row) for row in report],
        right=("number",),
    )
    console.facts([fact for row in report for fact in _facts(row)])


def _row(row: PluginReport) -> tuple[object, ...]:
    able = row.capabilities
    return (
        row.name,
        "" if row.number is None else row.number,
        "no" if row.reason else "yes",
        "" if able is None else able.reach.name.lower(),
        f"{row.package} {row.version}",
        "" if row.api_version is None else ".".join(map(str, row.api_version)),
    )


def _facts(row: PluginReport) -> Iterator[tuple[str, str, str]]:
    """What takes more than a word: what it is, what it claims, and why it cannot be used."""
    if row.summary:
        yield row.name, "is", row.summary
    if row.capabilities is not None:
        yield row.name, "can", ", ".join(_claims(row.capabilities))
    if row.reason:
        yield row.name, "not usable", row.reason


def _claims(able: Capabilities) -> Iterator[str]:
    """What it claims beside its reach, in words."""
    from dataclasses import fields

    yield from sorted(f"{local}-{remote}" for local, remote in able.memory_pairs)
    for field in fields(able):
        if getattr(able, field.name) is True:
            yield field.name.replace("_", " ")
    if able.largest_request is not None:
        yield f"at most {console.rounded(able.largest_request)} a request"
    if able.retained_per_peer is not None:
        yield f"keeps of each departed peer: {able.retained_per_peer.what}"


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
