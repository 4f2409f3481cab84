"""`tent doctor`: what works on this machine, and what to do about the rest."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tent_core.cli import console
from tent_core.cli.options import debug_option, engine_config, engine_options, json_option

if TYPE_CHECKING:
    from tent_core.doctor.finding import Finding


@click.command("doctor", short_help="Look at this machine, and say what to do.")
@engine_options
@json_option
@debug_option
def command(
    config: Path | None,
    transport: str | None,
    listen: str | None,
    advertise: str | None,
    as_json: bool,
) -> None:
    """Look at this machine: what an engine would advertise and which transports run, limits, access to other
    processes' memory, addresses, ports, NUMA nodes, NICs, RDMA devices with their GIDs, kernel modules.

    Whatever is not as it should be comes with its remedy. Nothing is changed; an engine is started and closed
    again. The exit status is 1 if something will fail (`bad`).

    \b
    Examples:
      tent doctor
      tent doctor --config tent.yaml --listen 10.0.0.7:7000

    \b
    With --json: one list of {"topic", "subject", "level", "found", "remedy"};
    level is ok, info, warn or bad.
    """
    from tent_core.doctor.examine import examine

    findings = examine(engine_config(config, transport, listen, advertise))
    if as_json:
        console.emit([asdict(finding) for finding in findings])
    else:
        _show(findings)
    if any(finding.level == "bad" for finding in findings):
        raise click.exceptions.Exit(1)


def _show(findings: list[Finding]) -> None:
    width = max(len(finding.subject) for finding in findings)
    for topic, group in groupby(findings, key=lambda finding: finding.topic):
        console.facts(
            [(f.level.value, f.subject.ljust(width), _text(f)) for f in group], title=f"\n{topic}"
        )


def _text(finding: Finding) -> str:
    return f"{finding.found}\n-> {finding.remedy}" if finding.remedy else finding.found
