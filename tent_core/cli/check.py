"""`tent check`: every mistake in a configuration at once, or the JSON Schema of configurations."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from tent_core.cli import console
from tent_core.cli.options import YAML, debug_option, json_option


@click.command("check", short_help="Check a YAML configuration.")
@click.argument("config", required=False, type=YAML)
@click.option(
    "--schema",
    is_flag=True,
    help="Print the JSON Schema of configurations, with the settings of installed transports.",
)
@json_option
@debug_option
def command(config: Path | None, schema: bool, as_json: bool) -> None:
    """Check CONFIG, and report every mistake at once: line, key, what was found, what is allowed.

    The exit status is 0 if there is none, else 1. With --schema, the JSON Schema that editors use to complete
    and check such files, with the settings of the transports that are installed here.

    \b
    Examples:
      tent check tent.yaml
      tent check --schema > tent.schema.json
    and in the first line of the YAML, for editors:
      # yaml-language-server: $schema=tent.schema.json

    \b
    With --json: {"valid": bool, "mistakes": [{"line", "key", "found", "allowed", "nearest"}, ...]}.
    """
    from tent_core import config as settings
    from tent_core import plugins
    from tent_core.errors import ConfigError

    registry = plugins.discover()
    if schema:
        if config is not None:
            raise click.UsageError("--schema takes no CONFIG: it is about all of them")
        console.emit_indented(settings.json_schema(registry))
        return
    if config is None:
        raise click.UsageError("which CONFIG? (or --schema)")
    found = settings.check(config, registry)
    if as_json:
        mistakes = [asdict(mistake) for mistake in found.mistakes]
        console.emit({"valid": found.settings is not None, "mistakes": mistakes})
    elif found.settings is not None:
        entries = ", ".join(entry.name for entry in found.settings.policy)
        console.say(
            f"{config}: no mistakes. Policy: {entries}. `tent explain --config {config}` shows what it does."
        )
    else:
        raise ConfigError([str(mistake) for mistake in found.mistakes], found.source)
    if found.settings is None:
        raise click.exceptions.Exit(1)
