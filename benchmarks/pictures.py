"""Draws what was measured, as SVG, with matplotlib: runs in the Python of the peers, without TENT.

python pictures.py speed OUT.svg < rows.json
python pictures.py growth OUT.svg < growth.json
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

mpl.rcParams.update(
    {
        "svg.fonttype": "none",  # text stays text: small, and legible to those who search
        "svg.hashsalt": "tent",
        "font.family": "sans-serif",
        "font.size": 8,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)
COLOURS = {
    "write": "#1f6fb4",
    "read": "#d9822b",
    "shm": "#1f6fb4",
    "tcp": "#d9822b",
    "mock": "#555",
}
SHAPES = {"write": -0.15, "read": 0.15}


def speed(found: dict[str, Any]) -> Any:
    """A panel for each pair: a dot for each row and operation, a bar for its range, a mark at the floor."""
    figure, panels = plt.subplots(1, len(found["pairs"]), figsize=(12, 3.6), sharey=True)
    whats = list(dict.fromkeys(row["what"] for pair in found["pairs"] for row in pair["rows"]))
    for axes, pair in zip(panels, found["pairs"], strict=True):
        for op, shift in SHAPES.items():
            rows = [row for row in pair["rows"] if row["op"] == op]
            at = [whats.index(row["what"]) + shift for row in rows]
            colour = COLOURS[op]
            axes.hlines(at, [r["low"] for r in rows], [r["high"] for r in rows], colour, lw=1)
            axes.plot([r["ratio"] for r in rows], at, "o", ms=4, color=colour, label=op)
            limited = [(r["limit"], y) for r, y in zip(rows, at, strict=True) if r["limit"]]
            axes.plot(*zip(*limited, strict=True), "|", ms=6, color=colour, alpha=0.5)
        rows = [row for row in pair["rows"] if row["floor"]]
        at = [whats.index(row["what"]) for row in rows]
        axes.plot([row["floor"] for row in rows], at, "d", ms=4, mfc="none", color="#b00", lw=0)
        axes.axvline(1, color="#333", lw=0.8)
        axes.set_xscale("log")
        axes.set_xticks([0.5, 1, 2, 5, 10, 20], labels=["0.5", "1", "2", "5", "10", "20"])
        axes.minorticks_off()
        axes.set_title(pair["title"], fontsize=8)
    panels[0].set_yticks(range(len(whats)), whats)
    panels[0].invert_yaxis()
    figure.supxlabel(
        "peer's time / TENT's: right of 1 TENT is faster.  dot: write, read; bar: lowest to highest;  "
        "red diamond: floor;  |: where the machine's limit is",
        fontsize=8,
    )
    panels[-1].legend(loc="lower right", fontsize=7)
    return figure


def growth(found: dict[str, Any]) -> Any:
    """Time above and memory below, against blocks, buffers and peers."""
    wanted = [
        ("blocks", "us_per_block", "us a block"),
        ("buffers", "batch_us", "us, 1,000 blocks in one of the buffers"),
        ("buffers", "spread_us", "us, 1,000 blocks over all buffers"),
        ("peers", "turns_us", "us, 4 KiB to each peer in turn"),
        ("blocks", "bytes_per_block", "bytes a block"),
        ("buffers", "opener_bytes_per_buffer", "bytes a buffer, opener"),
        ("buffers", "register_another_us", "us, one more registration"),
        ("peers", "bytes_per_peer", "bytes a peer, opener"),
    ]
    figure, panels = plt.subplots(2, 4, figsize=(12, 5))
    for axes, (part, column, label) in zip(panels.flat, wanted, strict=True):
        for transport, rows in found.get(part, {}).items():
            if "bytes" in column:  # what is one page of memory says nothing of a few
                rows = [row for row in rows if row[part] >= 100]
            count = [row[part] for row in rows]
            axes.plot(
                count,
                [row[column] for row in rows],
                "o-",
                ms=3,
                lw=1,
                color=COLOURS[transport],
                label=transport,
            )
            if column == "us_per_block":
                known = [row for row in rows if "limit_us_per_block" in row]
                axes.plot(
                    [row[part] for row in known],
                    [row["limit_us_per_block"] for row in known],
                    ":",
                    color=COLOURS[transport],
                    label=f"{transport}: limit",
                )
        axes.set_xscale("log")
        axes.set_xlabel(part)
        axes.set_title(label, fontsize=8)
        if axes.lines:
            values = [y for line in axes.lines for y in line.get_ydata()]
            if "bytes" in column:
                axes.set_ylim(0, 1.2 * max(values))
            else:  # whole decades, so that what is flat looks flat
                axes.set_yscale("log")
                least, most = math.log10(min(values)), math.log10(max(values))
                axes.set_ylim(10 ** math.floor(least), 10 ** math.ceil(most))
            axes.legend(fontsize=7)
        axes.minorticks_off()
    return figure


def main() -> int:
    """Draw what stands on standard input."""
    what, path = sys.argv[1:]
    figure = {"speed": speed, "growth": growth}[what](json.load(sys.stdin))
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
