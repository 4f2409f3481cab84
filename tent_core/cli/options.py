"""Options that several commands share, and what they mean for an engine's configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tent_core.errors import TentError
from tent_core.mistakes import NotAllowed
from tent_core.units import parse_duration, parse_size

if TYPE_CHECKING:
    _IntType = click.ParamType[int]
    _FloatType = click.ParamType[float]
else:  # click before 8.3 has no type parameters here
    _IntType = _FloatType = click.ParamType

F = TypeVar("F", bound=Callable[..., Any])

DEBUG = "tent.debug"
"""Key in the root context's `meta`: whether errors show tracebacks."""


class Size(_IntType):
    """Bytes, as `4096`, `64KiB` or `2GiB`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value)
        except NotAllowed as error:
            self.fail(f"found {value!r}; allowed: {error.allowed}", param, ctx)


class Duration(_FloatType):
    """Seconds, as `5`, `5s` or `500ms`."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            return parse_duration(value)
        except NotAllowed as error:
            self.fail(f"found {value!r}; allowed: {error.allowed}", param, ctx)


SIZE = Size()
DURATION = Duration()
YAML = click.Path(exists=True, dir_okay=False, path_type=Path)


def debug_option(command: F) -> F:
    """`--debug`: a traceback with every error."""

    def remember(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            ctx.find_root().meta[DEBUG] = True

    return click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        callback=remember,
        is_eager=True,
        help="Show the traceback of an error.",
    )(command)


def json_option(command: F) -> F:
    """`--json`: for machines."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print JSON on stdout and nothing else there."
    )(command)


def config_option(command: F) -> F:
    """`--config`: the YAML of the engine."""
    return click.option(
        "--config",
        "-c",
        type=YAML,
        help="YAML with transports and policy; without it, the defaults.",
    )(command)


def engine_options(command: F) -> F:
    """The options that make an engine's configuration: --config, --transport, --listen, --advertise."""
    for option in (
        click.option(
            "--advertise", metavar="HOST", help="The host that peers are told to connect to."
        ),
        click.option(
            "--listen",
            metavar="HOST:PORT",
            help="Where the engine listens, such as 10.0.0.7:0 or [fd00::7]:7000; port 0 is any. "
            "Default: loopback, which only this host reaches.",
        ),
        click.option("--transport", metavar="NAME", help="Use this transport, and no other."),
    ):
        command = option(command)
    return config_option(command)


def engine_config(
    config: Path | None,
    transport: str | None = None,
    listen: str | None = None,
    advertise: str | None = None,
) -> dict[str, Any]:
    """The configuration of an engine: the YAML, checked, and over it what the options say.

    `transport` leaves that one alone enabled, under a policy that names it for everything. Without a `log`
    section the engine of a command logs warnings and worse only. Raises ConfigError.
    """
    from tent_core import config as settings
    from tent_core import plugins, yamldoc

    found: dict[str, Any] = {}
    if config is not None:
        settings.load(config, plugins.discover())  # for its report, which has the lines of the file
        found = dict(yamldoc.read(config).root.data or {})
    if transport is not None:
        own = dict((found.get("transports") or {}).get(transport) or {})
        found["transports"] = {transport: {**own, "enable": True}}
        found["policy"] = [{"name": f"{transport}-alone", "transports": [transport]}]
    control = {"listen": listen, "advertise": advertise}
    given = {key: value for key, value in control.items() if value is not None}
    if given:
        found["control"] = {**(found.get("control") or {}), **given}
    found.setdefault("log", {"level": "warning"})
    return found


def progress_wanted() -> bool:
    """Whether stderr is a terminal, on which progress can be shown."""
    return sys.stderr.isatty()


class Failure(click.ClickException):
    """An error that ends a command with exit status 1 and its text on stderr."""

    def show(self, file: Any = None) -> None:
        click.echo(f"tent: {self.message}", err=True, file=file)


def failure_of(error: Exception) -> Failure:
    """The failure that tells of an error; a mistake of TENT itself says so."""
    if isinstance(error, TentError):
        return Failure(str(error))
    return Failure(f"unexpected {type(error).__name__}: {error} (add --debug to see where)")
