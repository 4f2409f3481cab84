"""`tent peers`: the peers of a running engine on this machine, and what is held for each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import click

from tent_core.cli import console
from tent_core.cli.options import DURATION, debug_option, json_option


@click.command("peers", short_help="List the peers of a running engine.")
@click.argument("address", metavar="ADDRESS")
@click.option(
    "--watch", type=DURATION, metavar="SECONDS", help="List them again and again, until Ctrl-C."
)
@click.option(
    "--timeout", type=DURATION, default="5s", show_default=True, help="How long an answer may take."
)
@json_option
@debug_option
def command(address: str, watch: float | None, timeout: float, as_json: bool) -> None:
    """List the peers of the engine at ADDRESS, its segment name, such as 127.0.0.1:7000.

    For each peer: who opened whom, where it is in its life, for how long it has been idle, how many handles
    of its segment are open, how often it was connected, and what went to it and is held for it, by transport.
    An engine tells this only to callers on its own machine. docs/peers.md explains the states.

    \b
    Examples:
      tent peers 127.0.0.1:7000
      tent peers 127.0.0.1:7000 --watch 1s
      tent peers '[::1]:7000' --json

    With --json it prints one JSON document; with --watch as well, one a line.
    """
    from tent_core.control.inquiry import inspect

    try:
        for _ in _rounds(watch):
            found = inspect(address, timeout)
            if not as_json:
                _show(found)
            elif watch is None:
                console.emit_indented(found)
            else:
                console.emit(found)
    except KeyboardInterrupt:
        return


def _rounds(every: float | None) -> Iterator[None]:
    yield
    while every is not None:
        time.sleep(every)
        yield


def _show(found: dict[str, Any]) -> None:
    stats = found.get("stats", {})
    running = ", ".join(sorted(stats.get("transports", {}))) or "none"
    console.facts(
        [
            (
                "engine",
                f"{found.get('engine')}#{str(found.get('incarnation'))[:8]}, pid {found.get('pid')}",
            ),
            ("runs for", _seconds(found.get("uptime_s"))),
            ("transports", running),
            ("peers", f"{len(found.get('peers', []))}, at most {found.get('most_peers')} each way"),
        ]
    )
    peers = found.get("peers", [])
    if peers:
        console.table(
            ("peer", "pid", "direction", "state", "idle", "handles", "connects", "carried", "held"),
            [_row(peer) for peer in peers],
            right=("pid", "idle", "handles", "connects"),
        )
    if found.get("peers_left_out"):
        console.say(
            f"{found['peers_left_out']} more are left out: they do not fit into one answer."
        )


def _row(peer: dict[str, Any]) -> tuple[object, ...]:
    transports: dict[str, dict[str, Any]] = peer["transports"]
    return (
        f"{peer['name']}#{peer['incarnation'][:8]}",
        peer["pid"] if peer["same_machine"] else "elsewhere",
        {(True, True): "both", (True, False): "opened"}.get(
            (peer["opened"], peer["opens"]), "opens"
        ),
        peer["state"],
        "" if peer["idle_s"] is None else _seconds(peer["idle_s"]),
        peer["handles"] if peer["opened"] else "",
        peer["handshakes"] if peer["opened"] else "",
        ", ".join(
            f"{name} {console.rounded(of['bytes'])}"
            + (f" ({of['failures']} failed)" if of["failures"] else "")
            for name, of in transports.items()
            if "bytes" in of
        ),
        ", ".join(
            f"{name} {count} {thing}"
            for name, of in transports.items()
            for thing, count in of.get("holdings", {}).items()
            if count
        ),
    )


def _seconds(value: float | None) -> str:
    if value is None:
        return "unknown"
    if value < 60:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02}min" if hours else f"{minutes}min {seconds:02}s"
