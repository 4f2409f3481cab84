"""`tent replay`: real KV-cache traffic between a prefill and a decode process, every byte checked."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tent_core.cli import console
from tent_core.cli.options import (
    DURATION,
    SIZE,
    debug_option,
    engine_config,
    engine_options,
    json_option,
    progress_wanted,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tent_core.replay.decode import Received
    from tent_core.replay.geometry import Geometry
    from tent_core.replay.report import Report
    from tent_core.replay.roles import RoleOptions
    from tent_core.replay.trace import TraceRequest

ROLES = ("both", "prefill", "decode")


@click.command("replay", short_help="Replay a trace of KV-cache traffic, every byte checked.")
@click.argument(
    "trace", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--requests", type=click.IntRange(min=1), metavar="N", help="Only the first N requests."
)
@click.option(
    "--model",
    metavar="NAME",
    help="Whose KV cache it is; `--model list` shows the table. Default: Qwen2.5-0.5B.",
)
@click.option(
    "--bytes-per-token", type=SIZE, help="A KV cache of this size instead, such as 128KiB."
)
@click.option(
    "--pool-size", type=SIZE, default="2GiB", show_default=True, help="KV pool of each process."
)
@click.option(
    "--memory",
    type=click.Choice(["allocated", "registered"]),
    default="allocated",
    show_default=True,
    help="Whether the engine makes the pools, or the application registers its own.",
)
@engine_options
@click.option("--seed", type=int, default=0, show_default=True, help="Where pages land.")
@click.option(
    "--timeout", type=DURATION, default="60s", show_default=True, help="Bound of every single wait."
)
@click.option(
    "--role",
    type=click.Choice(ROLES),
    default="both",
    show_default=True,
    help="Play one side only, the other being elsewhere; see above.",
)
@click.option(
    "--peer", metavar="HOST:PORT", help="With --role prefill: the segment name that decode printed."
)
@json_option
@debug_option
def command(
    trace: Path | None,
    requests: int | None,
    model: str | None,
    bytes_per_token: int | None,
    pool_size: int,
    memory: str,
    config: Path | None,
    transport: str | None,
    listen: str | None,
    advertise: str | None,
    seed: int,
    timeout: float,
    role: str,
    peer: str | None,
    as_json: bool,
) -> None:
    """Replay TRACE: a prefill and a decode process move its KV-cache blocks through TENT.

    TRACE has one JSON request a line, as the traces that Mooncake published: timestamp (ms),
    input_length and output_length (tokens), and hash_ids, one per 512-token block of the prompt.
    Decode has a paged pool, as a serving engine does. For each request prefill sends the blocks
    that decode does not hold, each in pieces of 16 tokens to random pages, and notifies decode,
    which checks every byte. The exit status is 0 only if all of them were right.

    \b
    Examples:
      tent replay examples/traces/small.jsonl
      tent replay TRACE --requests 50 --transport tcp --json
      tent replay TRACE --requests 5 --bytes-per-token 128KiB
      tent replay TRACE --config examples/mixed.yaml

    \b
    Two hosts, or two network namespaces (decode needs no trace):
      host A:  tent replay --role decode --listen 10.0.0.1:7000
      host B:  tent replay TRACE --role prefill --listen 10.0.0.2:0 --peer 10.0.0.1:7000

    \b
    With --json, stdout gets one document with the keys requests, blocks_sent, blocks_reused,
    pieces, bytes, seconds (of transfer), GBps, latency_ms (p50 and p99, of requests that sent
    something), transports (bytes by name), failovers (of pieces), verified, mismatches (pieces).
    --role decode prints {"segment": ...} first, when it is ready.
    """
    from tent_core.replay.roles import PoolMemory, RoleOptions

    if model == "list":
        _show_models(as_json)
        return
    _check_usage(trace, model, bytes_per_token, role, peer)
    options = RoleOptions(
        pool_bytes=pool_size,
        config=engine_config(config, transport, listen, advertise),
        memory=PoolMemory(memory),
        seed=seed,
        timeout=timeout,
    )
    if role == "decode":
        _decode(options, as_json)
        return
    from tent_core.replay.trace import read_trace

    assert trace is not None
    geometry = _geometry(model, bytes_per_token)
    _prefill(options, geometry, read_trace(trace, requests), peer, trace.name, as_json)


def _check_usage(
    trace: Path | None, model: str | None, bytes_per_token: int | None, role: str, peer: str | None
) -> None:
    if model is not None and bytes_per_token is not None:
        raise click.UsageError("--model and --bytes-per-token say the same thing; give one of them")
    if role != "decode" and trace is None:
        raise click.UsageError(
            "which TRACE? One that ships with TENT is examples/traces/small.jsonl"
        )
    if role == "prefill" and peer is None:
        raise click.UsageError(
            "--role prefill needs --peer: the segment name that --role decode printed"
        )
    if role != "prefill" and peer is not None:
        raise click.UsageError("--peer goes with --role prefill")


def _geometry(model: str | None, bytes_per_token: int | None) -> Geometry:
    from tent_core.mistakes import nearest
    from tent_core.replay.geometry import DEFAULT_MODEL, MODELS, of_bytes_per_token

    if bytes_per_token is not None:
        return of_bytes_per_token(bytes_per_token)
    wanted = model or DEFAULT_MODEL
    by_lower = {name.lower(): geometry for name, geometry in MODELS.items()}
    if wanted.lower() not in by_lower:
        close = nearest(wanted, MODELS)
        hint = f" Did you mean {close}?" if close else ""
        raise click.UsageError(
            f"no model {wanted!r} in the table: --model list shows it, --bytes-per-token does without.{hint}"
        )
    return by_lower[wanted.lower()]


def _show_models(as_json: bool) -> None:
    from tent_core.replay.geometry import MODELS

    rows = [
        (g.model, g.layers, g.parts, g.token_bytes, g.bytes_per_token, g.piece_bytes, g.block_bytes)
        for g in MODELS.values()
    ]
    columns = (
        "model",
        "layers",
        "parts",
        "token_bytes",
        "bytes_per_token",
        "piece_bytes",
        "block_bytes",
    )
    if as_json:
        console.emit([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        console.table(
            (
                "model",
                "layers",
                "arrays a layer",
                "a token",
                "a piece (16 tokens)",
                "a block (512)",
            ),
            [
                (
                    name,
                    layers,
                    parts,
                    console.rounded(token),
                    console.rounded(piece),
                    console.rounded(block),
                )
                for name, layers, parts, _, token, piece, block in rows
            ],
            right=("layers", "arrays a layer", "a token", "a piece (16 tokens)", "a block (512)"),
        )


def _decode(options: RoleOptions, as_json: bool) -> None:
    from tent_core.replay.messages import Stopped
    from tent_core.replay.roles import run_decode

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())

    def ready(name: str) -> None:
        if as_json:
            console.emit({"segment": name})
        else:
            console.say(f"decode is ready; now run: tent replay TRACE --role prefill --peer {name}")

    try:
        received = run_decode(options, ready, alive=lambda: not stop.is_set())
    except Stopped:
        console.note("stopped before the replay was over")
        raise click.exceptions.Exit(1) from None
    _report_received(received, as_json)


def _report_received(received: Received, as_json: bool) -> None:
    document = {**asdict(received), "verified": received.verified}
    first = document.pop("first_mismatch")
    if as_json:
        console.emit(document)
    else:
        console.facts([(name.replace("_", " "), value) for name, value in document.items()])
    _exit_if_wrong(received.verified, received.mismatches, first)


def _prefill(
    options: RoleOptions,
    geometry: Geometry,
    requests: tuple[TraceRequest, ...],
    peer: str | None,
    name: str,
    as_json: bool,
) -> None:
    from tent_core.replay.roles import run_prefill
    from tent_core.replay.run import replay

    with _progress(len(requests)) as advance:
        if peer is None:
            report = replay(
                options, geometry, requests, lambda p: advance(p.requests, p.bytes, p.seconds)
            )
        else:
            report = run_prefill(
                options, geometry, requests, peer, lambda t: advance(t.requests, t.bytes, t.seconds)
            )
    if as_json:
        console.emit(report.as_json())
    else:
        _show(report, geometry, name)
    _exit_if_wrong(report.verified, report.mismatches, report.first_mismatch)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int, int, float], None]]:
    """A bar on stderr if that is a terminal; yields what to call with requests, bytes and seconds so far."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console.stderr(),
        transient=True,
        disable=not progress_wanted(),
    )
    with bar:
        task = bar.add_task("", total=total, rate="")

        def advance(requests: int, size: int, seconds: float) -> None:
            rate = f"{console.rounded(size)} at {size / seconds / 1e9:.2f} GB/s" if seconds else ""
            bar.update(task, completed=requests, rate=rate)

        yield advance


