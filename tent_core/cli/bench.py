"""`tent bench`: how fast blocks move from one process to another, checked before and after."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tent_core.cli import console
from tent_core.cli.options import (
    DURATION,
    debug_option,
    engine_config,
    engine_options,
    json_option,
)

if TYPE_CHECKING:
    from tent_core.bench.measure import Measurement

_COLUMNS = f"{'op':6} {'case':>14} {'p50':>12} {'GB/s':>8} {'us a block':>11}  carried by"


@click.command("bench", short_help="Measure how fast blocks move.")
@engine_options
@click.option(
    "--memory",
    type=click.Choice(["allocated", "registered"]),
    default="allocated",
    show_default=True,
    help="Memory that the engine makes and peers can map, or memory of the application's own.",
)
@click.option(
    "--case",
    "cases",
    multiple=True,
    metavar="BLOCKxBATCH",
    help="What one call moves, such as 4KiBx1000; repeatable. Default: eight cases from 4KiBx1 to 64KiBx500.",
)
@click.option(
    "--op",
    "ops",
    multiple=True,
    type=click.Choice(["write", "read"]),
    help="Repeatable; default: both.",
)
@click.option(
    "--seconds", type=DURATION, default="1s", show_default=True, help="Time for each case."
)
@click.option(
    "--busy",
    type=click.Choice(["target", "initiator", "both"]),
    help="Where a Python thread computes all the time, as in every inference worker.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Threads that move blocks.",
)
@click.option(
    "--peer", metavar="HOST:PORT", help="Measure against this engine, such as one of `tent serve`."
)
@click.option(
    "--buffer",
    default="span",
    show_default=True,
    help="With --peer: its buffer, which is overwritten.",
)
@json_option
@debug_option
def command(
    config: Path | None,
    transport: str | None,
    listen: str | None,
    advertise: str | None,
    memory: str,
    cases: tuple[str, ...],
    ops: tuple[str, ...],
    seconds: float,
    busy: str | None,
    threads: int,
    peer: str | None,
    buffer: str,
    as_json: bool,
) -> None:
    """Measure how fast blocks move to and from another process.

    A call moves a batch of blocks between random places of 256 MiB on either side. A batch of one is prepared
    once and posted again; a larger batch is new each time, as KV blocks are. The median time of a call is
    printed. Bytes are checked before and after each case; one that is wrong ends the run with exit status 1.

    \b
    Examples:
      tent bench
      tent bench --transport tcp --case 4KiBx1000 --op write
      tent bench --memory registered --busy target
      tent serve --name span --size 256MiB        (on another host, with --listen)
      tent bench --peer 10.0.0.1:7000

    \b
    With --json, a line for each case: peer, op, block, batch, p50_us, GBps, us_per_block, transport, memory
    (and threads, if there are several).
    """
    from tent_core.bench import cases as known
    from tent_core.bench.run import BenchOptions, bench
    from tent_core.types import Opcode

    options = BenchOptions(
        config=engine_config(config, transport, listen, advertise),
        memory=known.Memory(memory),
        cases=tuple(map(known.parse_case, cases)) or known.CASES,
        opcodes=tuple(Opcode[op.upper()] for op in ops) or known.OPCODES,
        seconds=seconds,
        busy=known.Busy(busy or "neither"),
        threads=threads,
        peer=peer,
        buffer=buffer,
    )
    if not as_json:
        console.say(_COLUMNS)
    # Closed here, and not when the garbage is collected, so that the target never outlives an error.
    with closing(bench(options)) as measurements:
        for measurement in measurements:
            if as_json:
                console.emit(measurement.as_json())
            else:
                console.say(_row(measurement))


def _row(found: Measurement) -> str:
    return (
        f"{found.opcode.name.lower():6} {found.case!s:>14} {_time(found.p50_s):>12} "
        f"{found.bytes_per_second / 1e9:>8.2f} {found.p50_s / found.case.batch * 1e6:>11.3f}  "
        f"{found.transport}, {found.memory}"
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.2f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3f} ms"
