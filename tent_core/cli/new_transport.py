"""`tent new-transport`: a package with a transport that works, to be changed into another one."""

from __future__ import annotations

from pathlib import Path

import click

from tent_core.cli import console
from tent_core.cli.options import debug_option, json_option


@click.command("new-transport", short_help="Write a package with a new transport.")
@click.argument("name")
@click.option(
    "--number",
    type=int,
    prompt="Private-use number (1000 to 1999)",
    help="Its number, 1000 to 1999; asked for if not given, and compared with what is installed.",
)
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    help="The directory to make; `tent-NAME` here if not given.",
)
@json_option
@debug_option
def command(name: str, number: int, into: Path | None, as_json: bool) -> None:
    """Write a package that offers the transport NAME. It works over a TCP stream, and its tests pass.

    Nothing of this project has to be edited. Change what moves the bytes, step by step, and run the suite
    after each; docs/writing-a-transport.md says what is asked of each method.

    \b
    Examples:
      tent new-transport demo --number 1042
      tent new-transport demo --number 1042 --into ~/src/tent-demo --json
    """
    from tent_core import plugins
    from tent_core.scaffold import write

    write.check(name, number, plugins.discover().report())
    directory = into or Path(f"tent-{name.replace('_', '-')}")
    files = write.write(name, number, directory)
    if as_json:
        console.emit({"name": name, "number": number, "files": [str(file) for file in files]})
        return
    for file in files:
        console.say(str(file))
    console.note(
        f"\nNow: cd {directory} && pip install -e '.[test]' && pytest && tent plugins\n"
        f"The bytes are moved in tent_{name}/transport.py."
    )
