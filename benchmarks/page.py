"""`docs/speed.md`, from what `compare.py` measured, and the numbers of its picture."""

from __future__ import annotations

from typing import Any

import floors
import tables
from figures import Figure
from results import IDLE, Result

HEAD = """# Speed

Times of TENT beside those of what one would pick instead: the reference C++ engine ("mooncake", over its
TCP transport) and NIXL over UCX ("nixl": what UCX finds best on one host, which is shared memory;
"nixl-tcp": TCP alone; "nixl-prepped": picking from descriptors that were prepared once). And beside the
limits of the machine: one `memcpy`, `process_vm_writev` with its vectors prepared, one blocking TCP stream.
All move the same blocks between the same random places of 256 MiB in two processes on one host; a batch of
one is prepared once and posted again, a larger one is new each time. What is measured of TENT is what an
application gets: checks, permissions and statistics are on, and bytes are verified before and after.

This page is written by `python benchmarks/compare.py --busy all --draw`; see
[benchmarks](../benchmarks/README.md). Numbers from another machine or another day are not comparable with
these.

![Peers' times over TENT's, and TENT's over the limits](speed.svg)
"""
GROWTH = """
## Growth

![Time and memory against blocks, buffers and peers](growth.svg)

Written by `python benchmarks/growth.py --draw`. What is not flat, and why:

- A call has a fixed cost, so a block of a small batch costs more than one of a large batch. Of 58
  microseconds for 100 blocks of 4 KiB over shm the copy takes 14, checks 14, the choice of a transport 6,
  the plan of the copy 10, reports and statistics 8: some forty array operations of half a microsecond, and
  of a whole one just after a copy, which leaves little in the caches.
- Beyond the caches a block costs more: its memory is no longer there. The limit rises with it.
- A batch that spans many buffers marks each of them as in use, so that nobody takes memory away from under
  it. What is registered and not used by the call costs it nothing.
- One more registration copies the description of all buffers, which is immutable for those who read it.
- Peers in turn are slower than the same peer again, since what is kept for each has left the caches. With
  tcp the receiver of each is a process of its own, that has to be woken; 500 of them share one machine here.
"""


WHY = """
What is known of rows that are below their floor, here or in other runs:

- A read of 16 MiB of allocated memory takes less than one memcpy does (two threads copy, in rows that stay
  in the cache): how many times nixl's time that is says how fast nixl was.
- With a busy target a tcp write of 1 MiB takes as long as its two copies one after the other (220
  microseconds, else 113) where the kernel lets the receiver share the sender's processor. Neither a shorter
  time slice for the receiver nor one that never sleeps changed that; a receiver bound to one processor did,
  in one process of three.
- 100 blocks of 4 KiB over shm would have to take 30 microseconds, of which their copy has 14. An array
  operation costs half a microsecond however short it is, so Python does not get there: a few hundred
  compiled lines for the checks and the plan would.
- Several threads with tcp, from 1 MiB on: one thread has both processors of this machine already, its own
  and the receiver's. 1.3 times its rate would be a write of 1 MiB every 90 microseconds, or 1,000 x 4 KiB
  every 376; two bare processes with a stream each manage one every 105 and every 561.
- Beside a thread that computes in the initiator, what waits loses the interpreter lock for a switch interval
  of 5 ms. shm does not wait; tcp does, once a message is longer than what the sockets hold.
"""


def speed(result: Result, figures: list[Figure], others: dict[str, list[Figure]]) -> str:
    """The whole page; `others` are the figures of other benchmarks, by their names."""
    parts = [HEAD.rstrip(), f"Measured on: {tables.machine(result)}.", *tables.kinds(result)]
    parts.append("A star marks a ratio below its floor, or a time over its bound.")
    for state in result.states():
        title = "Nothing else runs" if state == IDLE else f"Beside a busy thread: {state}"
        parts += [f"## {title}", tables.ratios(result, state), tables.over_limits(result, state)]
    if len(result.states()) > 1:
        parts.append("## Idle and busy side by side")
        parts += [tables.beside_idle(result, column) for column in floors.COLUMNS]
    parts += [GROWTH.strip(), "## What is below its floor", tables.missed(figures), WHY.strip()]
    if others:
        parts.append("## Figures of the other benchmarks")
    for name, found in others.items():
        parts += [f"`benchmarks/{name}.py`:", "\n".join(f"- {figure}" for figure in found)]
    parts.append("## Times")
    parts.append(
        "Medians of the processes' medians, and in brackets the lowest and the highest of them."
    )
    for state in result.states():
        for column in floors.COLUMNS:
            parts += [f"### {column.title}, {state}", tables.times(result, column, state)]
    return "\n\n".join(parts) + "\n"


def picture(result: Result) -> dict[str, Any]:
    """For each pair of a column and a peer: rows of ratio, its range, its floor, and where the limit is."""
    return {
        "pairs": [
            {"title": f"{column.title}, beside {name}", "rows": _rows(result, column, name)}
            for column in floors.COLUMNS
            for name in column.peers
        ],
    }


def _rows(result: Result, column: floors.Column, name: str) -> list[dict[str, Any]]:
    rows = []
    for case in result.cases():
        own, other = result.spread(column.tent, case), floors.peer(result, name, case)
        limit = result.spread(column.limit, case)
        if own is None or other is None:
            continue
        rows.append(
            {
                "op": case.op,
                "what": case.what,
                "ratio": other.median / own.median,
                "low": other.lowest / own.highest,
                "high": other.highest / own.lowest,
                "floor": column.peers[name].get((case.block, case.batch)),
                "limit": other.median / limit.median if limit else None,
            }
        )
    return rows
