"""`tent serve`: an engine with a buffer that other processes can read and write."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import click

from tent_core.cli import console
from tent_core.cli.options import SIZE, debug_option, engine_config, engine_options, json_option

PERMISSIONS = ("global_read_write", "global_read_only")
_POLL_S = 0.25


@click.command("serve", short_help="Offer a buffer to other processes.")
@click.option("--name", default="span", show_default=True, help="Name of the buffer.")
@click.option("--size", type=SIZE, default="256MiB", show_default=True, help="Size of the buffer.")
@click.option(
    "--memory",
    type=click.Choice(["allocated", "registered"]),
    default="allocated",
    show_default=True,
    help="Memory that the engine makes and peers can map, or memory of the application's own.",
)
@click.option(
    "--permission",
    type=click.Choice(PERMISSIONS),
    default=PERMISSIONS[0],
    show_default=True,
    help="What others may do with it.",
)
@engine_options
@json_option
@debug_option
def command(
    name: str,
    size: int,
    memory: str,
    permission: str,
    config: Path | None,
    transport: str | None,
    listen: str | None,
    advertise: str | None,
    as_json: bool,
) -> None:
    """Offer a buffer that other processes can read and write, until SIGINT or SIGTERM.

    Prints the segment name, under which others open it, and each notification that arrives.

    \b
    Examples:
      tent serve --size 1GiB
      tent serve --listen 10.0.0.1:7000 --transport tcp
    and in another process:
      tent bench --peer 10.0.0.1:7000
      python -c "import tent_core as tent; print(tent.Engine().open_segment('10.0.0.1:7000').buffers())"

    \b
    With --json, the first line is {"segment", "buffer", "size", "transports"}, then one line for each
    notification: {"sender", "name", "bytes"}.
    """
    import numpy as np

    from tent_core.engine import Engine
    from tent_core.errors import WaitTimeout
    from tent_core.types import Permission

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    allowed = Permission[permission.upper()]
    with Engine(engine_config(config, transport, listen, advertise)) as engine:
        if memory == "allocated":
            buffer = engine.allocate(size, name=name, permission=allowed)
        else:
            buffer = engine.register(np.zeros(size, np.uint8), name=name, permission=allowed)
        transports = sorted(engine.descriptor.transports)
        if as_json:
            console.emit(
                {
                    "segment": engine.segment_name,
                    "buffer": name,
                    "size": buffer.length,
                    "transports": transports,
                }
            )
        else:
            console.say(f"segment     {engine.segment_name}")
            console.say(f"buffer      {name}, {console.rounded(buffer.length)}, {permission}")
            console.say(f"transports  {', '.join(transports) or 'none'}")
            console.note("Ctrl-C stops it.")
        while not stop.is_set():
            try:
                note = engine.next_notification(_POLL_S)
            except WaitTimeout:
                continue
            if as_json:
                console.emit(
                    {"sender": note.sender.name, "name": note.name, "bytes": len(note.payload)}
                )
            else:
                console.say(
                    f"notified    {note.name!r} by {note.sender.name}, {len(note.payload)} bytes"
                )