def _show(report: Report, geometry: Geometry, name: str) -> None:
    carried: list[tuple[str, Any]] = [
        (f"by {transport}", f"{console.rounded(size)} ({size / max(report.bytes, 1):.0%})")
        for transport, size in report.transports.items()
    ]
    console.facts(
        [
            ("requests", f"{report.requests:,} of {name}"),
            (
                "KV cache",
                f"{geometry.model}: {console.rounded(geometry.block_bytes)} a block, "
                f"pieces of {console.rounded(geometry.piece_bytes)}",
            ),
            ("blocks sent", f"{report.blocks_sent:,}, and {report.blocks_reused:,} held already"),
            ("pieces", f"{report.pieces:,}"),
            ("bytes", f"{report.bytes:,} ({console.rounded(report.bytes)})"),
            *carried,
            ("transfer", f"{report.seconds:.3f} s, {report.gigabytes_per_second:.2f} GB/s"),
            (
                "latency",
                f"p50 {report.latency_p50_ms:.2f} ms, p99 {report.latency_p99_ms:.2f} ms a request",
            ),
            ("failovers", f"{report.failovers:,}"),
            ("verified", "yes" if report.verified else "no"),
            ("mismatches", f"{report.mismatches:,}"),
        ]
    )


def _exit_if_wrong(verified: bool, mismatches: int, first: str) -> None:
    if not verified:
        console.note(
            f"tent: {mismatches} pieces do not hold what was sent; the first: {first or 'not known'}"
        )
        raise click.exceptions.Exit(1)
