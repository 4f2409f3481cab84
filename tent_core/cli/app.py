"""The group of all commands, and how their errors reach people."""

from __future__ import annotations

import traceback
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from tent_core.children import ChildFailed
from tent_core.cli import (
    bench,
    check,
    doctor,
    explain,
    new_transport,
    peers,
    plugins,
    replay,
    serve,
)
from tent_core.cli.options import DEBUG, debug_option, failure_of


class _Commands(click.Group):
    """A group whose commands' errors become one message, and a traceback only with --debug."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click knows what to do with them
        except Exception as error:
            if ctx.meta.get(DEBUG):
                click.echo(traceback.format_exc(), err=True, nl=False)
                if isinstance(error, ChildFailed) and error.trace:
                    click.echo(f"In that process:\n{error.trace}", err=True, nl=False)
            raise failure_of(error) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _version() -> str:
    try:
        return version("tent-core")
    except PackageNotFoundError:
        return "unknown: tent-core is not installed"


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), prog_name="tent")
@debug_option
def tent() -> None:
    """Move bytes between the memories of processes, over the transport that YAML says.

    \b
    New here? Try these:
      tent doctor                                what works on this machine, and what to do about the rest
      tent plugins                               which transports are installed
      tent replay examples/traces/small.jsonl    move real KV-cache traffic between two processes
      tent bench --case 4KiBx1000                how fast a batch of small blocks is
    """


for command in (
    replay.command,
    bench.command,
    serve.command,
    plugins.command,
    new_transport.command,
    check.command,
    explain.command,
    peers.command,
    doctor.command,
):
    tent.add_command(command)
