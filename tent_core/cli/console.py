"""What commands print: results to stdout, as tables for people or JSON for machines; all else to stderr."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

_STYLES = {"yes": "green", "ok": "green", "no": "red", "bad": "red", "warn": "yellow"}


def emit(document: Any) -> None:
    """Print one JSON document on a line of stdout, at once."""
    click.echo(json.dumps(document))


def emit_indented(document: Any) -> None:
    """Print one JSON document over several lines of stdout, for people who read it as well."""
    click.echo(json.dumps(document, indent=2))


def say(text: str = "") -> None:
    """Print a line of a result on stdout. Nothing in it is taken for markup, so `[::1]:80` stays."""
    _stdout().print(Text(text), soft_wrap=True)


def note(text: str) -> None:
    """Print a line on stderr: what is going on, not a result."""
    click.echo(text, err=True)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    right: Sequence[str] = (),
) -> None:
    """Print a table on stdout. Columns named in `right` are aligned right; verdicts get a colour."""
    shown = Table(
        box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False
    )
    for name in columns:
        # Words may be folded, so that a long reason makes the table higher and not cut.
        shown.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(str(cell), _STYLES.get(str(cell), "")) for cell in row))
    _stdout().print(shown)


def facts(rows: Sequence[Sequence[object]], *, title: str | None = None) -> None:
    """Print rows of equal length without lines or heads on stdout; only the last column is folded."""
    shown = Table(
        box=None,
        show_header=False,
        title=title,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
    )
    for index in range(len(rows[0])):
        last = index == len(rows[0]) - 1
        shown.add_column(overflow="fold", no_wrap=not last)
    for row in rows:
        shown.add_row(*(Text(str(cell), _STYLES.get(str(cell), "")) for cell in row))
    _stdout().print(shown)


def _stdout() -> Console:
    # Made anew each time: it must write to what `sys.stdout` is now, and read the width of now.
    return Console(highlight=False)


def stderr() -> Console:
    """A console on stderr, for progress."""
    return Console(stderr=True, highlight=False)


def rounded(size: float) -> str:
    """A size for people, in binary units and three digits: `1.95 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
